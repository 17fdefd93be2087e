"""The layers with any sizes and arguments: what nn.MultiheadAttention gives, or an error that names the argument."""

import math

import pytest
import torch
from fuzzing import cases, outcome, refused
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outeffhop import OutEffHop, OutEffHopLayer, OutEffHopPooling
from outeffhop.methods import METHODS as KNOWN
from outeffhop.nn import OutEffHopEncoderLayer
from outeffhop.state import Gate

SEEDS = st.integers(0, 2**16)
OPTIONS = [  # beyond the paper
    "outeffhop(sink=learned, qk_norm=rms)",
    "gated(gate=element)",
    "gated(gate=element, predictor=mlp)",
    "gated(gate=head, predictor=features)",
    "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)",
    "clipped-outeffhop(n=2, qk_norm=rms)",
    "gsh(qk_norm=rms)",
    "polynomial(qk_norm=rms)",
]
METHODS = st.sampled_from([*KNOWN, *OPTIONS])


def tensors(shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@st.composite
def inputs(draw):
    heads, per_head = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    batch, queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 6))
    seed = draw(SEEDS)
    size = heads * per_head
    arguments = {}
    if draw(st.booleans()):
        mask = tensors((batch, keys), seed + 1) > 1
        mask[:, 0] = False  # vanilla attention to nothing is NaN in PyTorch
        arguments["key_padding_mask"] = mask
    if draw(st.booleans()):
        noise = tensors((queries, keys), seed + 2)
        arguments["attn_mask"] = noise if draw(st.booleans()) else (noise > 1).index_fill(1, torch.tensor([0]), False)
    layout = draw(st.booleans())
    query, key = tensors((batch, queries, size), seed + 3), tensors((batch, keys, size), seed + 4)
    if not layout:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    return heads, size, layout, query, key, arguments, draw(st.booleans()), draw(st.booleans())


@cases(20)
@given(inputs())
def test_vanilla_is_multihead_attention(given_):
    heads, size, batch_first, query, key, arguments, bias_kv, zero = given_
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(
        size, heads, add_bias_kv=bias_kv, add_zero_attn=zero, batch_first=batch_first, dtype=torch.float64
    )
    ours = OutEffHop.from_multihead(theirs, "vanilla")
    expected, weights = theirs(query, key, key, **arguments)
    for need_weights in (False, True):
        found, own = ours(query, key, key, need_weights=need_weights, **arguments)
        assert torch.allclose(found, expected, atol=1e-9)
    assert torch.allclose(own, weights, atol=1e-9)


@cases(25)
@given(
    inputs(), METHODS, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]), st.sampled_from([1, 2, None])
)
def test_every_method_is_finite_and_trains(given_, method, dtype, steps):
    heads, size, batch_first, query, key, arguments, bias_kv, zero = given_
    torch.manual_seed(0)
    layer = OutEffHop(
        size,
        heads,
        add_bias_kv=bias_kv,
        add_zero_attn=zero,
        batch_first=batch_first,
        dtype=dtype,
        method=method,
        steps=steps,
        max_steps=4,
        learn_beta=True,
    )
    out, weights = layer(query.to(dtype), key.to(dtype), **arguments)
    assert weights is None
    assert out.shape == query.shape
    assert out.dtype == dtype
    out.float().sum().backward()
    assert torch.isfinite(out).all()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


SIZES = st.integers(-2, 9)
OPTIONAL = st.none() | SIZES


@cases(50)
@given(
    st.fixed_dictionaries(
        {"embed_dim": SIZES, "num_heads": SIZES},
        optional={
            "dropout": st.floats(),
            "kdim": OPTIONAL,
            "vdim": OPTIONAL,
            "head_dim": OPTIONAL,
            "value_head_dim": OPTIONAL,
            "out_dim": OPTIONAL,
            "beta": st.none() | st.floats(),
            "steps": OPTIONAL,
            "tol": st.floats(),
            "max_steps": SIZES,
            "connected": st.booleans(),
            "project_query": st.booleans(),
            "project_key": st.booleans(),
            "project_value": st.booleans(),
            "normalize": st.booleans(),
            "beta_per_head": st.booleans(),
            "method": METHODS | st.sampled_from(["", "nothing", "gated(predictor=features)"]),
        },
    ),
    st.sampled_from([OutEffHop, OutEffHopPooling, OutEffHopLayer]),
    SIZES,
)
def test_odd_sizes_are_refused_by_name_or_right(arguments, kind, quantity):
    if kind is not OutEffHop:
        arguments = arguments | {"quantity": quantity}
    names = [name for name in arguments if name != "quantity"] + ["quantity", "project_", "head"]
    layer = outcome(lambda: kind(**arguments, batch_first=True), *names)
    if refused(layer):
        return
    inner = layer if kind is OutEffHop else layer.hopfield
    query, key = torch.ones(2, 3, inner.embed_dim), torch.ones(2, 4, inner.kdim)
    value = key if inner.connected or inner.vdim == inner.kdim else torch.ones(2, 4, inner.vdim)
    if kind is OutEffHop:
        out, _ = layer(query, key, value)
        assert out.shape == (2, 3, inner.out_dim)
    elif kind is OutEffHopLayer:
        assert layer(query).shape == (2, 3, inner.out_dim)
    elif inner.connected or inner.vdim == inner.kdim:
        assert layer(key).shape == (2, quantity, inner.out_dim)


