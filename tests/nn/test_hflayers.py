"""The older library's weights: its outputs, as its documentation defines them, from plain code of our own."""

import math

import pytest
import torch
from torch.nn.functional import layer_norm, linear

from outeffhop.nn import OutEffHop, OutEffHopLayer, OutEffHopPooling, from_hflayers

D = torch.float64


def _core(embed, heads, hidden, pattern, out, kdim=None, vdim=None, connected=False, bias=True, seed=0):
    """The entries of a HopfieldCore's state dict, by the names and shapes that library gives them."""
    generator = torch.Generator().manual_seed(seed)

    def r(*shape):
        return 0.5 * torch.randn(shape, generator=generator, dtype=D)

    packed = kdim is None and vdim is None and pattern is None and not connected
    values = heads * (pattern or hidden)
    state = {}
    if packed:
        state["in_proj_weight"] = r(3 * heads * hidden, embed)
    else:
        state["q_proj_weight"] = r(heads * hidden, embed)
        state["k_proj_weight"] = r(heads * hidden, kdim or embed)
        state["v_proj_weight"] = r(values, heads * hidden if connected else (vdim or embed))
    if bias:
        state["in_proj_bias"] = r(2 * heads * hidden + values)
    state["out_proj.weight"] = r(out or embed, values)
    if bias:
        state["out_proj.bias"] = r(out or embed)
    return {f"association_core.{k}": v for k, v in state.items()}


def _norms(embed, kdim, vdim, seed=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = {"norm_stored_pattern": kdim, "norm_state_pattern": embed, "norm_pattern_projection": vdim}
    return {
        f"{name}.{part}": 1 + 0.3 * torch.randn(size, generator=generator, dtype=D)
        for name, size in sizes.items()
        for part in ("weight", "bias")
    }


def _expected(state, stored, states, projected, heads, steps=1, scaling=None, connected=False, padding=None):
    """softmax(β R W_Q (Y W_K)ᵀ) V in heads, batch first, ``steps`` updates."""

    def norm(name, x):
        weight = state.get(f"{name}.weight")
        return x if weight is None else layer_norm(x, x.shape[-1:], weight, state[f"{name}.bias"])

    core = {k.removeprefix("association_core."): v for k, v in state.items()}
    if "in_proj_weight" in core:
        wq, wk, wv = core["in_proj_weight"].chunk(3)
    else:
        wq, wk, wv = (core[f"{n}_proj_weight"] for n in "qkv")
    bq = bk = bv = None
    if "in_proj_bias" in core:
        bq, bk, bv = core["in_proj_bias"].split([len(wq), len(wk), len(wv)])
    q = linear(norm("norm_state_pattern", states), wq, bq)
    k = linear(norm("norm_stored_pattern", stored), wk, bk)
    v = linear(k if connected else norm("norm_pattern_projection", projected), wv, bv)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    beta = 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling
    for step in range(steps):
        scores = beta * q @ k.transpose(-1, -2)
        if padding is not None:
            scores = scores.masked_fill(padding[:, None, None], -math.inf)
        q = torch.softmax(scores, -1) @ (v if step == steps - 1 else k)
    return linear(q.transpose(1, 2).flatten(2), core["out_proj.weight"], core.get("out_proj.bias"))


def _data(*shape, seed=5):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_hopfield(normalize, bias, steps):
    state = _core(6, 2, 5, None, 7, bias=bias) | (_norms(6, 6, 6) if normalize else {})
    layer = from_hflayers(state, num_heads=2, scaling=0.4, update_steps_max=steps - 1)
    assert isinstance(layer, OutEffHop)
    x = _data(3, 4, 6)
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[0, 3] = True
    out, _ = layer(x, key_padding_mask=padding)
    torch.testing.assert_close(out, _expected(state, x, x, x, 2, steps, 0.4, padding=padding))


def test_sizes_of_their_own():
    state = _core(6, 2, 5, 3, 7, kdim=4, vdim=8)
    layer = from_hflayers(state, num_heads=2)
    stored, states, projected = _data(3, 9, 4), _data(3, 4, 6, seed=6), _data(3, 9, 8, seed=7)
    out, _ = layer(states, stored, projected)
    torch.testing.assert_close(out, _expected(state, stored, states, projected, 2))


def test_connected():
    state = _core(6, 2, 5, None, 6, connected=True)
    layer = from_hflayers(state, num_heads=2, connected=True)
    x = _data(3, 4, 6)
    torch.testing.assert_close(layer(x)[0], _expected(state, x, x, x, 2, connected=True))


def test_pooling():
    core = _core(6, 2, 5, None, 6) | _norms(6, 6, 6)
    weights = _data(1, 3, 6, seed=9)
    state = {"pooling_weights": weights} | {f"hopfield.{k}": v for k, v in core.items()}
    layer = from_hflayers(state, num_heads=2)
    assert isinstance(layer, OutEffHopPooling)
    x = _data(4, 9, 6)
    torch.testing.assert_close(layer(x), _expected(core, x, weights.expand(4, -1, -1), x, 2))


@pytest.mark.parametrize("separated", [False, True])
def test_lookup(separated):
    core = _core(6, 2, 5, None, 6)
    weights, targets = _data(1, 9, 6, seed=9), _data(1, 9, 6, seed=10)
    state = {"lookup_weights": weights} | {f"hopfield.{k}": v for k, v in core.items()}
    if separated:
        state["target_weights"] = targets
    layer = from_hflayers(state, num_heads=2)
    assert isinstance(layer, OutEffHopLayer)
    x = _data(4, 3, 6)
    stored, projected = weights.expand(4, -1, -1), (targets if separated else weights).expand(4, -1, -1)
    torch.testing.assert_close(layer(x), _expected(core, stored, x, projected, 2))


def test_another_method_keeps_the_weights():
    state = _core(6, 2, 5, None, 6)
    layer = from_hflayers(state, num_heads=2, method="gated-outeffhop(sink=learned)")
    torch.testing.assert_close(layer.q_proj.weight.data, state["association_core.in_proj_weight"][:10])
    assert layer.state.sink is not None
    assert layer(_data(2, 3, 6))[0].shape == (2, 3, 6)


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda s: {}, {}, ["association_core"]),
        (lambda s: s | {"association_core.p_norm_weight": torch.ones(5)}, {}, ["p_norm_weight"]),
        (lambda s: {k: v for k, v in s.items() if "q_proj" not in k}, {}, ["q_proj_weight", "static"]),
        (lambda s: s, {"num_heads": 3}, ["num_heads=3"]),
        (lambda s: s, {"num_heads": 0}, ["num_heads=0"]),
        (lambda s: s, {"scaling": torch.ones(2)}, ["scaling", "beta_per_head"]),
        (lambda s: s | {"norm_state_pattern.weight": torch.ones(6)}, {}, ["norm_stored_pattern"]),
    ],
)
def test_what_cannot_be_converted_is_refused(change, options, words):
    state = _core(6, 2, 5, 3, 7, kdim=4)
    with pytest.raises((ValueError, TypeError)) as caught:
        from_hflayers(change(state), **({"num_heads": 2} | options))
    for word in words:
        assert word in str(caught.value)
