"""hflayers' layers by its arguments: its outputs from plain float64 code, its state dicts, and what it gets wrong."""

import copy
import io

import pytest
import torch
from theirs import D, core_entries, drawn, norm_entries, retrieved
from torch import nn

from outeffhop.nn.hflayers import Hopfield, HopfieldLayer, HopfieldPooling

PADDING = torch.zeros(3, 6, dtype=torch.bool)
PADDING[0, 3:] = True
MASK = drawn(5, 6, seed=8) > 0.8
MASK[:, 0] = False
WITHOUT_NORMS = {f"normalize_{n}": False for n in ("stored_pattern", "state_pattern", "pattern_projection")}
ALL_STATIC = {f"{n}_as_static": True for n in ("stored_pattern", "state_pattern", "pattern_projection")}
RETRIEVAL = WITHOUT_NORMS | ALL_STATIC | {"disable_out_projection": True}


def inputs(stored=8, state=8, projection=8):
    return drawn(3, 6, stored), drawn(3, 5, state, seed=6), drawn(3, 6, projection, seed=7)


# arguments, and what core_entries and retrieved have to know of them
CASES = [
    ({}, {}, {}),
    ({"num_heads": 2, "scaling": 0.7, "update_steps_max": 3}, {"heads": 2}, {"heads": 2, "scaling": 0.7, "steps": 4}),
    (
        {"num_heads": 2, "scaling": torch.tensor([0.4, 1.9], dtype=D)},
        {"heads": 2},
        {"heads": 2, "scaling": torch.tensor([0.4, 1.9], dtype=D)},
    ),
    ({"num_heads": 2, "input_bias": False}, {"heads": 2, "bias": False}, {"heads": 2}),
    ({"num_heads": 2, "add_zero_association": True}, {"heads": 2}, {"heads": 2, "zero": True}),
    (
        {"num_heads": 2, "pattern_projection_as_connected": True},
        {"heads": 2, "connected": True},
        {"heads": 2, "connected": True},
    ),
    (
        {"stored_pattern_as_static": True, "pattern_projection_as_connected": True},
        {"connected": True, "static": "k"},
        {"connected": True, "static": "k"},
    ),
    (
        {"pattern_projection_as_static": True, "pattern_projection_as_connected": True},
        {"connected": True, "static": "v"},
        {"connected": True, "static": "v"},
    ),
    *(
        (
            {f"{name}_as_static": True for name in names} | {"num_heads": heads, "hidden_size": 8},
            {"static": static, "heads": heads, "hidden": 8},
            {"static": static, "heads": heads},
        )
        for heads in (1, 2)
        for static, names in {
            "q": ["state_pattern"],
            "k": ["stored_pattern"],
            "v": ["pattern_projection"],
            "qk": ["state_pattern", "stored_pattern"],
            "kv": ["stored_pattern", "pattern_projection"],
        }.items()
    ),
]


@pytest.mark.parametrize(("arguments", "entries", "how"), CASES, ids=lambda a: ",".join(map(str, a)))
def test_hopfield(arguments, entries, how):
    theirs = core_entries(8, **entries) | norm_entries(8, 8, 8)
    layer = Hopfield(8, dtype=D, **arguments)
    assert not any(layer.load_state_dict(theirs))
    given = inputs()
    masks = {"stored_pattern_padding_mask": PADDING, "association_mask": MASK}
    out, association, value = retrieved(theirs, *given, padding=PADDING, mask=MASK, **how)
    torch.testing.assert_close(layer(given, **masks), out)
    torch.testing.assert_close(layer(list(given), **masks, need_weights=True)[1], association)
    torch.testing.assert_close(layer.get_association_matrix(given, **masks), association)
    torch.testing.assert_close(layer.get_projected_pattern_matrix(given, **masks), value)
    out, *_ = retrieved(theirs, given[0], given[0], given[0], **how)
    torch.testing.assert_close(layer(given[0]), out)