@pytest.mark.parametrize(
    "arguments",
    [
        dict(embed_dim=0),
        dict(embed_dim=-4),
        dict(embed_dim=4, kdim=0),
        dict(embed_dim=4, vdim=-1),
        dict(embed_dim=4, head_dim=0),
        dict(embed_dim=4, value_head_dim=0),
        dict(embed_dim=4, out_dim=0),
    ],
)
def test_a_size_below_one(arguments):
    name = list(arguments)[-1]
    with pytest.raises(ValueError, match=f"{name}="):
        OutEffHop(**arguments)


@pytest.mark.parametrize("value", ["4", 4.0, True])
@pytest.mark.parametrize("name", ["embed_dim", "num_heads", "kdim", "head_dim", "out_dim"])
def test_a_size_of_a_wrong_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"{name}="):
        OutEffHop(**{"embed_dim": 4, "num_heads": 2, name: value})


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_inputs_of_a_wrong_type_are_named(name, batch_first):
    layer = OutEffHop(4, 2, batch_first=batch_first)
    right = dict.fromkeys(("query", "key", "value"), torch.ones(2, 3, 4))
    for wrong in (torch.ones(2, 3, 4).half(), torch.ones(2, 3, 4).double(), torch.ones(2, 3, 4).long(), [[1.0]], "x"):
        with pytest.raises(TypeError, match=f"{name} "):
            layer(**right | {name: wrong})
    with pytest.raises(TypeError, match="attn_mask is a str"):
        layer(**right, attn_mask="x")
    with torch.autocast("cpu", torch.bfloat16):  # which brings them together
        assert torch.isfinite(layer(**right | {name: torch.ones(2, 3, 4).bfloat16()})[0]).all()


SHAPES = st.lists(st.integers(0, 4), max_size=4)


@cases(37)
@given(
    SHAPES,
    SHAPES,
    SHAPES,
    st.none() | st.tuples(SHAPES, st.sampled_from([torch.bool, torch.float32, torch.int64])),
    st.none() | st.tuples(SHAPES, st.sampled_from([torch.bool, torch.float32, torch.int64])),
    st.sampled_from([torch.float32, torch.float64, torch.int64]),
    st.booleans(),
    st.booleans(),
)
def test_whatever_is_fed_is_answered_or_refused(query, key, value, padding, mask, dtype, batch_first, need_weights):
    layer = OutEffHop(4, 2, batch_first=batch_first)

    def made(spec):
        return None if spec is None else torch.ones(spec[0]).to(spec[1])

    found = outcome(
        lambda: layer(
            torch.ones(query).to(dtype),
            torch.ones(key).to(dtype),
            torch.ones(value).to(dtype),
            key_padding_mask=made(padding),
            attn_mask=made(mask),
            need_weights=need_weights,
        ),
        "query",
        "key",
        "value",
        "key_padding_mask",
        "attn_mask",
    )
    if not refused(found):
        assert found[0].shape == tuple(query)


@cases(15)
@given(
    SIZES,
    SIZES,
    st.sampled_from(
        ["gated", "gated(gate=head)", "gated(gate=constant)", "gated(predictor=mlp)", "gated(predictor=features)"]
        + [method for method in OPTIONS if method.startswith("gated")]
    ),
)
def test_gates_of_any_size(embed_dim, num_heads, method):
    from outeffhop.methods import Method

    gate = outcome(lambda: Gate(Method.parse(method).gate, embed_dim, num_heads), "embed_dim", "num_heads")
    if refused(gate):
        return
    openings = gate(torch.ones(2, 3, embed_dim))
    assert torch.allclose(openings, torch.full_like(openings, 0.25))


@pytest.mark.parametrize("method", [*KNOWN, *OPTIONS])
def test_an_encoder_layer_with_every_key_masked(method):
    layer = OutEffHopEncoderLayer(8, 2, 16, method=method, batch_first=True).eval()
    out = layer(torch.ones(1, 3, 8), src_key_padding_mask=torch.ones(1, 3, dtype=torch.bool))
    assert torch.isfinite(out).all()
    assert not math.isnan(float(out.sum()))
