"""Kinds of calls: what was checked once stays right, and what was not is still refused."""

import math

import pytest
import torch
from reference import CASES, in_double, make, reference, reference_run, run

from outeffhop.ops import attention, dispatch
from outeffhop.ops.probe import probing, watching
from outeffhop.ops.remember import Remembered, kind_of

Q = torch.randn(2, 4, 9, 8)


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    fresh = Remembered()
    monkeypatch.setattr(dispatch, "_REMEMBERED", fresh)
    return fresh


def kind(
    query=Q, key=Q, value=Q, mask=None, dropout_p=0.0, is_causal=False, scale=None, gqa=False, sink=0.0, lse=False
):
    return kind_of(query, key, value, mask, dropout_p, is_causal, scale, gqa, sink, lse, "auto")


@pytest.mark.parametrize("name", CASES)
def test_the_second_call_is_as_exact_as_the_first(name):
    for seed in range(2):
        arguments = make(CASES[name], torch.float64, "cpu", seed)
        weights = torch.randn(*arguments["query"].shape[:-1], arguments["value"].shape[-1], dtype=torch.float64)
        found, truth = run(attention, arguments, weights), reference_run(arguments, weights)
        for key, expected in truth.items():
            torch.testing.assert_close(found[key], expected, msg=key)


def test_a_growing_cache_is_of_one_kind_and_asks_kernels_once(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "BACKENDS", dict(dispatch.BACKENDS))
    for name, backend in dispatch.BACKENDS.items():

        def noted(call, name=name, backend=backend):
            asked.append(name)
            return backend.why_not(call)

        dispatch.BACKENDS[name] = dispatch.Backend(noted, backend.attend)
    for length in range(2, 40):
        key, value = torch.randn(2, 4, length, 8), torch.randn(2, 4, length, 8)
        out = attention(Q[:, :, :1], key, value)
        torch.testing.assert_close(
            out, reference(*in_double({"q": Q[:, :, :1], "k": key, "v": value}).values())[0].float()
        )
    assert set(asked) == {"cpu"}  # no kernel of another device
    assert len(asked) == 1


WRONG = [
    dict(key=Q[:, :, :5]),
    dict(value=Q[:, :2]),
    dict(key=Q[:1]),
    dict(key=Q[..., :4]),
    dict(value=Q.double()),
    dict(attn_mask=torch.ones(2, 4, 9, 8, dtype=torch.bool)),
    dict(attn_mask=torch.ones(2, 4, 9, 9, dtype=torch.int64)),
    dict(dropout_p=1.0),
    dict(dropout_p=-0.5),
    dict(scale=math.inf),
    dict(scale=math.nan),
    dict(sink=math.nan),
    dict(sink=math.inf),
    dict(sink=torch.full((4,), math.nan)),
    dict(sink=torch.zeros(3)),
    dict(backend="cuda"),
]


@pytest.mark.parametrize("change", WRONG, ids=lambda c: next(iter(c)))
def test_a_wrong_call_is_refused_after_a_right_one(change):
    right = dict(query=Q, key=Q, value=Q)
    for more in ({}, {"attn_mask": torch.ones(2, 4, 9, 9, dtype=torch.bool)}, {"sink": torch.zeros(4)}, {"scale": 1.0}):
        for _ in range(2):
            attention(**right, **more)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError)):
            attention(**(right | change))


def test_what_the_backend_depends_on_makes_another_kind():
    leaf, mask = Q.clone().requires_grad_(), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    kinds = [
        kind(),
        kind(Q.double(), Q.double(), Q.double()),
        kind(query=leaf),
        kind(Q[:, :, :1]),
        kind(Q, Q[:, :, :1], Q[:, :, :1]),
        kind(Q, Q[:, :, :5], Q[:, :, :5]),
        kind(Q, Q[:, :2], Q[:, :2], gqa=True),
        kind(value=Q[..., :4]),
        kind(mask=mask),
        kind(mask=mask.float()),
        kind(mask=mask.float().requires_grad_()),
        kind(dropout_p=0.25),
        kind(dropout_p=0.1),
        kind(is_causal=True),
        kind(sink=-math.inf),
        kind(sink=torch.zeros(4)),
        kind(sink=torch.zeros(())),
        kind(lse=True),
    ]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)
    with torch.no_grad():
        assert kind(query=leaf) == kind()
    assert kind(scale=0.5, sink=1.0) == kind() == kind(Q[:1], Q[:1], Q[:1])


class Subclass(torch.Tensor):
    pass


def test_calls_that_are_checked_every_time():
    assert kind(Q.to_sparse(), Q, Q) is None
    assert kind(Q[0], Q[0], Q[0]) is None
    assert kind(Q.as_subclass(Subclass)) is None
    assert kind(scale=1e-300) is None
    with probing(lambda part, t: t):
        assert kind() is None
    with watching(lambda *_: None):
        assert kind() is None
    with torch.autocast("cpu", torch.bfloat16):
        assert kind() is None
        assert kind(Q.bfloat16(), Q.bfloat16(), Q.bfloat16()) is not None
    said = []
    torch.func.vmap(lambda q: said.append(kind()) or q)(Q)
    assert said == [None]


def test_no_more_than_the_most_are_kept(remembered):
    few = Remembered(most=3)
    for number in range(10):
        few.put(number, lambda call: (call.query, None))
        assert few.get(number) is not None
    assert sum(few.get(number) is not None for number in range(10)) <= 3