@pytest.mark.parametrize("batch_first", [True, False])
def test_sizes_of_their_own(batch_first):
    theirs = core_entries(8, 2, 3, 5, 4, kdim=7, vdim=9) | norm_entries(8, 7, 9)
    sizes = {"stored_pattern_size": 7, "pattern_projection_size": 9}
    layer = Hopfield(8, 3, 4, 5, 2, dtype=D, batch_first=batch_first, association_activation="tanh", **sizes)
    layer.load_state_dict(theirs)
    given = inputs(7, 8, 9)
    expected = torch.tanh(retrieved(theirs, *given, 2, padding=PADDING)[0])
    if not batch_first:
        given, expected = tuple(t.transpose(0, 1) for t in given), expected.transpose(0, 1)
    torch.testing.assert_close(layer(given, PADDING), expected)
    assert layer.get_projected_pattern_matrix(given).shape == (3, 2, 6, 5)
    assert (layer.input_size, layer.output_size) == (8, 4)


@pytest.mark.parametrize("heads", [1, 2])
def test_plain_retrieval_needs_no_size(heads):
    """The setting without anything learned, and no sample sees another in any number of heads."""
    layer = Hopfield(scaling=2.0, num_heads=heads, update_steps_max=1, **RETRIEVAL)
    assert not list(layer.parameters())
    for given in (inputs(), inputs(7, 7, 9)):
        out, *_ = retrieved({}, *given, heads, static="qkv", scaling=2.0, steps=2)
        torch.testing.assert_close(layer(given), out)
        torch.testing.assert_close(layer(tuple(t[1:2] for t in given)), out[1:2])
    assert Hopfield(**RETRIEVAL).scaling == 1.0


@pytest.mark.parametrize("quantity", [1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_pooling(quantity, static):
    options = {"state_pattern_as_static": True, "hidden_size": 3} if static else {}
    size = 3 if static else 8
    entries = core_entries(8, 2, 3 if static else None, static="q" if static else "") | norm_entries(size, 8, 8)
    weights = drawn(1, quantity, size, seed=9)
    layer = HopfieldPooling(8, num_heads=2, quantity=quantity, dtype=D, **options)
    layer.load_state_dict({"pooling_weights": weights} | {f"hopfield.{k}": v for k, v in entries.items()})
    stored, _, projection = inputs()
    expected = retrieved(
        entries, stored, weights.expand(3, -1, -1), projection, 2, padding=PADDING, static="q" * static
    )
    torch.testing.assert_close(layer((stored, projection), PADDING), expected[0].flatten(1))
    torch.testing.assert_close(layer.get_association_matrix((stored, projection), PADDING), expected[1])
    torch.testing.assert_close(layer((stored, projection), PADDING, need_weights=True)[1], expected[1])
    torch.testing.assert_close(layer.get_projected_pattern_matrix((stored, projection)), expected[2])
    torch.testing.assert_close(layer(stored), layer((stored, stored)))


@pytest.mark.parametrize("separated", [False, True])
@pytest.mark.parametrize("batch_first", [True, False])
def test_lookup(separated, batch_first):
    size = 9 if separated else 8
    entries = core_entries(8, 2, vdim=size) | norm_entries(8, 8, size)
    weights, targets = drawn(1, 6, 8, seed=9), drawn(1, 6, 9, seed=10)
    state = {"lookup_weights": weights} | ({"target_weights": targets} if separated else {})
    if not batch_first:
        state = {name: t.transpose(0, 1) for name, t in state.items()}
    layer = HopfieldLayer(
        8,
        num_heads=2,
        quantity=6,
        lookup_weights_as_separated=separated,
        pattern_projection_size=size,
        batch_first=batch_first,
        dtype=D,
    )
    layer.load_state_dict(state | {f"hopfield.{k}": v for k, v in entries.items()})
    x = drawn(3, 5, 8)
    y = (targets if separated else weights).expand(3, -1, -1)
    out, association, value = retrieved(entries, weights.expand(3, -1, -1), x, y, 2, mask=MASK)
    if not batch_first:
        x, out = x.transpose(0, 1), out.transpose(0, 1)
    torch.testing.assert_close(layer(x, association_mask=MASK), out)
    torch.testing.assert_close(layer.get_association_matrix(x, association_mask=MASK), association)
    torch.testing.assert_close(layer.get_projected_pattern_matrix(x), value)


def test_what_is_not_trainable_is_not_trained():
    pooling = HopfieldPooling(8, trainable=False)
    lookup = HopfieldLayer(
        8, quantity=2, trainable=False, lookup_weights_as_separated=True, lookup_targets_as_trainable=False
    )
    assert "pooling_weights" not in {name for name, p in pooling.named_parameters() if p.requires_grad}
    assert not {"lookup_weights", "target_weights"} & {n for n, p in lookup.named_parameters() if p.requires_grad}


def test_a_scaling_that_requires_a_gradient_is_learned():
    layer = Hopfield(8, num_heads=2, scaling=torch.tensor([0.5, 2.0], requires_grad=True), dtype=D)
    torch.testing.assert_close(layer.scaling, torch.tensor([0.5, 2.0], dtype=D))
    layer(drawn(2, 3, 8)).square().sum().backward()
    assert layer.core.association.log_beta.grad.abs().min() > 0


def test_gradients():
    layer = Hopfield(4, 3, num_heads=2, update_steps_max=1, dtype=D, association_activation="tanh")
    names, parameters = zip(*layer.named_parameters(), strict=True)
    parameters = tuple(p + 0.3 * torch.randn_like(p) for p in parameters)
    given = (drawn(2, 3, 4), drawn(2, 2, 4, seed=1), drawn(2, 3, 4, seed=2))

    def f(stored, state, projection, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), ((stored, state, projection),))

    torch.manual_seed(0)
    leaves = [t.detach().requires_grad_() for t in (*given, *parameters)]
    assert torch.autograd.gradcheck(f, leaves)


def test_a_state_that_sees_nothing_gets_nothing():
    layer = Hopfield(8, dtype=D, disable_out_projection=True)
    x = drawn(3, 6, 8)
    masked = PADDING.clone()
    masked[1] = True
    out = layer(x, masked)
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[2], layer(x)[2])


