"""Presets: every model, size and method builds; the paper's sizes are the paper's, difference by difference."""

import pytest
import torch

from outeffhop.methods import METHODS
from outeffhop.models import model_summary, presets
from outeffhop.models.checkpoint import load_checkpoint

SIX = list(METHODS)[:6]


def _inputs(model, net):
    generator = torch.Generator().manual_seed(0)
    if model in ("bert", "opt"):
        return {"input_ids": torch.randint(5, net.config.vocab_size, (2, 9), generator=generator)}
    if model == "vit":
        size = net.config.image_size
        return {"pixel_values": torch.randn(2, net.config.num_channels, size, size, generator=generator)}
    return {"past_values": torch.randn(2, net.config.in_len, net.config.num_series, generator=generator)}


@pytest.mark.parametrize("method", SIX)
@pytest.mark.parametrize("model", presets.MODELS)
def test_every_tiny_model_runs(model, method):
    net = presets.build(model, "tiny", method).eval()
    out = net(**_inputs(model, net))[0]
    assert torch.isfinite(out).all()


EVERYTHING = "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)"


@pytest.mark.parametrize("method", ["outeffhop(sink=learned)", "gated-outeffhop(predictor=features)", EVERYTHING])
@pytest.mark.parametrize("model", presets.MODELS)
def test_options_beyond_the_papers_are_built_counted_saved_and_loaded(model, method, tmp_path):
    torch.manual_seed(0)
    net = presets.build(model, "tiny", method).eval()
    summary = model_summary(net)
    assert summary.method == method
    width, heads = net.config.hidden_size, sum(summary.heads)
    per_layer = width * width + width if "element" in method else summary.heads[0] * (width + 1)
    assert summary.gate_parameters == (summary.layers * per_layer if "gated" in method else 0)
    assert summary.sink_parameters == (heads if "sink=learned" in method else 0)
    assert summary.norm_parameters == (heads if "qk_norm" in method else 0)
    plain = presets.build(model, "tiny", "vanilla")
    assert summary.parameters - summary.extra_parameters == model_summary(plain).parameters
    new = set(net.state_dict()) - set(plain.state_dict())
    with torch.no_grad():
        for name in new:
            net.get_parameter(name).add_(torch.randn(net.get_parameter(name).shape))
    net.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert model_summary(loaded) == summary
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in loaded.state_dict().items())
    torch.testing.assert_close(loaded(**_inputs(model, net))[0], net(**_inputs(model, net))[0])


def _count(model, method):
    with torch.device("meta"):
        net = presets.build(model, "paper", presets.paper_method(model, method))
    return net, sum(p.numel() for p in net.parameters())


def test_bert_has_the_papers_size():
    # The paper's 108.9M is the encoder with its embeddings: without the head of the masked-language task.
    net, total = _count("bert", "outeffhop")
    head = sum(p.numel() for n, p in net.named_parameters() if n.startswith("cls."))
    assert total == 109_514_298
    assert total - head == 108_891_648  # the paper: 108.9M
    _, gated = _count("bert", "gated-outeffhop")
    assert gated - total == 12 * 12 * (16 * 64 + 16 + 16 + 1)  # an MLP 64 → 16 → 1 per head: 0.152M; the paper: 0.1M


def test_opt_has_the_papers_size():
    _, total = _count("opt", "outeffhop")
    assert total == 124_059_648  # the paper: 124.06M, at 512 positions
    _, gated = _count("opt", "gated")
    assert gated - total == 12 * 12 * (64 + 1)  # 0.009M; the paper: 0.01M


def test_vit_has_the_papers_size():
    _, total = _count("vit", "vanilla")
    assert total == pytest.approx(22.03e6, abs=0.01e6)
    _, gated = _count("vit", "gated")
    assert gated - total == 12 * 6 * (64 + 1)


@pytest.mark.parametrize(
    ("model", "size", "layers", "heads", "parameters"),
    [
        ("bert", "tiny", 4, 4, 958_848),
        ("bert", "small", 6, 8, 23_448_064),
        ("opt", "tiny", 4, 4, 941_056),
        ("opt", "small", 6, 8, 23_372_800),
        ("vit", "tiny", 4, 4, 201_418),
        ("vit", "small", 8, 8, 6_344_458),
        ("stanhop", "tiny", 18, 4, 131_122),
        ("stanhop", "small", 25, 4, 706_904),
    ],
)
def test_the_sizes_that_results_were_measured_with(model, size, layers, heads, parameters):
    with torch.device("meta"):
        found = model_summary(presets.build(model, size, "vanilla"))
    assert (found.layers, set(found.heads), found.parameters) == (layers, {heads}, parameters)


def test_the_papers_parameters_are_asked_for():
    assert str(presets.paper_method("opt", "clipped")) == "clipped(alpha=12)"
    assert str(presets.paper_method("stanhop", "clipped")) == "clipped(gamma=-0.1, zeta=1.1)"
    assert str(presets.paper_method("bert", "gated")) == "gated(predictor=mlp, init=0.5)"
    assert str(presets.paper_method("bert", "gated", "small")) == "gated(predictor=mlp)"
    assert str(presets.paper_method("opt", "clipped(gamma=-0.1)")) == "clipped(gamma=-0.1)"
    assert str(presets.paper_method("vit", "outeffhop")) == "outeffhop"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", presets.MODELS)
def test_a_name_means_its_defaults(model, method):
    """In ``build`` as in ``convert``, for every model, with or without brackets."""
    for written in (method, f"{method}()"):
        assert model_summary(presets.build(model, "tiny", written)).method == method


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("brt",), "'bert'"), (("opt", "huge"), "tiny, small, paper"), (("opt", "tiny", "outefhop"), "'outeffhop'")],
)
def test_errors(arguments, words):
    with pytest.raises(ValueError, match=words):
        presets.build(*arguments)


@pytest.mark.parametrize(
    "change", [{"num_attention_heads": 0}, {"hidden_size": -4}, {"hidden_act": "no"}, {"pad_token_id": 99_999}]
)
def test_changes_that_transformers_cannot_build_are_named(change):
    name, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=f"bert cannot be built with {name}={value!r}: ."):
        presets.build("bert", "tiny", **change)


def test_a_change_of_no_field_is_refused():
    with pytest.raises(ValueError, match="hiden_size=64 is not a field of BertConfig; did you mean 'hidden_size'"):
        presets.build("bert", "tiny", hiden_size=64)
    assert presets.config("vit", "tiny", num_labels=7).num_labels == 7


@pytest.mark.parametrize(("method", "dead"), [("vanilla", False), ("clipped", True), ("clipped-outeffhop", True)])
def test_clipping_may_leave_a_new_model_without_attention(method, dead):
    """With the paper's γ weights below 3.1/128 become 0, and of 128 tokens none has more before training."""
    torch.manual_seed(0)
    net = presets.build("bert", "small", method).eval()
    ids = torch.randint(5, net.config.vocab_size, (2, 128))
    out = net(input_ids=ids, labels=ids, output_attentions=True)
    out.loss.backward()
    assert all(bool((weights == 0).all()) == dead for weights in out.attentions)
    learned = [p for name, p in net.named_parameters() if name.endswith(("query.weight", "key.weight", "value.weight"))]
    assert len(learned) == 3 * net.config.num_hidden_layers
    assert all(bool((p.grad == 0).all()) == dead for p in learned)
