"""What must hold for any input: properties of attention with a sink, by hypothesis."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import reference

from outeffhop import attention
from outeffhop.ops import explain
from outeffhop.ops.dispatch import BACKENDS

sizes = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)
)  # B, H, Lq, Lk, D


def _tensors(sizes, seed, dtype=torch.float64, spread=1.0):
    batch, heads, queries, keys, size = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, queries, size), (batch, heads, keys, size), (batch, heads, keys, size)
    return [spread * torch.randn(s, generator=generator, dtype=dtype) for s in shapes]


@given(sizes, st.integers(0, 2**16), st.floats(-5, 5))
def test_weights_are_a_part_of_a_distribution(sizes, seed, sink):
    query, key, _ = _tensors(sizes, seed)
    identity = torch.eye(key.shape[-2], dtype=torch.float64).expand(*key.shape[:2], -1, -1)  # out = the weights
    weights, lse = attention(query, key, identity, sink=sink, return_lse=True)
    assert (weights >= 0).all()
    assert (weights.sum(-1) < 1).all()
    assert torch.allclose(weights.sum(-1), 1 - torch.exp(sink - lse))


@given(sizes, st.integers(0, 2**16), st.booleans())
def test_a_sink_far_below_is_softmax(sizes, seed, is_causal):
    query, key, value = _tensors(sizes, seed)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    for sink in (-math.inf, -1e4):
        assert torch.allclose(attention(query, key, value, is_causal=is_causal, sink=sink), expected)


@given(sizes, st.integers(0, 2**16), st.sampled_from(["cpu", "padded", "eager"]))
def test_a_masked_key_changes_nothing(sizes, seed, backend):
    query, key, value = _tensors(sizes, seed)
    more_keys, more_values = (torch.cat([t, 1e4 * torch.ones_like(t[..., :1, :])], -2) for t in (key, value))
    mask = torch.ones(1, key.shape[-2] + 1, dtype=torch.bool)
    mask[:, -1] = False
    out = attention(query, more_keys, more_values, attn_mask=mask, backend=backend)
    assert torch.allclose(out, attention(query, key, value, backend=backend))


@given(sizes, st.integers(0, 2**16))
def test_the_order_of_keys_does_not_matter(sizes, seed):
    query, key, value = _tensors(sizes, seed)
    order = torch.randperm(key.shape[-2], generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(attention(query, key, value), attention(query, key[..., order, :], value[..., order, :]))


@given(sizes, st.integers(0, 2**16), st.floats(1.0, 4.0))
def test_a_shift_of_the_scores_is_a_shift_of_the_sink(sizes, seed, shift):
    # softmax does not see a constant added to all scores; softmax1 does, and that is how a head abstains
    query, key, value = _tensors(sizes, seed)
    mask = torch.full((1, key.shape[-2]), -shift, dtype=torch.float64)
    shifted = attention(query, key, value.abs() + 1, attn_mask=mask)
    assert torch.allclose(shifted, attention(query, key, value.abs() + 1, sink=shift))
    assert (shifted < attention(query, key, value.abs() + 1)).all()


@given(
    sizes,
    st.integers(0, 2**16),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([-1e4, 1e4]),
    st.sampled_from(["cpu", "padded", "eager"]),
)
def test_finite_at_large_scores(sizes, seed, dtype, score, backend):
    query, key, value = (t.requires_grad_() for t in _tensors(sizes, seed, dtype))
    mask = torch.full((1, 1), score, dtype=dtype)
    out = attention(query, key, value, attn_mask=mask, backend=backend)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(torch.isfinite(t).all() for t in (out, *grads))
    if score < 0:
        assert torch.equal(out, torch.zeros_like(out))


@given(
    sizes,
    st.integers(0, 2**16),
    st.booleans(),
    st.sampled_from([None, "bool", "float"]),
    st.floats(-6, 6),
    st.sampled_from(["auto", *BACKENDS]),
)
def test_whatever_serves_is_right(sizes, seed, is_causal, mask, sink, backend):
    query, key, value = _tensors(sizes, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = torch.randn(query.shape[-2], key.shape[-2], generator=generator, dtype=torch.float64)
    attn_mask = {None: None, "bool": noise > 0, "float": noise}[mask]
    arguments = dict(attn_mask=attn_mask, is_causal=is_causal, sink=sink)
    if backend != "auto" and explain(query, key, value, **arguments).reasons[backend] is not None:
        return
    out = attention(query, key, value, **arguments, backend=backend)
    assert torch.allclose(out, reference(query, key, value, **arguments)[0])
