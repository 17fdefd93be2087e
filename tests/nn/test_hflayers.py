"""The older library's weights: its outputs, as its documentation defines them, from plain code of our own."""

import pytest
import torch
from theirs import core_entries, drawn, norm_entries, retrieved

from outeffhop.nn import OutEffHop, OutEffHopLayer, OutEffHopPooling, from_hflayers


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("steps", [1, 4])
def test_hopfield(normalize, bias, steps):
    state = core_entries(6, 2, 5, None, 7, bias=bias) | (norm_entries(6, 6, 6) if normalize else {})
    layer = from_hflayers(state, num_heads=2, scaling=0.4, update_steps_max=steps - 1)
    assert isinstance(layer, OutEffHop)
    x = drawn(3, 4, 6)
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[0, 3] = True
    out, _ = layer(x, key_padding_mask=padding)
    torch.testing.assert_close(out, retrieved(state, x, x, x, 2, steps=steps, scaling=0.4, padding=padding)[0])


def test_sizes_of_their_own():
    state = core_entries(6, 2, 5, 3, 7, kdim=4, vdim=8)
    layer = from_hflayers(state, num_heads=2)
    stored, states, projected = drawn(3, 9, 4), drawn(3, 4, 6, seed=6), drawn(3, 9, 8, seed=7)
    out, _ = layer(states, stored, projected)
    torch.testing.assert_close(out, retrieved(state, stored, states, projected, 2)[0])


def test_connected():
    state = core_entries(6, 2, 5, None, 6, connected=True)
    layer = from_hflayers(state, num_heads=2, connected=True)
    x = drawn(3, 4, 6)
    torch.testing.assert_close(layer(x)[0], retrieved(state, x, x, x, 2, connected=True)[0])


def test_pooling():
    core = core_entries(6, 2, 5, None, 6) | norm_entries(6, 6, 6)
    weights = drawn(1, 3, 6, seed=9)
    state = {"pooling_weights": weights} | {f"hopfield.{k}": v for k, v in core.items()}
    layer = from_hflayers(state, num_heads=2)
    assert isinstance(layer, OutEffHopPooling)
    x = drawn(4, 9, 6)
    torch.testing.assert_close(layer(x), retrieved(core, x, weights.expand(4, -1, -1), x, 2)[0])


@pytest.mark.parametrize("separated", [False, True])
def test_lookup(separated):
    core = core_entries(6, 2, 5, None, 6)
    weights, targets = drawn(1, 9, 6, seed=9), drawn(1, 9, 6, seed=10)
    state = {"lookup_weights": weights} | {f"hopfield.{k}": v for k, v in core.items()}
    if separated:
        state["target_weights"] = targets
    layer = from_hflayers(state, num_heads=2)
    assert isinstance(layer, OutEffHopLayer)
    x = drawn(4, 3, 6)
    stored, projected = weights.expand(4, -1, -1), (targets if separated else weights).expand(4, -1, -1)
    torch.testing.assert_close(layer(x), retrieved(core, stored, x, projected, 2)[0])


def test_a_bias_pattern_which_that_library_never_uses():
    state = core_entries(6, 2, 3)
    more = {f"association_core.bias_{n}": drawn(1, 1, 6) for n in "kv"}
    x = drawn(3, 4, 6)
    torch.testing.assert_close(from_hflayers(state | more, num_heads=2)(x)[0], retrieved(state, x, x, x, 2)[0])


def test_another_method_keeps_the_weights():
    state = core_entries(6, 2, 5, None, 6)
    layer = from_hflayers(state, num_heads=2, method="gated-outeffhop(sink=learned)")
    torch.testing.assert_close(layer.q_proj.weight.data, state["association_core.in_proj_weight"][:10])
    assert layer.state.sink is not None
    assert layer(drawn(2, 3, 6))[0].shape == (2, 3, 6)


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
    state = core_entries(6, 2, 5, 3, 7, kdim=4)
    with pytest.raises((ValueError, TypeError)) as caught:
        from_hflayers(change(state), **({"num_heads": 2} | options))
    for word in words:
        assert word in str(caught.value)
