"""LayerNorms folded into the next layers: the same function, their scale gone, and what cannot be is left and said."""

import copy

import architectures
import pytest
import torch
from subjects import OTHERS, PAPER, build, decibels, inputs, output, quantize
from torch import nn
from trained_look import look_trained
from transformers import Gemma2Config, Gemma2ForCausalLM

from outeffhop.quantization import QuantizationReport, evaluate, fold_layernorm, simulate

EVERYTHING = "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)"


def double(model, batch):
    return model.double(), {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def norms(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)}


# Linear layers alone take these; the rest is in a residual sum
FOLDED = {
    "bert": {"bert.encoder.layer.1.output.LayerNorm": {"cls.predictions.transform.dense"}},
    "opt": {
        f"model.decoder.layers.{i}.{norm}": {f"model.decoder.layers.{i}.{layer}" for layer in layers.split()}
        for i in (0, 1)
        for norm, layers in {
            "self_attn_layer_norm": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
            "final_layer_norm": "fc1",
        }.items()
    },
    "vit": {
        **{
            f"vit.layers.{i}.{norm}": {f"vit.layers.{i}.{layer}" for layer in layers.split()}
            for i in (0, 1)
            for norm, layers in {
                "layernorm_before": "attention.q_proj attention.k_proj attention.v_proj",
                "layernorm_after": "mlp.fc1",
            }.items()
        },
        "vit.layernorm": {"classifier"},
    },
    # the last encoder block's output is what the last decoder layer retrieves from, and nothing else
    "stanhop": {
        "encoder.0.sthm.norm_series_mlp": {"decoder.1.cross.k_proj"},
        "decoder.1.norm_mlp": {"decoder.1.head"},
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_same_function_and_every_norm_accounted_for(name):
    model, batch = double(build(name), inputs(name))
    before = copy.deepcopy(model.state_dict())
    folded, what = fold_layernorm(model, batch)
    assert {norm: set(layers) for norm, layers in what.folded.items()} == FOLDED[name]
    assert what.folded.keys() | what.kept.keys() == norms(model).keys()
    assert not what.folded.keys() & what.kept.keys()
    for seed in range(3):  # also on batches it has not seen
        _, other = double(model, inputs(name, seed=seed, length=7))
        torch.testing.assert_close(output(folded, other), output(model, other), rtol=1e-10, atol=1e-10)
    assert what.difference < 1e-12
    for n, norm in norms(folded).items():
        plain = torch.equal(norm.weight, torch.ones_like(norm.weight)) and not norm.bias.any()
        assert plain == (n in what.folded), n
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(n in str(what) for n in norms(model))


def test_one_layer_by_hand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(3), nn.Linear(3, 2, bias=False)

        def forward(self, x):
            return self.linear(self.norm(x).flatten(0, 1)[1:])

    model = Net().double()
    with torch.no_grad():
        model.norm.weight.copy_(torch.tensor([10.0, 0.0, -1.0]))
        model.norm.bias.copy_(torch.tensor([1.0, 2.0, 0.5]))
    folded, what = fold_layernorm(model, {"x": torch.randn(2, 4, 3, dtype=torch.float64)})
    w = model.linear.weight
    assert torch.equal(folded.linear.weight, w * torch.tensor([10.0, 0.0, -1.0], dtype=torch.float64))
    torch.testing.assert_close(folded.linear.bias, w[:, 0] + 2 * w[:, 1] + 0.5 * w[:, 2])
    assert model.linear.bias is None
    assert what.folded == {"norm": ("linear",)}


@pytest.mark.parametrize("gate", ["token", "element", "head", "constant"])
@pytest.mark.parametrize("predictor", ["linear", "mlp", "features"])
def test_a_gate_takes_the_scale_too(gate, predictor):
    model, batch = double(build("vit", f"gated(gate={gate}, predictor={predictor})"), inputs("vit"))
    folded, what = fold_layernorm(model, batch)
    assert "vit.layers.0.attention.outeffhop.gate" in what.folded["vit.layers.0.layernorm_before"]
    torch.testing.assert_close(output(folded, batch), output(model, batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", PAPER)
def test_with_every_option_of_a_method(name):
    model, batch = double(build(name, EVERYTHING), inputs(name))
    folded, what = fold_layernorm(model, batch)
    assert what.folded.keys() == FOLDED[name].keys()
    torch.testing.assert_close(output(folded, batch), output(model, batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("name", "folded", "kept"),
    [
        ("gpt2", "transformer.h.0.ln_1", {"transformer.ln_f": "lm_head is shared"}),  # Conv1D: [in, out]
        ("llama", "model.norm", {}),  # its head is its own
        ("gpt-oss", "model.layers.0.input_layernorm", {"model.layers.1.post_attention_layernorm": "router"}),
        ("roberta", "roberta.encoder.layer.1.output.LayerNorm", {"roberta.embeddings.LayerNorm": "add"}),
    ],
)
def test_other_architectures(name, folded, kept):
    assert name in OTHERS
    model, batch = double(build(name, "eager"), inputs(name))
    new, what = fold_layernorm(model, batch)
    assert folded in what.folded
    assert all(words in what.kept[norm] for norm, words in kept.items())
    torch.testing.assert_close(output(new, batch), output(model, batch), rtol=1e-10, atol=1e-10)


def test_a_weight_that_is_added_to_one_is_left():
    size = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, head_dim=8)
    config = Gemma2Config(**size, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager")
    torch.manual_seed(0)
    model, batch = Gemma2ForCausalLM(config).eval(), {"input_ids": torch.arange(3, 10)[None]}
    nn.init.normal_(model.model.layers[0].input_layernorm.weight)
    folded, what = fold_layernorm(model, batch)
    assert "not its weight times" in what.kept["model.layers.0.input_layernorm"]
    torch.testing.assert_close(folded(**batch).logits, model(**batch).logits)


class Shared(nn.Module):
    """One Linear, for the norm's output and for another tensor."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.linear(self.norm(x)) + self.linear(x)


class Hidden(Shared):
    """The norm's output once more, past everything that can be seen."""

    def forward(self, x):
        y = self.norm(x)
        with torch._C.DisableTorchFunction():
            hidden = y.sum()
        return self.linear(y) + hidden


class Given(Shared):
    def forward(self, x):
        y = self.norm(x)
        return self.linear(y), y


def test_what_cannot_be_folded_is_kept():
    batch = {"x": torch.randn(3, 4)}
    assert fold_layernorm(Shared(), batch)[1].kept == {"norm": "linear takes other inputs as well"}
    assert fold_layernorm(Given(), batch)[1].kept == {"norm": "its output goes out of the model"}


def test_another_function_is_refused():
    with pytest.raises(ValueError, match="Hidden"):
        fold_layernorm(Hidden(), {"x": torch.randn(3, 4)})


def test_folding_again_changes_nothing_and_the_model_is_left_as_it_was():
    model, batch = double(build("opt"), inputs("opt"))
    truth, before = output(model, batch), copy.deepcopy(model.state_dict())
    folded, what = fold_layernorm(model.train(), batch)
    assert model.training
    assert not folded.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(folded.model.decoder.layers[0].final_layer_norm.weight, torch.ones(32, dtype=torch.float64))
    torch.testing.assert_close(output(folded, batch), truth, rtol=1e-10, atol=1e-10)
    assert fold_layernorm(folded, batch)[1].folded == what.folded
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in folded.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("labels", [False, True])  # with them, the first output is a loss in float32
def test_lower_precision(dtype, labels):
    model, batch = build("opt").to(dtype), inputs("opt")
    if labels:
        batch["labels"] = batch["input_ids"]
    folded, what = fold_layernorm(model, batch)
    assert folded.dtype == dtype
    assert what.folded.keys() == FOLDED["opt"].keys()
    assert decibels(output(model, batch), output(folded, batch)) > 30


def test_rounding_that_is_too_coarse_is_named_with_what_rounds_less():
    model = look_trained(architectures.build("OPTForCausalLM")).bfloat16()
    batch = {"input_ids": torch.randint(3, architectures.VOCAB, (2, 16), generator=torch.Generator().manual_seed(0))}
    with pytest.raises(ValueError, match=r"rounding to bfloat16 explains only 0\.088; .*or in float32"):
        fold_layernorm(model, batch)
    assert fold_layernorm(model.float(), batch)[1].difference < 1e-4


def test_a_simulation_is_refused():
    with pytest.raises(ValueError, match="before simulate"):
        fold_layernorm(simulate(build("opt")), inputs("opt"))


def spiked():
    """A norm whose scale makes outliers of two channels that the next layer hardly weighs."""
    model = build("opt")
    layer = model.model.decoder.layers[0]
    with torch.no_grad():
        for norm, takers in (
            (layer.self_attn_layer_norm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
            (layer.final_layer_norm, (layer.fc1,)),
        ):
            norm.weight[:2] = 100.0
            for taker in takers:
                taker.weight[:, :2] /= 100.0
    return model


@pytest.mark.parametrize("scheme", ["W8A8", "W4A8", "W8A8 linear", "W8A8 smoothquant", "W8A8 per-token"])
def test_it_composes_with_every_scheme_and_helps_where_the_scale_makes_outliers(scheme):
    model, batch = spiked(), inputs("opt")
    folded, _ = fold_layernorm(model, batch)
    truth = output(model, batch)
    plain, better = (decibels(truth, output(quantize(m, [batch], scheme=scheme), batch)) for m in (model, folded))
    if scheme == "W4A8":  # the norm's own scale is rounded to 15 values as well
        assert better > plain
    elif "smoothquant" in scheme:  # it moves the same scale by itself
        assert better > plain - 3
    else:
        assert better > plain + 6


def test_evaluate_folds_first_and_the_report_says_so(tmp_path):
    model = spiked()
    batches = [{**inputs("opt", seed=i), "labels": inputs("opt", seed=i)["input_ids"]} for i in range(2)]
    plain, folded = (evaluate(model, batches, batches, seeds=1, fold=fold) for fold in (False, True))
    assert plain.full == folded.full
    assert plain.folding is None
    assert folded.folding.folded.keys() == FOLDED["opt"].keys()
    assert folded.quantized != plain.quantized
    by_hand = evaluate(fold_layernorm(model, batches[0])[0], batches, batches, seeds=1)
    assert folded.quantized == by_hand.quantized
    assert "LayerNorm folded" in str(folded)
    folded.save(tmp_path / "a.json")
    assert QuantizationReport.load(tmp_path / "a.json") == folded


class Whole(nn.Module):
    """A norm over tokens and channels."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm((5, 4)), nn.Linear(4, 3)
        nn.init.normal_(self.norm.weight)

    def forward(self, x):
        return self.linear(self.norm(x))


def test_a_norm_over_several_dimensions_is_kept():
    model, x = Whole(), torch.randn(2, 5, 4)
    folded, what = fold_layernorm(model, {"x": x})
    assert what.kept == {"norm": "its weight has several dimensions"}
    assert torch.equal(folded(x), model(x))


def test_a_model_without_outputs_to_compare_is_refused():
    class Choice(Whole):
        def forward(self, x):
            return super().forward(x).argmax(-1)

    with pytest.raises(ValueError, match="Choice returns no floating-point tensor"):
        fold_layernorm(Choice(), {"x": torch.randn(2, 5, 4)})
