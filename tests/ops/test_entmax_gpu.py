"""adasplash's kernels for sparse and gsh against eager attention in float64: by Triton's interpreter, and on a GPU."""

import math
import os
import subprocess
import sys

import pytest
import torch

import outeffhop
from outeffhop.functional import entmax
from outeffhop.methods import Method
from outeffhop.ops import entmax_gpu
from outeffhop.ops.call import prepare
from outeffhop.ops.eager import eager_attention
from outeffhop.ops.probe import watching
from outeffhop.state import attend
from tests.ops.reference import DEVICES

needs_kernels = pytest.mark.skipif(
    not entmax_gpu.available(), reason="no adasplash or no Triton: pip install 'outeffhop[entmax-gpu]'"
)
needs_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")

# batch, query heads, key heads, length, head size, value size
SHAPES = [
    (2, 2, 1, 37, 16, 16),
    (1, 2, 2, 70, 24, 20),
    (1, 1, 1, 1, 8, 8),
    (1, 1, 1, 64, 16, 16),
    (1, 1, 1, 128, 16, 16),
]
ORDERS = [1.25, 1.5, 2.0]


def inputs(shape, device, dtype, size_of_scores=1.5):
    batch, heads, groups, length, size, value_size = shape
    random = torch.Generator().manual_seed(sum(shape))
    q = size_of_scores * torch.randn(batch, heads, length, size, generator=random)
    k = size_of_scores * torch.randn(batch, groups, length, size, generator=random)
    v = torch.randn(batch, groups, length, value_size, generator=random)
    return [t.to(device, dtype).requires_grad_() for t in (q, k, v)]


def compare(order, shape, device, dtype, is_causal, scale, tolerance, size_of_scores=1.5):
    q, k, v = inputs(shape, device, dtype, size_of_scores)
    call = prepare(q, k, v, None, 0.0, is_causal, scale, True, -math.inf, False)
    out = entmax_gpu.attend(call, order)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = out, *torch.autograd.grad(out, (q, k, v), grad)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    true, _ = eager_attention(*leaves, lambda s: entmax(s, order), None, 0.0, is_causal, scale, enable_gqa=True)
    wanted = true, *torch.autograd.grad(true, leaves, grad.double())
    for name, got, want in zip(["out", "q", "k", "v"], found, wanted, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1.0)
        assert error <= tolerance, (name, shape, is_causal, order, float(error))


INTERPRETED = """
import torch
from tests.ops import test_entmax_gpu as here

for shape in here.SHAPES:
    for is_causal in (False, True):
        for order in here.ORDERS if shape[3] < 64 else (2.0,):
            here.compare(order, shape, "cpu", torch.float32, is_causal, None, 1e-5)
here.compare(2.0, here.SHAPES[0], "cpu", torch.float32, True, 0.3, 1e-5)
here.compare(2.0, here.SHAPES[0], "cpu", torch.float32, False, None, 5e-5, 6.0)
"""


@needs_kernels
def test_outputs_and_gradients_by_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not run with this NumPy")
    assert done.returncode == 0, done.stderr


@needs_cuda
@needs_kernels
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 4, 2, 257, 80, 80), (1, 2, 2, 1000, 128, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_and_gradients_on_a_gpu(dtype, shape, is_causal):
    for order in ORDERS:
        compare(order, shape, "cuda", dtype, is_causal, None, 3e-2 if dtype == torch.bfloat16 else 4e-3)
    compare(2.0, shape, "cuda", dtype, is_causal, 0.3, 3e-2 if dtype == torch.bfloat16 else 4e-3)


@needs_cuda
@needs_kernels
def test_the_methods_take_them_on_a_gpu(monkeypatch):
    served = []
    monkeypatch.setattr(entmax_gpu, "attend", lambda call, order: served.append(order) or call.value)
    q, k, v = inputs((1, 2, 2, 64, 16, 16), "cuda", torch.bfloat16)
    for name in ("sparse", "gsh(alpha=1.25)", "gsh(alpha=3)"):
        attend(Method.parse(name).normalizer, q, k, v)
    attend(Method.parse("sparse").normalizer, q, k, v, need_weights=True)
    attend(Method.parse("gsh").normalizer, q, k, v, learned=torch.tensor(1.5, device="cuda"))
    assert served == [2.0, 1.25]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (dict(), None),
        (dict(alpha=1.0), "α from 1.01 to 2.0"),
        (dict(alpha=2.5), "got 2.5"),
        (dict(learned=True), "no gradient for a learned α"),
        (dict(dtype=torch.float32), "float16 and bfloat16, got torch.float32"),
        (dict(keys=6), "as many queries as keys, got 5 and 6"),
        (dict(mask=torch.ones(5, 5, dtype=torch.bool)), "no attn_mask"),
        (dict(dropout_p=0.1), "no dropout"),
        (dict(window=(2, 0)), "no window"),
        (dict(size=512), "head sizes up to 256"),
        (dict(wanting="k"), "together with the query's"),
    ],
    ids=str,
)
def test_calls_that_are_not_served(changed, words, monkeypatch):
    monkeypatch.setattr(entmax_gpu, "available", lambda: True)
    monkeypatch.setattr(entmax_gpu, "_DEVICE", "cpu")
    dtype, size, keys = changed.get("dtype", torch.bfloat16), changed.get("size", 16), changed.get("keys", 5)
    q, k = torch.randn(1, 2, 5, size, dtype=dtype), torch.randn(1, 2, keys, size, dtype=dtype)
    {"k": k, None: q}[changed.get("wanting")].requires_grad_()
    options = changed.get("mask"), changed.get("dropout_p", 0.0), False, None, False, -math.inf, False
    call = prepare(q, k, k, *options, changed.get("window"))
    why = entmax_gpu.why_not(call, changed.get("alpha", 1.5), changed.get("learned", False))
    assert (why is None) if words is None else words in why


def test_a_watch_sees_eager_attention(monkeypatch):
    monkeypatch.setattr(entmax_gpu, "available", lambda: True)
    monkeypatch.setattr(entmax_gpu, "_DEVICE", "cpu")
    q = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    call = prepare(q, q, q, None, 0.0, False, None, False, -math.inf, False)
    with watching(lambda *_: None):
        assert "watch" in entmax_gpu.why_not(call, 1.5)


def test_explained_by_method(monkeypatch):
    q = torch.randn(1, 2, 5, 16, dtype=torch.bfloat16)
    sparse = outeffhop.explain(q, q, q, method="sparse")
    assert sparse.chosen == "eager"
    assert "cuda" in sparse.reasons["adasplash"]
    assert "CUDA" in outeffhop.explain(q, q, q, method="clipped").reasons["triton"]
    assert outeffhop.explain(q, q, q, method="outeffhop").chosen == "cpu"
    monkeypatch.setattr(entmax_gpu, "_DEVICE", "cpu")
    monkeypatch.setattr(entmax_gpu, "available", lambda: False)
    assert "pip install" in str(outeffhop.explain(q, q, q, method="gsh(alpha=1.2)"))
    monkeypatch.setattr(entmax_gpu, "available", lambda: True)
    assert outeffhop.explain(q, q, q, method="gsh(alpha=1.2)").chosen == "adasplash"
    assert "learned" in outeffhop.explain(q, q, q, method="gsh").reasons["adasplash"]
