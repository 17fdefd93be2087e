"""Attention and its normalizers on arbitrary shapes, dtypes, masks and sinks: the eager float64 truth, or an error."""

import math

import pytest
import torch
from fuzzing import cases, outcome, refused
from hypothesis import given
from hypothesis import strategies as st

from outeffhop import attention, explain
from outeffhop.functional import clipped_softmax, entmax, logsumexp_n, softmax1, softmax_n, sparsemax
from outeffhop.ops import attention_varlen

# of outputs of size 1: how far a kernel of this dtype may be from the truth
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
DTYPES = st.sampled_from(list(TOLERANCE))
SEEDS = st.integers(0, 2**16)
SINKS = st.one_of(
    st.floats(-30, 30), st.sampled_from([-math.inf, 0.0, -1e30, 1e30, 1e4, -1e4]), st.sampled_from(["head", "scalar"])
)


SIDES = st.none() | st.integers(-1, 9)


def randn(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def calls(draw, smallest=0):
    """Tensors and arguments of one call of attention."""
    batch, groups, queries, keys, size, value_size = (draw(st.integers(smallest, n)) for n in (2, 2, 9, 9, 9, 9))
    heads, seed, dtype = groups * draw(st.integers(1, 3)), draw(SEEDS), draw(DTYPES)
    lead = draw(st.sampled_from([(batch,), (batch, 2), ()]))
    query = randn((*lead, heads, queries, size), seed, dtype)
    key = randn((*lead, groups, keys, size), seed + 1, dtype)
    value = randn((*lead, groups, keys, value_size), seed + 2, dtype)
    arguments = dict(
        is_causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(-3, 3)),
        enable_gqa=heads != groups,
        sink=draw(SINKS),
        window=draw(st.none() | st.tuples(SIDES, SIDES)),
        attn_mask=draw(masks((*lead, heads, queries, keys), seed + 3, dtype)),
    )
    if isinstance(arguments["sink"], str):
        arguments["sink"] = randn((heads,) if arguments["sink"] == "head" else (), seed + 4, torch.float32) * 5
    return (query, key, value), arguments


@st.composite
def masks(draw, shape, seed, dtype):
    """None, bool or additive, of a shape that broadcasts; some rows see no key at all."""
    kind = draw(st.sampled_from(["none", "bool", "float", "double"]))
    if kind == "none":
        return None
    keep = draw(st.integers(1, len(shape)))
    shape = [1 if draw(st.booleans()) else n for n in shape][-keep:]
    noise = randn(shape, seed)
    allowed = noise > draw(st.sampled_from([-0.5, 0.5, 5.0]))  # beyond 5 σ: no key for anybody
    if kind == "bool":
        return allowed
    return torch.where(allowed, noise, -math.inf).to(torch.float64 if kind == "double" else dtype)


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@cases(37)
@given(calls(), st.sampled_from(["auto", "cpu", "cpu_window", "padded"]))
def test_every_backend_is_the_truth(call, backend):
    tensors, arguments = call
    if backend != "auto" and explain(*tensors, **arguments).reasons[backend] is not None:
        with pytest.raises(ValueError, match=f"backend='{backend}'"):
            attention(*tensors, **arguments, backend=backend)
        return
    out = attention(*tensors, **arguments, backend=backend)
    truth = attention(*map(wide, tensors), **{k: wide(v) for k, v in arguments.items()}, backend="eager")
    assert out.dtype == tensors[0].dtype
    assert out.shape == truth.shape
    assert torch.isfinite(truth).all()
    limit = TOLERANCE[out.dtype]
    assert torch.allclose(out.double(), truth, atol=limit, rtol=limit)


@cases(25)
@given(calls())
def test_lse_is_the_truth_and_a_row_without_keys_is_the_sink(call):
    tensors, arguments = call
    out, lse = attention(*tensors, **arguments, return_lse=True)
    truth, true_lse = attention(
        *map(wide, tensors), **{k: wide(v) for k, v in arguments.items()}, backend="eager", return_lse=True
    )
    limit = TOLERANCE[out.dtype]
    assert torch.allclose(out.double(), truth, atol=limit, rtol=limit)
    assert lse.shape == out.shape[:-1]
    # without a key and without a sink the logsumexp is −inf; kernels may say so with +inf, which weighs as little
    empty = torch.isneginf(true_lse)
    assert torch.isinf(lse[empty]).all()
    assert torch.allclose(lse[~empty].double(), true_lse[~empty], atol=limit * 4, rtol=limit)


