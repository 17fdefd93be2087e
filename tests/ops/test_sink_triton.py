"""The Triton kernel: its numbers by Triton's interpreter, which needs no GPU, and its safety where warps race."""

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
