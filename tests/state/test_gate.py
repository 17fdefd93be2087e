"""Gates: the first opening is exact for every input, kind and predictor, and stays so after foreign initialisers."""

import itertools

import pytest
import torch

from outeffhop.methods import GateSpec
from outeffhop.nn import OutEffHop
from outeffhop.state import Gate
from outeffhop.state.gate import gated

KINDS = list(itertools.product(["token", "element", "head", "constant"], ["linear", "mlp", "features"]))


@pytest.mark.parametrize(("gate", "predictor"), KINDS)
@pytest.mark.parametrize("init", [0.25, 0.9])
def test_first_opening_is_exact(gate, predictor, init):
    module = Gate(GateSpec(gate, predictor, init), 16, 4)

    def reinitialise(m):  # as transformers' post_init does
        if isinstance(m, torch.nn.Linear):
            torch.nn.init.normal_(m.weight, std=0.02)
            torch.nn.init.zeros_(m.bias)

    module.apply(reinitialise)
    opening = module(100 * torch.randn(2, 5, 16))
    assert opening.shape == {"token": (2, 5, 4), "element": (2, 5, 4, 4), "head": (2, 1, 4), "constant": (4,)}[gate]
    torch.testing.assert_close(opening, torch.full_like(opening, init))


@pytest.mark.parametrize(("gate", "predictor"), KINDS)
def test_every_parameter_can_learn(gate, predictor):
    torch.manual_seed(0)
    module = Gate(GateSpec(gate, predictor), 16, 4)
    x, target = torch.randn(8, 5, 16), torch.rand((8, 5, 4, 4) if gate == "element" else (8, 5, 4))
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    losses = []
    for _ in range(20):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, parameter in module.named_parameters():
        assert not torch.equal(parameter, before[name]), name


def test_shapes_and_meaning():
    x = torch.randn(2, 5, 16)
    token, head = (Gate(GateSpec(kind, "features"), 16, 4) for kind in ("token", "head"))
    with torch.no_grad():
        token.weight.normal_()
        head.weight.copy_(token.weight)
    assert token(x).shape == (2, 5, 4)
    assert head(x).shape == (2, 1, 4)
    logits = torch.logit(token(x)).mean(1, keepdim=True)
    torch.testing.assert_close(torch.logit(head(x)), logits, atol=1e-4, rtol=1e-4)
    seen = torch.tensor([[True, True, False, False, False], [True] * 5])
    torch.testing.assert_close(head(x, seen)[0], head(x[:1, :2])[0])
    torch.testing.assert_close(head(x, seen)[1], head(x)[1])
    torch.testing.assert_close(token(x, seen), token(x))
    assert Gate(GateSpec("constant"), 16, 4)(x).shape == (4,)


@pytest.mark.parametrize("predictor", ["linear", "mlp", "features"])
def test_an_element_gate_has_a_token_gate_for_every_channel(predictor):
    torch.manual_seed(0)
    x, heads, context = torch.randn(2, 5, 16), 4, torch.randn(2, 5, 4, 3)
    element = Gate(GateSpec("element", predictor), 16, heads, 3)
    with torch.no_grad():
        element.weight.normal_()
        element.bias.normal_()
    out = gated(context, element(x))
    for channel in range(3):
        token = Gate(GateSpec("token", predictor), 16, heads)
        state = {k: v[:, channel] if k in ("weight", "bias") else v for k, v in element.state_dict().items()}
        token.load_state_dict(state)
        torch.testing.assert_close(
            out[..., channel : channel + 1], gated(context[..., channel : channel + 1], token(x))
        )


def test_a_gated_layer_starts_as_init_times_the_ungated_one():
    torch.manual_seed(0)
    gated = OutEffHop(8, 2, batch_first=True, bias=False, method="gated-outeffhop(init=0.25)")
    plain = OutEffHop(8, 2, batch_first=True, bias=False)
    plain.load_state_dict({k: v for k, v in gated.state_dict().items() if "gate" not in k})
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(gated(x)[0], 0.25 * plain(x)[0])
    extra = sum(p.numel() for p in gated.parameters()) - sum(p.numel() for p in plain.parameters())
    assert extra == 2 * 4 + 2


@pytest.mark.parametrize("gate", ["token", "head"])
def test_many_tokens_have_the_openings_and_gradients_of_few(gate):
    torch.manual_seed(0)
    module = Gate(GateSpec(gate, "linear"), 12, 3).double()
    with torch.no_grad():
        module.weight.normal_()
    x = torch.randn(90, 12, dtype=torch.float64, requires_grad=True)
    predicted = module._predict(x)  # by one matrix product
    expected = torch.cat([module._predict(some) for some in x.split(30)])
    torch.testing.assert_close(predicted, expected)
    leaves = x, module.weight
    for ours, theirs in zip(
        torch.autograd.grad(predicted.sin().sum(), leaves),
        torch.autograd.grad(expected.sin().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    seen = torch.autograd.functional.jacobian(module._predict, x[:64])[5, 1]  # of the second head's opening at token 5
    assert seen.nonzero()[:, 0].unique().tolist() == [5]
    assert seen.nonzero()[:, 1].unique().tolist() == [4, 5, 6, 7]  # its own part