@cases(15)
@given(calls(smallest=1), st.sampled_from(["auto", "padded", "eager"]))
def test_gradients_are_the_truth(call, backend):
    (query, key, value), arguments = call
    if backend != "auto" and explain(query, key, value, **arguments).reasons[backend] is not None:
        return

    def gradients(tensors, arguments, backend):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = attention(*leaves, **arguments, backend=backend)
        return torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)).sum(), leaves)

    tensors = query, key, value
    found = gradients(tensors, arguments, backend)
    truth = gradients(map(wide, tensors), {k: wide(v) for k, v in arguments.items()}, "eager")
    for ours, theirs in zip(found, truth, strict=True):
        limit = 8 * TOLERANCE[ours.dtype]
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours.double(), theirs, atol=limit, rtol=limit)


@st.composite
def packed_batches(draw):
    """Tensors and arguments of one call of attention_varlen; sequences may have no query or no key."""
    lengths = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4))
    cu_q, cu_k = (torch.tensor([0, *side]).cumsum(0) for side in zip(*lengths, strict=True))
    groups, size, value_size, seed, dtype = (*(draw(st.integers(1, n)) for n in (2, 9, 9)), draw(SEEDS), draw(DTYPES))
    heads = groups * draw(st.integers(1, 3))
    query = randn((int(cu_q[-1]), heads, size), seed, dtype)
    key, value = (randn((int(cu_k[-1]), groups, d), seed + d, dtype) for d in (size, value_size))
    sink = draw(SINKS)
    if isinstance(sink, str):
        sink = randn((heads,) if sink == "head" else (), seed + 4, torch.float32) * 5
    arguments = dict(
        is_causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(-3, 3)),
        enable_gqa=heads != groups,
        sink=sink,
        window=draw(st.none() | st.tuples(SIDES, SIDES)),
    )
    return (query, key, value), (cu_q, cu_k, *(max(side) for side in zip(*lengths, strict=True))), arguments


@cases(25)
@given(packed_batches())
def test_packed_batches_are_the_truth(batch):
    tensors, lengths, arguments = batch

    def results(tensors, arguments, backend):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out = attention_varlen(*leaves, *lengths, **arguments, backend=backend)
        loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out)).sum()
        return [out, *torch.autograd.grad(loss, leaves)]

    found = results(tensors, arguments, "auto")
    truth = results(map(wide, tensors), {k: wide(v) for k, v in arguments.items()}, "eager")
    for ours, theirs in zip(found, truth, strict=True):
        limit = 8 * TOLERANCE[ours.dtype]
        assert torch.isfinite(ours).all()
        assert torch.allclose(ours.double(), theirs, atol=limit, rtol=limit)


ANY_SHAPE = st.lists(st.integers(0, 4), max_size=5).map(tuple)
ANY_DTYPE = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64])


@cases(37)
@given(
    st.tuples(ANY_SHAPE, ANY_SHAPE, ANY_SHAPE),
    st.tuples(ANY_DTYPE, ANY_DTYPE, ANY_DTYPE),
    st.none() | st.tuples(ANY_SHAPE, ANY_DTYPE),
    st.one_of(st.floats(), st.tuples(ANY_SHAPE, ANY_DTYPE)),
    st.floats(),
    st.none() | st.floats(),
    st.sampled_from(["auto", "eager", "cpu", "padded", "cudnn", "nothing", ""]),
    st.booleans(),
)
def test_whatever_is_given_is_answered_or_refused(shapes, dtypes, mask, sink, dropout_p, scale, backend, enable_gqa):
    query, key, value = (torch.ones(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))
    found = outcome(
        lambda: attention(
            query,
            key,
            value,
            None if mask is None else torch.ones(mask[0], dtype=mask[1]),
            dropout_p,
            scale=scale,
            enable_gqa=enable_gqa,
            sink=sink if isinstance(sink, float) else torch.ones(sink[0], dtype=sink[1]),
            backend=backend,
        ),
        "query",
        "key",
        "value",
        "attn_mask",
        "sink",
        "dropout_p",
        "scale",
        "backend",
    )
    if not refused(found):
        assert found.shape == (*query.shape[:-1], value.shape[-1])


SCORES = st.lists(
    st.floats(-1e4, 1e4) | st.sampled_from([-math.inf, 0.0, 1e30, -1e30]), max_size=8
)  # +inf is no score: nothing would be left for the others


@cases(37)
@given(st.lists(SCORES, min_size=1, max_size=3), st.just(0.0) | st.floats(1e-6, 1e6), DTYPES, st.integers(-2, 1))
def test_softmax_n_by_its_definition(rows, n, dtype, dim):
    width = min(map(len, rows))
    x = torch.tensor([row[:width] for row in rows], dtype=torch.float64).reshape(len(rows), width)
    x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).where(x != -math.inf, x).to(dtype)
    found = softmax_n(x, n, dim=dim)
    # the definition with n as one more logit, which may itself be −inf
    wide, last = x.double().movedim(dim, -1), math.log(n) if n else -math.inf
    everything = torch.cat([wide, torch.full((*wide.shape[:-1], 1), last, dtype=torch.float64)], -1)
    truth = torch.softmax(everything, -1).nan_to_num(0.0)[..., :-1].movedim(-1, dim)
    limit = TOLERANCE[dtype]
    assert found.dtype == dtype
    assert torch.allclose(found.double(), truth, atol=limit, rtol=limit)
    lse, true_lse = logsumexp_n(x, n, dim=dim).double(), torch.logsumexp(everything, -1)
    representable = true_lse.abs() < torch.finfo(dtype).max
    assert torch.allclose(lse[representable], true_lse[representable], atol=4 * limit, rtol=limit)
    if n == 1:
        assert torch.equal(found, softmax1(x, dim=dim))