def test_the_association_matrix_has_no_dropout():
    layer = Hopfield(8, dropout=0.5, dtype=D)
    x = drawn(3, 6, 8)
    torch.testing.assert_close(layer.get_association_matrix(x).sum(-1), torch.ones(3, 1, 6, dtype=D))
    assert layer.core.association.training
    assert not layer.get_association_matrix(x).requires_grad


def test_to_rest():
    layer = Hopfield(8, update_steps_max=None, update_steps_eps=1e-10, scaling=0.5, dtype=D)
    many = Hopfield(8, update_steps_max=60, scaling=0.5, dtype=D)
    many.load_state_dict(layer.state_dict())
    x = drawn(3, 6, 8)
    torch.testing.assert_close(layer(x), many(x), atol=1e-8, rtol=0)
    torch.testing.assert_close(layer(x[:1]), layer(x)[:1], atol=1e-14, rtol=0)  # whatever else is in the batch


def test_another_method():
    layer = HopfieldPooling(8, num_heads=2, method="gated-outeffhop(sink=learned)", dtype=D)
    entries = core_entries(8, 2) | norm_entries(8, 8, 8)
    layer.load_state_dict({"pooling_weights": drawn(1, 1, 8)} | {f"hopfield.{k}": v for k, v in entries.items()})
    out, association = layer(drawn(3, 6, 8), need_weights=True)
    assert (association.sum(-1) < 1).all()
    out.sum().backward()
    assert layer.hopfield.core.state.sink.grad is not None


def build(kind):
    torch.manual_seed(0)
    options = {} if kind is Hopfield else {"quantity": 3}
    return kind(8, num_heads=2, update_steps_max=1, dtype=D, **options)


