"""Clipped softmax in Triton against eager attention in float64: by Triton's interpreter, and on a GPU."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from outeffhop.methods import Clipped, Method
from outeffhop.ops import clipped, clipped_triton
from outeffhop.ops.call import prepare
from outeffhop.ops.eager import eager_attention
from outeffhop.ops.probe import probing
from outeffhop.state import attend
from tests.ops.reference import DEVICES

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="no Triton: CPU builds of PyTorch come without it"
)
needs_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")

# batch, query heads, key heads, queries, keys, head size, value size
SHAPES = [(1, 2, 2, 5, 7, 8, 8), (2, 4, 2, 70, 70, 16, 24), (1, 2, 1, 33, 80, 64, 64)]
METHODS_TRIED = [Clipped(gamma=-0.025), Clipped(gamma=-0.1, zeta=1.1, n=1.0), Clipped(gamma=None, alpha=4.0, n=2.0)]


def inputs(shape, device, dtype, mask_kind):
    batch, heads, groups, queries, keys, size, value_size = shape
    random = torch.Generator().manual_seed(sum(shape))
    q = 2 * torch.randn(batch, heads, queries, size, generator=random)
    k = 2 * torch.randn(batch, groups, keys, size, generator=random)
    v = torch.randn(batch, groups, keys, value_size, generator=random)
    mask = None
    if mask_kind == "bool":
        mask = torch.rand(batch, 1, queries, keys, generator=random) > 0.3
        mask[0, 0, 0] = False  # a query without keys
    if mask_kind == "additive":
        mask = torch.randn(1, heads, 1, keys, generator=random)
    moved = [t.to(device, dtype).requires_grad_() for t in (q, k, v)]
    if mask is not None:
        mask = mask.to(device) if mask.dtype == torch.bool else mask.to(device, dtype)
    return *moved, mask


def truth(normalizer, q, k, v, mask, is_causal, grad):
    """Output and gradients of eager attention in float64, from the same numbers."""
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    out, _ = eager_attention(*leaves, normalizer, mask, 0.0, is_causal, enable_gqa=True)
    return out, *torch.autograd.grad(out, leaves, grad.double())


def compare(normalizer, shape, device, dtype, mask_kind, is_causal, tolerance):
    q, k, v, mask = inputs(shape, device, dtype, mask_kind)
    call = prepare(q, k, v, mask, 0.0, is_causal, None, True, normalizer.clipping(k.shape[-2])[2], False)
    gamma, zeta, _ = normalizer.clipping(k.shape[-2])
    out = clipped.attend(call, gamma, zeta)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = out, *torch.autograd.grad(out, (q, k, v), grad)
    for name, got, want in zip(
        ["out", "q", "k", "v"], found, truth(normalizer, q, k, v, mask, is_causal, grad), strict=True
    ):
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1.0)
        assert error <= tolerance, (name, shape, mask_kind, is_causal, normalizer, float(error))


INTERPRETED = """
import torch
from tests.ops import test_clipped as here
from outeffhop.ops import clipped

clipped._library.impl("clipped", clipped._forward, "CPU")
clipped._library.impl("clipped_backward", clipped._backward, "CPU")
for shape in here.SHAPES:
    for mask_kind in (None, "bool", "additive"):
        for is_causal in (False, True):
            for normalizer in here.METHODS_TRIED if shape[3] < 10 else here.METHODS_TRIED[1:2]:
                here.compare(normalizer, shape, "cpu", torch.float32, mask_kind, is_causal, 2e-5)