@cases(25)
@given(
    SCORES,
    st.sampled_from([1.0, 1.0000001, 1.001, 1.25, 1.5, 2.0, 3.0, 10.0, 1e6]) | st.floats(1.0, 50.0),
    st.sampled_from([torch.float64, torch.float32]),
)
def test_entmax_is_a_distribution_in_the_order_of_the_scores(row, alpha, dtype):
    x = torch.tensor(row, dtype=dtype)
    weights = entmax(x, alpha)
    assert (weights >= 0).all()
    assert (weights[torch.isneginf(x)] == 0).all()
    if torch.isneginf(x).all():
        assert (weights == 0).all()
        return
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-4)
    order = x.argsort(stable=True)
    assert (weights[order].diff() >= -1e-4).all()
    if alpha == 2.0:
        assert torch.equal(weights, sparsemax(x))


@cases(15)
@given(SCORES, st.floats(-3, 1), st.floats(0, 4), st.floats(0, 3))
def test_clipped_softmax_by_its_definition(row, gamma, zeta, n):
    x = torch.tensor(row, dtype=torch.float64)
    found = outcome(lambda: clipped_softmax(x, gamma, zeta, n), "gamma", "zeta")
    assert refused(found) == (gamma > 0 or zeta < 1)
    if not refused(found):
        assert torch.allclose(found, ((zeta - gamma) * softmax_n(x, n) + gamma).clamp(0, 1))


@pytest.mark.parametrize("backend", ["auto", "cpu", "padded", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "arguments",
    [
        dict(sink=-1e30),  # scores of 1 beside it were lost in rounding
        dict(sink=1e30),
        dict(sink=torch.tensor([-1e30, 1e30])),
        dict(scale=0.0, is_causal=True),  # kernels mask before they scale: −inf · 0
        dict(scale=1e-135, is_causal=True),
        dict(scale=-2.0, is_causal=True),
        dict(sink=-math.inf, attn_mask=torch.tensor([True, False, True])),  # one dimension
        dict(sink=-math.inf, attn_mask=torch.tensor([[0.5, -0.5, 0.0]], dtype=torch.float64)),  # another dtype
    ],
    ids=str,
)
def test_what_was_wrong_once(arguments, dtype, backend):
    tensors = [randn((1, 2, n, 4), n, dtype) for n in (3, 3, 3)]
    truth = attention(*map(wide, tensors), **{k: wide(v) for k, v in arguments.items()}, backend="eager")
    out = attention(*tensors, **arguments, backend=backend)
    assert torch.allclose(out.double(), truth, atol=TOLERANCE[dtype])
    sink = arguments.get("sink", 0.0)
    if isinstance(sink, float) and sink < 0 and "attn_mask" not in arguments:  # then eager is softmax itself
        expected = torch.nn.functional.scaled_dot_product_attention(*map(wide, tensors))
        assert torch.allclose(truth, expected)


def test_tensors_no_kernel_takes_are_named():
    plain = torch.ones(1, 1, 2, 2)
    ragged = torch.nested.nested_tensor([plain[0, 0], plain[0, 0, :1]])
    for odd in (plain.to(torch.float8_e4m3fn), plain.to_sparse(), ragged):
        with pytest.raises(TypeError, match="query "):
            attention(odd, odd, odd)
    with pytest.raises(TypeError, match="value "):
        attention(plain, plain, plain.to_sparse())


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_a_scale_that_is_none(scale):
    with pytest.raises(ValueError, match="scale="):
        attention(*[torch.ones(1, 1, 2, 2)] * 3, scale=scale)


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0, torch.tensor([1.7])])
def test_entmax_of_huge_and_of_lost_scores(alpha):
    assert torch.equal(entmax(torch.tensor([1e30, -1e30, 0.0]), alpha), torch.tensor([1.0, 0.0, 0.0]))
    rows = entmax(torch.tensor([[math.nan, 0.0], [math.inf, 0.0], [1.0, -math.inf]]), alpha)
    assert torch.isnan(rows[:2]).all()
    assert rows[2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("n", [-1.0, math.inf, math.nan, -math.inf])
def test_a_count_that_is_none(n):
    for function in (softmax_n, logsumexp_n):
        with pytest.raises(ValueError, match="n="):
            function(torch.zeros(3), n)