@pytest.mark.parametrize("kind", [Hopfield, HopfieldPooling, HopfieldLayer])
def test_copies_and_files(kind):
    layer, x = build(kind), drawn(3, 6, 8)
    expected = layer(x)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), expected)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = nn.Sequential(kind(8, scaling=9.0, **{"num_heads": 2, "update_steps_max": 1, "dtype": D} | (
        {} if kind is Hopfield else {"quantity": 3})))  # fmt: skip
    assert not any(other.load_state_dict({f"0.{k}": v for k, v in torch.load(stream).items()}))
    assert torch.equal(other(x), expected)  # β came with the state
    if kind is not Hopfield:
        copied.load_state_dict(layer.state_dict())
    stream = io.BytesIO()
    torch.save(copied, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    assert torch.equal(again(x), expected)
    entries = core_entries(8, 2) | norm_entries(8, 8, 8)
    prefix = "" if kind is Hopfield else "hopfield."
    again.load_state_dict({f"{prefix}{k}": v for k, v in entries.items()}, strict=kind is Hopfield)


def test_a_state_dict_that_does_not_fit_is_refused():
    entries = core_entries(8, 2) | norm_entries(8, 8, 8)
    with pytest.raises(RuntimeError, match=r"core\.q_proj\.weight"):
        Hopfield(8).load_state_dict({k: v for k, v in entries.items() if "in_proj" not in k})
    with pytest.raises(RuntimeError, match="p_norm_weight"):
        Hopfield(8).load_state_dict(entries | {"association_core.p_norm_weight": torch.ones(4)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        Hopfield(8, 3, num_heads=2).load_state_dict(entries)


def test_compiled_whole():
    layer, x = build(HopfieldPooling), drawn(3, 6, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"normalize_hopfield_space": True}, ValueError, ["normalize_hopfield_space", "qk_norm=rms"]),
        ({"concat_bias_pattern": True}, ValueError, ["concat_bias_pattern", "add_bias_kv"]),
        ({"input_size": None}, ValueError, ["input_size=None"]),
        (
            RETRIEVAL | {"input_size": None, "normalize_state_pattern": True},
            ValueError,
            ["state_pattern", "input_size"],
        ),
        (RETRIEVAL | {"method": "gated"}, ValueError, ["gate", "outeffhop"]),
        ({"num_heads": 3}, ValueError, ["input_size=8", "num_heads=3", "hidden_size"]),
        ({"num_heads": 0}, ValueError, ["num_heads=0"]),
        ({"scaling": torch.ones(2)}, ValueError, ["scaling", "(1,)"]),
        ({"scaling": torch.tensor([1.0, 0.0]), "num_heads": 2}, ValueError, ["scaling", "greater than 0"]),
        ({"scaling": -1.0}, ValueError, ["scaling=-1.0"]),
        ({"update_steps_max": torch.ones(1)}, TypeError, ["update_steps_max", "one number"]),
        ({"update_steps_eps": torch.ones(1)}, TypeError, ["update_steps_eps", "one number"]),
        ({"update_steps_max": -1}, ValueError, ["update_steps_max=-1"]),
        ({"association_activation": "nothing"}, ValueError, ["association_activation='nothing'"]),
        ({"pattern_projection_as_connected": True, "pattern_projection_size": 5}, ValueError, ["=5", "8"]),
        ({"lookup": True}, TypeError, ["lookup"]),
    ],
)
def test_arguments_that_are_not_served(arguments, kind, words):
    with pytest.raises(kind) as caught:
        Hopfield(**{"input_size": 8} | arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ((torch.ones(2, 3, 8),) * 2, TypeError, ["2 things", "stored, state, projection"]),
        (None, TypeError, ["NoneType"]),
        (torch.ones(3, 8), ValueError, ["stored pattern", "(3, 8)", "[batch, length, size]"]),
        ((torch.ones(2, 3, 8), torch.ones(2, 3, 7), torch.ones(2, 3, 8)), ValueError, ["(2, 3, 7)", "8"]),
        ((torch.ones(2, 3, 8), torch.ones(2, 3, 8), torch.ones(2, 4, 8)), ValueError, ["length 3", "4"]),
    ],
)
def test_inputs_that_do_not_fit(given, kind, words):
    with pytest.raises(kind) as caught:
        Hopfield(8)(given)
    for word in words:
        assert word in str(caught.value)


def test_other_inputs_that_do_not_fit():
    with pytest.raises(ValueError, match="size 7 and stored patterns 8"):
        Hopfield(**RETRIEVAL)((torch.ones(2, 3, 8), torch.ones(2, 3, 7), torch.ones(2, 3, 8)))
    with pytest.raises(TypeError, match=r"3 things: .*two tensors"):
        HopfieldPooling(8)((torch.ones(2, 3, 8),) * 3)
    with pytest.raises(ValueError, match="quantity=0"):
        HopfieldPooling(8, quantity=0)
    with pytest.raises(ValueError, match="lookup_weights_as_separated"):
        HopfieldLayer(8, pattern_projection_size=5)
    with pytest.raises(ValueError, match="input_size=None"):
        HopfieldPooling(None, **RETRIEVAL)