here.check_dropout("cpu", torch.float32, 1e-5)
"""


@needs_triton
def test_outputs_and_gradients_by_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not run with this NumPy")
    assert done.returncode == 0, done.stderr


def check_dropout(device, dtype, tolerance):
    """The same weights are dropped in the output and in the gradients, and as many as were asked for."""
    q, k, _, _ = inputs((1, 2, 1, 48, 64, 16, 16), device, dtype, None)
    one_hot = torch.eye(64, device=device, dtype=dtype)[None, None]  # values that make the output the weights
    call = prepare(q, k, one_hot.requires_grad_(), None, 0.4, False, None, True, 0.0, False)
    torch.manual_seed(0)
    dropped = clipped.attend(call, -0.001, 1.0)
    gradients = torch.autograd.grad(dropped.square().sum(), (q, k, one_hot))
    leaves = [t.detach().double().requires_grad_() for t in (q, k, one_hot)]
    _, weights = eager_attention(*leaves, Clipped(gamma=-0.001, n=1.0), enable_gqa=True)
    kept = (dropped.detach() != 0).double() / 0.6
    positive = weights > 1e-3
    assert abs(float(kept[positive].mean()) - 1.0) < 0.1
    wanted = (weights * kept) @ leaves[2].expand(1, 2, 64, 64)
    assert (wanted - dropped)[positive].abs().max() <= tolerance
    for got, want in zip(gradients, torch.autograd.grad(wanted.square().sum(), leaves), strict=True):
        assert (got.double() - want).abs().max() <= 10 * tolerance * want.abs().max().clamp(min=1.0)


@needs_cuda
@needs_triton
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask_kind", [None, "bool", "additive"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 3, 129, 257, 80, 80), (1, 2, 2, 64, 64, 256, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_and_gradients_on_a_gpu(dtype, shape, mask_kind, is_causal):
    for normalizer in METHODS_TRIED:
        compare(normalizer, shape, "cuda", dtype, mask_kind, is_causal, 2e-2 if dtype == torch.bfloat16 else 3e-3)


@needs_cuda
@needs_triton
def test_dropout_on_a_gpu():
    check_dropout("cuda", torch.float16, 3e-3)


@needs_cuda
@needs_triton
def test_memory_is_linear_and_compiled_code_the_same():
    normalizer = Method.parse("clipped-outeffhop").normalizer

    def step(q, k, v):
        return attend(normalizer, q, k, v, is_causal=True)[0].square().sum()

    q, k, v = (torch.randn(1, 8, 8192, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(step(q, k, v), (q, k, v))
    assert torch.cuda.max_memory_allocated() - before < 16 * q.numel() * q.element_size()  # scores alone: 128 times
    for got, want in zip(torch.autograd.grad(torch.compile(step)(q, k, v), (q, k, v)), grads, strict=True):
        torch.testing.assert_close(got, want)


@needs_triton
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("kernel", ["_forward_kernel", "_query_kernel", "_key_kernel"])
def test_kernels_compile_for_an_h200(kernel, size):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(clipped_triton, kernel)
    rows = torch.empty(1, 1, 1, size, dtype=torch.bfloat16)
    options = clipped_triton._options(rows, rows)
    known = {"MASK": 1, "CAUSAL": True, "DROPOUT": True, **{n: v for n, v in options.items() if n.isupper()}}
    pointers = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "mask_ptr": "*i1", "seed_ptr": "*i64"}
    numbers = dict.fromkeys(("scale", "sink", "gamma", "zeta", "dropout_p"), "fp32")
    types = {
        name: "constexpr" if name in known
        else pointers.get(name, "*bf16") if name.endswith("_ptr")
        else numbers.get(name, "i32")
        for name in function.arg_names
    }  # fmt: skip
    source = ASTSource(function, types, {(function.arg_names.index(name),): value for name, value in known.items()})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 2})
    assert made.metadata.shared <= 227 * 1024


def test_a_cpu_is_left_to_eager_attention():
    q = torch.randn(1, 2, 4, 8)
    assert "CUDA" in clipped.why_not(prepare(q, q, q, None, 0.0, False, None, False, 0.0, False))
    out, weights = attend(Clipped(gamma=-0.1), q, q, q)
    assert weights is None
    torch.testing.assert_close(out, eager_attention(q, q, q, Clipped(gamma=-0.1))[0])


@needs_cuda
@needs_triton
def test_probes_and_weights_are_eager():
    q = torch.randn(1, 2, 4, 16, device="cuda", dtype=torch.bfloat16)
    seen = []
    with probing(lambda part, t: seen.append(part) or t):
        attend(Clipped(), q, q, q)
    assert "probabilities" in seen
    assert attend(Clipped(), q, q, q, need_weights=True)[1] is not None


def test_clipping_of_the_methods():
    assert Method.parse("clipped(gamma=-0.03)").normalizer.clipping(10) == (-0.03, 1.0, -math.inf)
    assert Method.parse("clipped-outeffhop(alpha=12)").normalizer.clipping(48) == (-0.25, 1.0, 0.0)
    assert Method.parse("outeffhop").normalizer.clipping(10) is None
