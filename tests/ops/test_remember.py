"""Remembered calls: what was checked once stays right, and what was not is still refused."""

import math
from types import SimpleNamespace

import pytest
import torch
from reference import CASES, make, reference, reference_run, run

from outeffhop.ops import attention, dispatch
from outeffhop.ops.probe import probing, watching
from outeffhop.ops.remember import Remembered, key_of

Q = torch.randn(2, 4, 9, 8)


@pytest.fixture(autouse=True)
def remembered(monkeypatch):
    fresh = Remembered()
    monkeypatch.setattr(dispatch, "_REMEMBERED", fresh)
    return fresh


def key(query=Q, key=Q, value=Q, mask=None, dropout_p=0.0, is_causal=False, scale=None, gqa=False, sink=0.0, lse=False):
    return key_of(query, key, value, mask, dropout_p, is_causal, scale, gqa, sink, lse, "auto")


@pytest.mark.parametrize("name", CASES)
def test_the_second_call_is_as_exact_as_the_first(name):
    for seed in range(2):
        arguments = make(CASES[name], torch.float64, "cpu", seed)
        weights = torch.randn(*arguments["query"].shape[:-1], arguments["value"].shape[-1], dtype=torch.float64)
        found, truth = run(attention, arguments, weights), reference_run(arguments, weights)
        for key, expected in truth.items():
            torch.testing.assert_close(found[key], expected, msg=key)


def test_kernels_are_asked_once_and_only_those_of_the_device(monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "BACKENDS", dict(dispatch.BACKENDS))
    for name, backend in dispatch.BACKENDS.items():

        def noted(call, name=name, backend=backend):
            asked.append(name)
            return backend.why_not(call)

        dispatch.BACKENDS[name] = dispatch.Backend(noted, backend.attend)
    for _ in range(3):
        for length in (5, 6):
            k, v = torch.randn(2, 4, length, 8), torch.randn(2, 4, length, 8)
            expected, _ = reference(*(t.double() for t in (Q[:, :, :1], k, v)))
            torch.testing.assert_close(attention(Q[:, :, :1], k, v), expected.float())
    assert asked == ["cpu"]  # the number of keys of a single query is not asked about


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


def test_options_in_other_types_are_those_that_were_checked():
    expected = attention(Q, Q, Q, None, 0.0, True, scale=1.0, sink=1.0)
    for _ in range(2):
        assert torch.equal(attention(Q, Q, Q, None, 0, 1, scale=1, sink=1), expected)


def test_what_the_backend_depends_on_makes_another_key():
    leaf, mask = Q.clone().requires_grad_(), torch.ones(2, 1, 1, 9, dtype=torch.bool)
    keys = [
        key(),
        key(Q.double(), Q.double(), Q.double()),
        key(query=leaf),
        key(Q[:, :, :1]),
        key(Q[:1], Q[:1], Q[:1]),
        key(Q, Q[:, :2], Q[:, :2], gqa=True),
        key(value=Q[..., :4]),
        key(value=Q.to("meta")),
        key(value=Q.to_sparse()),
        key(mask=mask),
        key(mask=mask.float()),
        key(mask=mask.float().requires_grad_()),
        key(dropout_p=0.25),
        key(is_causal=True),
        key(scale=0.5),
        key(sink=1.0),
        key(sink=torch.zeros(4)),
        key(sink=torch.zeros(4).requires_grad_()),
        key(lse=True),
    ]
    with torch.no_grad():
        keys.append(key())
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(key())
    torch.use_deterministic_algorithms(True)
    keys.append(key())
    torch.use_deterministic_algorithms(False)
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(Q.clone(), Q.clone(), Q.clone()) == key()


def test_a_decoding_step_is_remembered_whatever_the_number_of_keys(remembered):
    one = Q[:, :, :1]

    def cache(length, **more):
        return dict(query=one, key=torch.randn(2, 4, length, 8), value=torch.randn(2, 4, length, 8), **more)

    masks = [None, (2, 1, 1), (1, 1, 1), (1,), ()]  # the last dimension is added; () has none
    for shape in masks:
        for length in (2, 3, 7):
            mask = None if shape is None else torch.rand(*shape, length) > 0.3
            arguments = cache(length, attn_mask=mask, sink=torch.zeros(4))
            expected = attention(**arguments, backend="eager")
            torch.testing.assert_close(attention(**arguments), expected)
    named_eager = len(masks)
    assert len(remembered._calls) == len(masks) + named_eager
    narrow = torch.ones(2, 1, 1, 1, dtype=torch.bool)  # broadcasts to any number of keys
    attention(**cache(4, attn_mask=narrow))
    attention(**cache(5, attn_mask=narrow))
    for wrong in (
        cache(4, attn_mask=torch.ones(2, 1, 1, 3, dtype=torch.bool)),
        cache(4) | {"value": Q[:, :, :5]},
        cache(4) | {"key": Q[:, :2, :4], "value": Q[:, :2, :4]},
    ):
        with pytest.raises(ValueError, match=r"attn_mask|key has shape|heads"):
            attention(**wrong)
    no_keys = attention(**cache(0))
    assert torch.equal(no_keys, torch.zeros_like(no_keys))
    single = cache(1)
    torch.testing.assert_close(attention(**single), attention(**single, backend="eager"))


def test_kernels_with_plans_come_last_for_a_growing_cache():
    def order(length, mask=None):
        query = SimpleNamespace(shape=(2, 4, length, 8), device=torch.device("cuda"))
        return dispatch._order(SimpleNamespace(query=query, mask=mask))

    assert order(9)[0] == order(1, mask=True)[0] == "cudnn"
    assert order(1)[0] == "cuda_flash"
    assert sorted(order(1)) == sorted(order(9))


class Subclass(torch.Tensor):
    pass


def test_calls_that_are_checked_every_time(remembered):
    assert key(Q.as_subclass(Subclass)) is None
    assert key(Q.numpy()) is None
    nested = torch.nested.nested_tensor([Q[0], Q[1]])
    assert key(nested, nested, nested) is None
    with probing(lambda part, t: t):
        assert key() is None
    with watching(lambda *_: None):
        assert key() is None
    said = []
    torch.func.vmap(lambda q: said.append(key()) or q)(Q)
    assert said == [None]
    for arguments in (dict(scale=1e-300), dict(query=Q[0], key=Q[0], value=Q[0])):
        attention(**(dict(query=Q, key=Q, value=Q) | arguments))  # whose tensors the checks change
    with torch.autocast("cpu", torch.bfloat16):
        attention(Q, Q, Q)
    assert not remembered._calls


def test_no_tensor_and_no_more_than_the_most_is_kept(remembered):
    attention(Q, Q, Q, torch.ones(9, 9), sink=torch.zeros(4))
    ((_, call),) = remembered._calls.values()
    assert not any(isinstance(getattr(call, name), torch.Tensor) for name in call.__slots__)
    few = Remembered(most=3)
    for number in range(10):
        few.put(number, lambda call: (call.query, None), call)
        assert few.get(number) is not None
    assert sum(few.get(number) is not None for number in range(10)) <= 3
