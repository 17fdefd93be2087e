"""The Triton kernel: its numbers by Triton's interpreter, which needs no GPU, and its safety where warps race."""

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import outeffhop as oh
from outeffhop.ops import sink_triton
from tests.ops.reference import DEVICES

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="no Triton: CPU builds of PyTorch come without it"
)
BY_HAND = """
import math, torch
from outeffhop.ops import sink, sink_triton

torch.manual_seed(0)
for shape, padded in (((2, 3, 5, 7), 5), ((1, 2, 33, 64), 64), ((2, 2, 40, 128), 40)):
    heads, length = shape[1:3]
    for s in (0.0, -1.5, torch.randn(heads)):
        out, lse = torch.randn(shape), 3 * torch.randn(*shape[:2], padded)
        lse[0, 0, 0] = -math.inf
        wanted_out, wanted_lse = sink.apply_sink(out.double(), lse.double(), s)  # of copies
        got_out, got_lse = sink_triton.apply_sink(out, lse, s)
        torch.testing.assert_close(got_out.double(), wanted_out, atol=2e-6, rtol=0)
        torch.testing.assert_close(got_lse.double(), wanted_lse, atol=1e-6, rtol=0)
    a, b = torch.randn(shape), torch.randn(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
    for a, b in ((a, b), (b, a), (a, torch.ones(()).expand(shape)), (a[:, :, ::2], b[:, :, ::2])):
        torch.testing.assert_close(
            sink_triton.row_dot(a, b).double(), (a.double() * b.double()).sum(-1), atol=1e-5, rtol=0
        )
"""


@needs_triton
def test_kernel_by_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", BY_HAND], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_triton
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("learned", [False, True])
def test_no_warp_writes_before_all_have_read(kind, learned):
    """In the code that is made for an H200: several warps load the same rows of the logsumexp, one stores them."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = sink_triton._apply_sink_kernel
    known = {"SIZE": 64, "UNIT": 8, "LEARNED": learned, "ROWS": 32, "WIDTH": 64}
    types = {"out_ptr": f"*{kind}", "lse_ptr": "*fp32", "sink_ptr": "*fp32", "sink_value": "fp32"}
    types = {name: "constexpr" if name in known else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, types, {(kernel.arg_names.index(name),): value for name, value in known.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ttgir"]
    kinds = re.findall(r"tt\.load|tt\.store|gpu\.barrier|ttg\.barrier", made)
    until_stored = kinds[: kinds.index("tt.store")]
    assert "tt.load" in until_stored
    assert until_stored[-1].endswith("barrier")


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_busy_gpu_changes_nothing(dtype):
    """Warps are held up at any point: every row must come out as on an idle GPU."""
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(8, 8, 512, 64, device="cuda", dtype=dtype, generator=random) for _ in range(3))
    alone = oh.attention(q, k, v, sink=0.0, is_causal=True)
    load = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(beside):
            for _ in range(4):
                load = (load @ load).clamp(-1, 1)
        assert torch.equal(oh.attention(q, k, v, sink=0.0, is_causal=True), alone)


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["number", "per head", "one for all"])
def test_what_was_compiled_once_serves_other_lengths(dtype, kind, monkeypatch):
    """The second and later launches skip Triton: every length, batch, layout and padding must come out right."""
    from outeffhop.ops import sink

    random = torch.Generator("cuda").manual_seed(0)
    for batch, heads, length, padded in ((2, 3, 5, 32), (1, 4, 1, 1), (3, 2, 64, 64), (2, 5, 100, 128), (1, 1, 33, 33)):
        s = torch.randn(heads, device="cuda", generator=random)
        s = {"number": -0.5, "per head": s, "one for all": s[:1].expand(heads)}[kind]
        for lead in ((batch, length, heads), (batch, heads, length)):
            out = torch.randn(*lead, 64, device="cuda", generator=random).to(dtype)
            out = out.transpose(1, 2) if lead[1] == length and lead[2] == heads else out
            out = out if out.shape[1] == heads else out.transpose(1, 2)
            lse = 3 * torch.randn(batch, heads, padded, device="cuda", generator=random)
            lse[0, 0, 0] = -math.inf
            with monkeypatch.context() as patch:
                patch.setattr(sink_triton, "triton", None)
                wanted_out, wanted_lse = sink.apply_sink(out.double(), lse.double(), s)  # of copies
            found_out, found_lse = sink_triton.apply_sink(out, lse, s)
            torch.testing.assert_close(found_out, wanted_out.to(dtype))
            torch.testing.assert_close(found_lse[..., :length], wanted_lse[..., :length].float())


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 40, 7])
def test_row_dots_of_other_layouts(dtype, size):
    random = torch.Generator("cuda").manual_seed(0)
    for batch, heads, length in ((2, 3, 5), (1, 4, 1), (3, 2, 64), (2, 5, 100)):
        a = torch.randn(batch, heads, length, size, device="cuda", generator=random).to(dtype)
        b = torch.randn(batch, length, heads, size, device="cuda", generator=random).to(dtype).transpose(1, 2)
        unaligned = torch.randn(a.numel() + 1, device="cuda", generator=random).to(dtype)[1:].view_as(a)
        for pair in ((a, a), (a, b), (b, a), (unaligned, b), (b[:1, :1, :1, :1].expand_as(a), b)):
            expected = (pair[0].double() * pair[1].double()).sum(-1).float()
            torch.testing.assert_close(sink_triton.row_dot(*pair), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("learned", [False, True])
def test_cuda_graphs(learned):
    """A plain call captured in a CUDA graph, and a compiled one that runs as such graphs, train as always."""
    torch._dynamo.reset()
    random = torch.Generator("cuda").manual_seed(0)
    shape = (2, 4, 64, 32)
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=random).requires_grad_() for _ in "qkv"]
    sink = torch.randn(4, device="cuda", generator=random).requires_grad_() if learned else 0.0
    leaves += [sink] if learned else []

    def step():
        return torch.autograd.grad(oh.attention(*leaves[:3], sink=sink, is_causal=True).float().square().sum(), leaves)

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    compiled = torch.compile(lambda *t: oh.attention(*t[:3], sink=sink, is_causal=True), mode="reduce-overhead")
    for _ in range(3):
        found = torch.autograd.grad(compiled(*leaves).float().square().sum(), leaves)
    for a, b, c in zip(expected, captured, found, strict=True):
        torch.testing.assert_close(b, a, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(c, a, atol=2e-2, rtol=2e-2)
