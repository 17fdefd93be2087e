"""Projections with the same input as one product: exact, and only where calling the layers would do no more."""

import copy
import io

import pytest
import torch
from torch import nn

from outeffhop.nn import OutEffHop, packed

LENGTH, SIZE = 40, 12  # 3 samples have more rows than a weight has


@pytest.fixture
def joined(monkeypatch):
    """How many layers each product joined."""
    counts = []
    together = packed._together
    monkeypatch.setattr(packed, "_together", lambda layers, x: counts.append(len(layers)) or together(layers, x))
    return counts


def inputs(kind, batch_first=True):
    torch.manual_seed(1)
    shape = (3, LENGTH, SIZE) if batch_first else (LENGTH, 3, SIZE)
    x, y, z = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    return {"all": (x, x, x), "key and value": (x, y, y), "query and key": (x, x, y), "none": (x, y, z)}[kind]


def build(**options):
    torch.manual_seed(0)
    return OutEffHop(SIZE, 3, dtype=torch.float64, **{"batch_first": True, **options})


def results(layer, given, **options):
    """Output and gradients of all inputs and parameters."""
    out, _ = layer(*given, **options)
    leaves = [*dict.fromkeys(given), *layer.parameters()]
    return out, *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)


def compare(layer, given, monkeypatch, **options):
    found = results(layer, given, **options)
    with monkeypatch.context() as patch:
        patch.setattr(packed, "_can_join", lambda *_: False)
        expected = results(layer, given, **options)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    ("kind", "expected"), [("all", [3]), ("key and value", [2]), ("query and key", [2]), ("none", [])]
)
def test_the_same_as_one_layer_after_another(kind, expected, batch_first, bias, joined, monkeypatch):
    layer = build(batch_first=batch_first, bias=bias)
    results(layer, inputs(kind, batch_first))
    assert joined == expected
    compare(layer, inputs(kind, batch_first), monkeypatch)


def test_masks_and_other_sizes(joined, monkeypatch):
    layer = build(value_head_dim=5, head_dim=7, out_dim=9, add_bias_kv=True)
    mask = torch.zeros(3, LENGTH, dtype=torch.bool)
    mask[1, 30:] = True
    compare(layer, inputs("all"), monkeypatch, key_padding_mask=mask, is_causal=True)
    assert joined == [3]


def test_connected_values_wait_for_the_keys(joined, monkeypatch):
    compare(build(connected=True), inputs("all")[:1], monkeypatch)
    assert joined == [2]


def test_norms_of_their_own_give_inputs_of_their_own(joined, monkeypatch):
    compare(build(normalize=True), inputs("all"), monkeypatch)
    assert joined == []


def test_few_rows_are_not_worth_the_copy(joined):
    layer, x = build(), torch.randn(1, SIZE - 1, SIZE, dtype=torch.float64)
    layer(x, x, x)
    assert joined == []


def test_hooks_are_called(joined):
    layer, given, seen = build(), inputs("all"), []
    expected, _ = layer(*given)
    handle = layer.k_proj.register_forward_hook(lambda module, args, output: seen.append(output) or output * 0)
    assert not torch.equal(layer(*given)[0], expected)
    handle.remove()
    torch.testing.assert_close(layer(*given)[0], expected)
    everywhere = nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(module))
    layer(*given)
    everywhere.remove()
    assert layer.v_proj in seen
    assert joined == [3, 3]


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("how", ["subclass", "other module", "own forward", "parametrized"])
def test_a_layer_that_was_replaced_is_called(how, joined):
    layer, given = build(), inputs("all")
    expected, _ = layer(*given)
    plain = layer.v_proj
    if how == "subclass":
        layer.v_proj = Adapted(SIZE, SIZE, dtype=torch.float64)
        layer.v_proj.load_state_dict(plain.state_dict())
    elif how == "other module":
        layer.v_proj = nn.Sequential(plain, nn.Tanh())
    elif how == "own forward":
        layer.v_proj.forward = lambda x: nn.functional.linear(x, plain.weight)
    else:
        nn.utils.parametrize.register_parametrization(layer.v_proj, "weight", nn.Tanh())
    if how == "own forward":
        nn.init.ones_(plain.bias)  # its forward leaves it out
    found, _ = layer(*given)
    assert joined == [3]
    assert torch.equal(found, expected) == (how == "own forward")


def test_compiled(joined):
    layer, given = build(), inputs("all")
    expected = results(layer, given)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for got, want in zip(results(compiled, given), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_an_exported_layer_keeps_its_projections(joined):
    layer, given = build().requires_grad_(False), tuple(t.detach() for t in inputs("all"))
    program = torch.export.export(layer, given)
    assert joined == []
    torch.testing.assert_close(program.module()(*given)[0], layer(*given)[0])


def test_names_and_first_values_are_those_of_separate_projections():
    layer = build()
    torch.manual_seed(0)
    q, k, v = (nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(3))
    nn.Linear(SIZE, SIZE, dtype=torch.float64)
    for name, linear in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
        nn.init.xavier_uniform_(linear.weight)
        torch.testing.assert_close(layer.state_dict()[f"{name}.weight"], linear.weight.data, rtol=0, atol=0)


def change(layer, how):
    beta = layer.association
    if how == "in place":
        beta.log_beta.fill_(1.0)
    elif how == "state dict":
        layer.load_state_dict({**layer.state_dict(), "association.log_beta": torch.tensor(1.0)})
    elif how == "assigned":
        state = {**layer.state_dict(), "association.log_beta": torch.tensor(1.0, dtype=torch.float64)}
        layer.load_state_dict(state, assign=True)
    elif how == "data":
        beta.log_beta.data = torch.tensor(1.0, dtype=torch.float64)
    else:
        beta.log_beta = torch.tensor(1.0, dtype=torch.float64)


@pytest.mark.parametrize("how", ["in place", "state dict", "assigned", "data", "replaced"])
def test_a_beta_that_changes_is_read_again(how):
    layer, given = build(), inputs("all")
    before, _ = layer(*given)
    change(layer, how)
    after, _ = layer(*given)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, build(beta=torch.e)(*given)[0])


def test_copies_read_their_own_beta():
    layer, given = build(), inputs("all")
    expected, _ = layer(*given)
    twin = copy.deepcopy(layer)
    twin.association.log_beta.fill_(1.0)
    torch.testing.assert_close(twin(*given)[0], build(beta=torch.e)(*given)[0])
    torch.testing.assert_close(layer(*given)[0], expected)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(*given)[0], twin(*given)[0])


def test_without_values_to_read():
    meta = OutEffHop(SIZE, 3, device="meta")
    assert meta(torch.randn(2, 3, SIZE, device="meta"))[0].shape == (2, 3, SIZE)
    with torch.inference_mode():
        layer = build()
    assert layer(torch.randn(3, 5, SIZE, dtype=torch.float64))[0].shape == (3, 5, SIZE)
