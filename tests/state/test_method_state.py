"""What a method adds to an attention: first values, what a new method takes over, what a schedule holds, the choice."""

import copy
import math

import pytest
import torch
from torch import nn

from outeffhop.methods import METHODS, Method
from outeffhop.state import MethodState, attend, fused_or_eager
from outeffhop.state.method_state import NO_SINK

EVERYTHING = "gated-outeffhop(sink=learned, gate=element, predictor=mlp, qk_norm=rms)"


def state_of(method, **options):
    return MethodState(Method.parse(method), 16, 4, **options)


@pytest.mark.parametrize("method", [*METHODS, EVERYTHING, "outeffhop(n=3, sink=learned)"])
def test_a_state_has_what_its_method_has(method):
    state, parsed = state_of(method, dtype=torch.float64), Method.parse(method)
    normalizer = parsed.normalizer
    assert (state.gate is not None) == (parsed.gate is not None)
    assert (state.qk_norm is not None) == (parsed.qk_norm != "none")
    assert (state.sink is not None) == (normalizer.learns == "sink")
    assert (state.raw_alpha is not None) == (normalizer.learns == "alpha")
    assert state.extra == bool(list(state.parameters()))
    assert all(p.dtype == torch.float64 for p in state.parameters())
    if normalizer.learns is None:
        assert state.learned is None
    else:
        torch.testing.assert_close(state.learned, torch.full_like(state.learned, normalizer.start))


def test_reset_parameters_restores_the_first_values():
    state = state_of(EVERYTHING)
    first = {name: p.clone() for name, p in state.named_parameters()}
    with torch.no_grad():
        for p in state.parameters():
            p.fill_(7.0)
    for module in state.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, p in state.named_parameters():
        if name == "gate.hidden_weight":  # random
            assert 0 < p.abs().max() <= math.sqrt(6 / 4)
        else:
            assert torch.equal(p, first[name]), name


def test_a_new_method_takes_over_what_both_have():
    old = state_of(EVERYTHING)
    same = state_of("gated-outeffhop(n=2, sink=learned, gate=element, predictor=mlp, qk_norm=rms)")
    same.inherit(old)
    assert same.sink is old.sink
    assert same.gate is old.gate
    assert same.qk_norm is old.qk_norm
    other = state_of("gated-outeffhop(gate=token, sink=learned)")
    other.inherit(old)
    assert other.sink is old.sink
    assert other.gate is not old.gate
    assert other.qk_norm is None
    plain = state_of("vanilla")
    plain.inherit(old)
    assert not plain.extra
    alpha = state_of("gsh")
    alpha.inherit(state_of("gsh(qk_norm=rms)"))
    assert alpha.qk_norm is None
    assert alpha.sink is None


def test_a_schedule_holds_moves_and_releases():
    state = state_of("gated-outeffhop(n=2, init=0.25)", dtype=torch.float64)
    assert not isinstance(state.sink, torch.Tensor)
    state.hold(dtype=torch.float64)
    assert {"sink", "gate.offset"} <= dict(state.named_buffers()).keys()
    assert (state.learned == NO_SINK).all()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    assert (state(x) > 1 - 1e-8).all()
    copied = copy.deepcopy(state)
    for progress, n in ((0.25, 0.5), (1.0, 2.0)):  # from nothing, n grows
        copied.move(progress)
        torch.testing.assert_close(copied.sink, torch.full((4,), math.log(n), dtype=torch.float64))
    torch.testing.assert_close(copied(x), torch.full((2, 5, 4), 0.25, dtype=torch.float64))
    copied.start_at(torch.tensor([-9.0, 0.0, 3.0, NO_SINK]))
    copied.move(0.5)  # from a number, its logarithm moves
    end = math.log(2.0)
    wanted = [(end - 9) / 2, end / 2, (end + 3) / 2, math.log(1.0)]
    torch.testing.assert_close(copied.sink, torch.tensor(wanted, dtype=torch.float64))
    copied.move(0.0)
    assert copied.sink.tolist() == [-9.0, 0.0, 3.0, NO_SINK]
    assert (state.sink == NO_SINK).all()
    state.release()
    assert state.learned is None
    assert not list(state.buffers())
    torch.testing.assert_close(state(x), torch.full((2, 5, 4), 0.25, dtype=torch.float64))


def test_a_learned_sink_is_not_held():
    state = state_of("outeffhop(sink=learned)", annealing=True)
    assert isinstance(state.sink, nn.Parameter)
    state.move(0.5)
    state.release()
    assert not state.sink.any()
    assert isinstance(state.sink, nn.Parameter)


@pytest.mark.parametrize("method", [*METHODS, "outeffhop(n=3, sink=learned)"])
def test_attention_is_the_same_with_and_without_weights(method):
    torch.manual_seed(0)
    state = state_of(method, dtype=torch.float64)
    q, k, v = (torch.randn(2, heads, 5, 6, dtype=torch.float64) for heads in (4, 2, 2))  # grouped heads
    mask = torch.rand(2, 1, 5, 5) > 0.3
    options = dict(mask=mask, is_causal=True, scale=0.4, learned=state.learned)
    out, none = attend(state.method.normalizer, q, k, v, **options)
    again, weights = attend(state.method.normalizer, q, k, v, need_weights=True, **options)
    assert none is None
    assert weights.shape == (2, 4, 5, 5)
    torch.testing.assert_close(out, again)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), out)


@pytest.mark.parametrize(("method", "fused"), [("outeffhop", True), ("vanilla", True), ("clipped", False)])
def test_softmax_is_fused(method, fused, monkeypatch):
    calls = []
    for name in ("attention", "eager_attention"):
        plain = getattr(fused_or_eager, name)
        spy = lambda *a, plain=plain, name=name, **k: calls.append(name) or plain(*a, **k)  # noqa: E731
        monkeypatch.setattr(fused_or_eager, name, spy)
    x = torch.randn(1, 2, 3, 4)
    attend(Method.parse(method).normalizer, x, x, x)
    attend(Method.parse(method).normalizer, x, x, x, need_weights=True)
    assert calls == ["attention" if fused else "eager_attention", "eager_attention"]
