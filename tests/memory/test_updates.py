"""The ways of computing an update against softmax_n in float64, and products of lower precision."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outeffhop.functional import logsumexp_n, softmax_n
from outeffhop.memory import HopfieldMemory, updates
from outeffhop.ops import explain

SIZES = [(5, 3, 4, 2), (33, 70, 16, 16), (1, 130, 7, 24)]  # queries, patterns, size, size of values
SINKS = [-math.inf, 0.0, math.log(6.5)]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def given(size: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    queries, patterns, d, dv = size
    random = torch.Generator().manual_seed(sum(size))
    x, y, v = (torch.randn(n, m, generator=random) for n, m in ((queries, d), (patterns, d), (patterns, dv)))
    return x.to(device, dtype), 2 * y.to(device, dtype), v.to(device, dtype)


def truth(x: Tensor, y: Tensor, v: Tensor, beta: float, sink: float) -> tuple[Tensor, Tensor, Tensor]:
    scores = beta * x.double() @ y.double().T
    lse = logsumexp_n(scores, math.exp(sink))
    return softmax_n(scores, math.exp(sink)) @ v.double(), torch.exp(sink - lse), lse


def force(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "_writes_scores", lambda x: way == "scores")
    monkeypatch.setattr(updates, "_parts", lambda x, patterns: min(4, patterns) if way == "parts" else 1)
    monkeypatch.setattr(updates, "_SCORES", 8 * 11 * 40)  # so that queries come in several blocks


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("way", ["fused", "parts", "scores"])
def test_every_way_is_exact(way: str, size: tuple[int, int, int, int], sink: float, monkeypatch: pytest.MonkeyPatch):
    force(way, monkeypatch)
    x, y, v = given(size, torch.float64)
    for found, wanted in zip(updates.fused_update(x, y, 0.7, sink, v), truth(x, y, v, 0.7, sink), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        updates.fused_update(x, y, 0.7, sink, v, need_lse=False)[:2], truth(x, y, v, 0.7, sink)[:2]
    )
    state, no_op, _ = updates.fused_update(x, y, 0.7, sink)
    torch.testing.assert_close((state, no_op), truth(x, y, y, 0.7, sink)[:2])


@pytest.mark.parametrize("way", ["fused", "parts", "scores"])
def test_scores_of_ten_thousand(way: str, monkeypatch: pytest.MonkeyPatch):
    force(way, monkeypatch)
    x, y, v = given(SIZES[1], torch.float64)
    for beta in (1e4, 1e-4):
        for found, wanted in zip(updates.fused_update(x, y, beta, 0.0, v), truth(x, y, v, beta, 0.0), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sink", SINKS)
def test_the_gradient_passes_through_parts(sink: float, monkeypatch: pytest.MonkeyPatch):
    force("parts", monkeypatch)
    x, y, v = given(SIZES[1], torch.float64)
    x.requires_grad_()
    found, wanted = updates.fused_update(x, y, 0.7, sink, v), truth(x, y, v, 0.7, sink)
    for got, want in zip(found, wanted, strict=True):
        both = (torch.autograd.grad(t.sin().sum(), x, retain_graph=True)[0] for t in (got, want))
        torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)


def test_no_queries(monkeypatch: pytest.MonkeyPatch):
    for way in ("fused", "parts", "scores"):
        force(way, monkeypatch)
        found = HopfieldMemory(torch.eye(6), values=torch.rand(6, 2)).retrieve(torch.empty(0, 6))
        assert found.state.shape == (0, 6)
        assert found.value.shape == (0, 2)


@pytest.mark.parametrize("way", ["parts", "scores"])
@pytest.mark.parametrize("steps", [1, 3, None])
def test_a_whole_retrieval(way: str, steps: int | None, monkeypatch: pytest.MonkeyPatch):
    x, y, v = given(SIZES[1], torch.float64)
    memory = HopfieldMemory(y, 0.7, values=v)
    wanted = memory.retrieve(x, steps, trace=True)
    force(way, monkeypatch)
    found = memory.retrieve(x, steps, trace=True)
    for name in ("state", "energy", "no_op", "value", "steps", "converged"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-9, atol=1e-12, msg=name)


def test_exactly_so_many_updates_are_the_same_as_one_after_another():
    x, y, v = given(SIZES[1], torch.float64)
    memory = HopfieldMemory(y, 0.7, values=v)
    once = memory.retrieve(x.reshape(3, 11, 16), 3, trace=True)
    state = x.reshape(3, 11, 16)
    for step in range(3):
        torch.testing.assert_close(once.energy[step], memory.energy(state))
        last = memory.retrieve(state)
        state = last.state
    torch.testing.assert_close(once.energy[3], memory.energy(state))
    for name in ("state", "no_op", "value", "converged"):
        torch.testing.assert_close(getattr(once, name), getattr(last, name))
    assert (once.steps == 3).all()


@pytest.mark.parametrize("device", DEVICES)
def test_products_in_bfloat16(device: str):
    x, y, v = given(SIZES[1], torch.float32, device)
    memory = HopfieldMemory(y, 0.25, values=v)
    exact, found = memory.retrieve(x), memory.retrieve(x, precision="bfloat16")
    assert found.state.dtype == found.value.dtype == found.no_op.dtype == torch.float32
    for name in ("state", "value", "no_op"):
        got, want = getattr(found, name), getattr(exact, name)
        assert not torch.equal(got, want)
        assert (got - want).abs().max() < 0.03 * want.abs().max(), name
    assert memory.retrieve(x, None, precision="bfloat16").converged.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(precision="half"), "precision='half'"),
        (dict(precision="tf32"), "for CUDA devices"),
        (dict(precision="bfloat16", dtype=torch.float64), "memories in float32"),
        (dict(precision="bfloat16", method="sparse"), "only softmax models"),
    ],
)
def test_precisions_that_are_not_served(options: dict[str, object], message: str):
    dtype, method = options.get("dtype", torch.float32), options.get("method", "outeffhop")
    memory = HopfieldMemory(torch.eye(4, dtype=dtype), method=method)
    with pytest.raises(ValueError, match=message):
        memory.retrieve(torch.eye(4, dtype=dtype), precision=options["precision"])


def test_tf32_is_set_for_the_products_alone():
    before = torch.backends.cuda.matmul.fp32_precision
    with updates._tf32(True):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before
    with updates._tf32(False):
        assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, sink: float):
    close = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    for size in (*SIZES, (500, 5003, 64, 64)):
        x, y, v = given(size, dtype, "cuda")
        for grad in (False, True):
            x.requires_grad_(grad)
            found = updates.fused_update(x, y, 0.25, sink, v)
            for got, want in zip(found, truth(x, y, v, 0.25, sink), strict=True):
                assert (got.double() - want).abs().max() <= close * want.abs().max().clamp(min=1.0), (size, grad)
    if dtype == torch.float32:
        memory, x = HopfieldMemory(y, 0.25), x.detach()
        exact, rounded = memory.retrieve(x).state, memory.retrieve(x, precision="tf32").state
        assert 0 < (exact - rounded).abs().max() < 1e-2 * exact.abs().max()


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
def test_scores_are_held_a_block_at_a_time():
    x, y, _ = given((8192, 100_000, 32, 1), torch.float32, "cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    updates.fused_update(x, y, 0.25, 0.0, need_lse=False)
    assert torch.cuda.max_memory_allocated() - before < 3 * updates._SCORES  # all scores: 12 times


def test_the_way_is_told_in_a_word():
    x = torch.randn(3, 8)
    assert updates.way(x, x) == "fused"
    assert explain(x, x, x, return_lse=True).chosen == "cpu"
