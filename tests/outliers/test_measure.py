"""Whole models measured: the paper's tensors, planted outliers, padding, batches, heads, and nothing left behind."""

import math

import numpy as np
import pytest
import tiny
import torch
from by_hand import plain_stats
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

import outeffhop
from outeffhop import outliers
from outeffhop.models import presets
from outeffhop.models.inspection import inspecting
from outeffhop.outliers import heads as head_measures
from outeffhop.outliers.tensors import pick
from outeffhop.quantization import Calibration, freeze, simulate

NUMBERS = ("inf_norm", "max_abs", "kurtosis", "token_inf_norm", "token_kurtosis")
HEADS = ("first_token", "special_tokens", "no_op", "max_probability")


def model_of(name, method=None):
    torch.manual_seed(0)
    if name == "stanhop":
        return presets.build("stanhop", "tiny", method or "outeffhop").eval()
    config, auto = tiny.MODELS[name]
    model = auto.from_config(config()).eval()
    return model if method is None else tiny.stir(outeffhop.convert(model, method))


def inputs_of(name, batch=5):
    if name == "stanhop":
        return {"past_values": torch.randn(batch, 48, 7, generator=torch.Generator().manual_seed(1))}
    return tiny.inputs(name, batch)


def split(inputs, size):
    count = len(next(iter(inputs.values())))
    return [{k: v[i : i + size] for k, v in inputs.items()} for i in range(0, count, size)]


def same(a, b, rel=1e-9):
    assert [t.name for t in a.tensors] == [t.name for t in b.tensors]
    for x, y in zip(a.tensors, b.tensors, strict=True):
        assert (x.samples, x.tokens, x.outliers) == (y.samples, y.tokens, y.outliers), x.name
        for field in NUMBERS:
            assert getattr(x, field) == pytest.approx(getattr(y, field), rel=rel), (x.name, field)
    for x, y in zip(a.attention, b.attention, strict=True):
        assert (x.name, x.queries) == (y.name, y.queries)
        for field in HEADS:
            if getattr(y, field) is None:
                assert getattr(x, field) is None
            else:
                assert getattr(x, field) == pytest.approx(getattr(y, field), rel=rel, abs=1e-12), (x.name, field)


@pytest.mark.parametrize("name", [*tiny.MODELS, "stanhop"])
def test_every_model_in_any_batches(name):
    model, inputs = model_of(name).double(), inputs_of(name)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    whole = outliers.measure(model, [inputs])
    assert whole.samples == 5
    assert math.isfinite(whole.avg_kurtosis)
    assert whole.attention
    for size in (1, 2):
        same(outliers.measure(model, split(inputs, size)), whole)


@pytest.mark.parametrize("name", ["bert", "vit", "stanhop", "llama", "qwen3"])
def test_all_tensors_in_any_batches(name):
    model, inputs = model_of(name).double(), inputs_of(name)
    inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    whole = outliers.measure(model, [inputs], "all")
    assert len(whole.tensors) > len(outliers.measure(model, [inputs]).tensors)
    same(outliers.measure(model, split(inputs, 2), "all"), whole)


LAYERS = {
    "bert": ("bert.encoder.layer.{}", ("output.dense", "output.LayerNorm", "output.LayerNorm:input"), ()),
    "roberta": ("roberta.encoder.layer.{}", ("output.dense", "output.LayerNorm", "output.LayerNorm:input"), ()),
    "opt": (
        "model.decoder.layers.{}",
        ("", "fc2", "self_attn_layer_norm", "final_layer_norm", "self_attn.out_proj"),
        ("model.decoder.final_layer_norm",),
    ),
    "distilbert": (
        "distilbert.transformer.layer.{}",
        ("", "attention.out_lin", "sa_layer_norm", "ffn", "output_layer_norm"),
        (),
    ),
    "gpt2": ("transformer.h.{}", ("", "attn.c_proj", "mlp", "ln_1", "ln_2"), ("transformer.ln_f",)),
    "llama": (
        "model.layers.{}",
        ("", "self_attn.o_proj", "mlp", "input_layernorm", "post_attention_layernorm"),
        ("model.norm",),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_tensors_that_are_measured(name):
    layer, components, others = LAYERS[name]
    expected = {f"{layer.format(i)}.{c}".rstrip(".") for i in range(2) for c in components} | set(others)
    found = outliers.measure(model_of(name), [inputs_of(name)])
    assert {t.name for t in found.tensors} == expected
    assert {t.name for t in found.tensors if not t.in_kurtosis} == {n for n in expected if n.endswith(":input")}


@pytest.mark.parametrize("name", ["vit", "stanhop", "bert"])
def test_all_methods_are_measured_on_the_same_tensors(name):
    names = [{p.name for p in pick(model_of(name, method))} for method in ("vanilla", "gated-outeffhop(qk_norm=rms)")]
    assert names[0] == names[1]


def test_the_papers_two_numbers():
    model, inputs = model_of("bert"), inputs_of("bert")
    seen = {}
    hooks = [
        module.register_forward_hook(lambda _, args, out, n=n: seen.update({n: out, f"{n}:input": args[0]}))
        for n, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.LayerNorm))
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()
    report = outliers.measure(model, [inputs])
    plain = {t.name: plain_stats(seen[t.name]) for t in report.tensors}
    for t in report.tensors:
        for field in NUMBERS:
            assert getattr(t, field) == pytest.approx(plain[t.name][field], rel=1e-5)
    assert report.max_inf_norm == pytest.approx(max(p["inf_norm"] for p in plain.values()), rel=1e-6)
    counted = [p["kurtosis"] for name, p in plain.items() if not name.endswith(":input")]
    assert report.avg_kurtosis == pytest.approx(sum(counted) / len(counted), rel=1e-5)


@pytest.mark.parametrize("name", ["opt", "vit"])
def test_a_planted_outlier_is_found_by_name_and_channel(name):
    torch.manual_seed(0)
    model = presets.build(name, "tiny", "outeffhop")
    ends = "fc2" if name == "opt" else ("mlp.fc2", "1.output.dense")  # as transformers names it, by version
    module, planted = [(n, m) for n, m in model.named_modules() if n.endswith(ends)][-1]
    with torch.no_grad():
        planted.bias[17] = 500.0
    config = model.config
    if name == "vit":
        inputs = {"pixel_values": torch.randn(2, config.num_channels, config.image_size, config.image_size)}
    else:
        inputs = {"input_ids": torch.randint(5, config.vocab_size, (2, 9))}
    report = outliers.measure(model, [inputs])
    found = next(t for t in report.tensors if t.name == module)
    assert [c.channel for c in found.channels] == [17]
    assert found.channels[0].count == found.outliers == found.tokens
    assert all(p.channel == 17 and p.value > 400 for p in found.positions)
    assert report.worst(1)[0].channels[0].channel == 17
    assert report.max_inf_norm > 400


# not BERT on the left: it counts positions from there, padding included; OPT's MLPs take [B·T, d]
@pytest.mark.parametrize(("name", "side"), [("bert", "right"), ("llama", "right"), ("llama", "left"), ("opt", "right")])
def test_padding_does_not_count(name, side):
    model = model_of(name).double()
    ids = inputs_of(name, 3)["input_ids"]
    lengths = (11, 4, 7)
    padded, mask = torch.full_like(ids, 1), torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        at = slice(0, n) if side == "right" else slice(11 - n, 11)
        padded[i, at], mask[i, at] = ids[i, :n], 1
    batch = {"input_ids": padded, "attention_mask": mask}
    if side == "left":
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    one_by_one = [{"input_ids": ids[i : i + 1, :n]} for i, n in enumerate(lengths)]
    same(outliers.measure(model, [batch]), outliers.measure(model, one_by_one))


@pytest.mark.parametrize("method", tiny.SIX)
@pytest.mark.parametrize("name", ["bert", "opt", "stanhop"])
def test_heads_against_the_weights_themselves(name, method):
    model, inputs = model_of(name, method), inputs_of(name, 3)
    if name != "stanhop":
        inputs["input_ids"][:, 0] = inputs["input_ids"][0, 5] = 2
    seen = {}

    def look(module, part, tensor):
        if part == "probabilities":
            seen[module] = tensor
        return tensor

    with inspecting(model, look), torch.no_grad():
        model(**inputs)
    report = outliers.measure(model, [inputs], special_ids=[2])
    assert [h.name for h in report.attention] == list(seen)
    for heads in report.attention:
        p = seen[heads.name]
        close = {"rel": 1e-4, "abs": 1e-6}
        assert heads.no_op == pytest.approx((1 - p.sum(-1)).mean((0, 2)).tolist(), **close)
        assert heads.first_token == pytest.approx(p[..., 0].mean((0, 2)).tolist(), **close)
        assert heads.max_probability == pytest.approx(p.amax(-1).mean((0, 2)).tolist(), **close)
        if name == "stanhop":
            assert heads.special_tokens is None
        else:
            special = (inputs["input_ids"] == 2)[:, None, None]
            assert heads.special_tokens == pytest.approx((p * special).sum(-1).mean((0, 2)).tolist(), **close)
    if method in ("vanilla", "gated"):
        assert report.no_op == pytest.approx(0.0, abs=1e-9)
    elif "outeffhop" in method:
        assert report.no_op > 0.01


@pytest.mark.parametrize("method", ["outeffhop", "clipped"])  # by the log-sum-exp, and by the weights
def test_heads_of_long_inputs_are_measured_in_parts(method, monkeypatch):
    model, inputs = model_of("opt", method).double(), inputs_of("opt")
    whole = outliers.measure(model, [inputs], special_ids=[2])
    monkeypatch.setattr(head_measures, "_AT_A_TIME", 1)
    monkeypatch.setattr(head_measures, "_QUERIES", 4)
    same(outliers.measure(model, [inputs], special_ids=[2]), whole)


def test_no_probability_exceeds_one():
    """The fused logsumexp and the scores computed here round differently."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(33, 33)

        def forward(self, x):
            return self.linear(outeffhop.attention(x, x, x, sink=-math.inf))

    x = 10 * torch.randn(1, 64, 1, 33, generator=torch.Generator().manual_seed(0))
    (heads,) = outliers.measure(Attention(), [{"x": x}], "all").attention
    assert max(heads.max_probability) <= 1.0
    assert min(heads.max_probability) == pytest.approx(1.0, abs=1e-3)


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_is_left_behind():
    model = model_of("bert").train()
    model.bert.encoder.layer[0].eval()
    before, modes = hooks_of(model), [m.training for m in model.modules()]
    outliers.measure(model, [inputs_of("bert")])
    with pytest.raises(IndexError):
        outliers.measure(model, [{"input_ids": torch.full((1, 3), 10_000)}])
    assert hooks_of(model) == before
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"


def test_what_is_not_finite_is_named():
    model = model_of("opt")
    with torch.no_grad():
        model.model.decoder.layers[1].fc2.bias[3] = math.nan
    report = outliers.measure(model, [inputs_of("opt")])
    assert report.non_finite["model.decoder.layers.1.fc2"] == 5 * 11
    assert "model.decoder.layers.0.fc2" not in report.non_finite
    assert math.isnan(report.avg_kurtosis)
    assert math.isnan(report.max_inf_norm)
    assert report.worst(1)[0].non_finite


def test_progress_and_limit():
    seen = []
    report = outliers.measure(model_of("bert"), split(inputs_of("bert"), 1), limit=3, progress=seen.append)
    assert (seen, report.samples) == ([1, 2, 3], 3)


def test_without_heads():
    assert outliers.measure(model_of("bert"), [inputs_of("bert")], attention=False).attention == ()


def test_bfloat16():
    model, inputs = model_of("bert"), inputs_of("bert")
    full, half = outliers.measure(model, [inputs]), outliers.measure(model.bfloat16(), [inputs])
    assert half.avg_kurtosis == pytest.approx(full.avg_kurtosis, rel=0.05)
    assert half.attention[0].max_probability == pytest.approx(full.attention[0].max_probability, rel=0.05)


@pytest.mark.parametrize(
    ("name", "projection"),
    [
        ("bert", "output.dense"),
        ("opt", "fc2"),
        ("vit", "mlp.fc2"),
        ("llama", "mlp.down_proj"),
        ("gpt2", "mlp.c_proj"),
        ("distilbert", "ffn.lin2"),
    ],
)
def test_inputs_of_the_last_projections_of_mlps(name, projection):
    model = model_of(name)
    added = [p for p in pick(model, "paper+inputs") if p not in pick(model)]
    assert len(added) == model.config.num_hidden_layers
    assert all(p.module.endswith(f".{projection}") and p.side == "input" and not p.kurtosis for p in added)
    assert outliers.measure(model, [inputs_of(name)], "paper+inputs").max_inf_norm > 0


def test_wrong_calls():
    model, inputs = model_of("bert"), inputs_of("bert")
    with pytest.raises(ValueError, match="batches is empty"):
        outliers.measure(model, [])
    with pytest.raises(ValueError, match="takes input_ids"):
        outliers.measure(model, [tiny.inputs("vit")])
    with pytest.raises(ValueError, match=r"'paper', 'paper\+inputs', 'all' or a list"):
        outliers.measure(model, [inputs], "some")
    with pytest.raises(ValueError, match=r"matches '\*\.output\.dens'.*output\.dense"):
        outliers.measure(model, [inputs], ["*.output.dens"])
    with pytest.raises(ValueError, match="keep=0"):
        outliers.measure(model, [inputs], keep=0)
    with pytest.raises(ValueError, match="tensors='all'"):
        outliers.measure(nn.Linear(3, 3), [{"input": torch.zeros(1, 3)}])


def test_any_module_by_patterns():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 5, 6)
    report = outliers.measure(model, [{"input": x}], ["2", "2:input"])
    assert [t.name for t in report.tensors] == ["2:input", "2"]
    assert report.tensors[0].max_abs == model[:2](x).max().item()


def test_inference_mode():
    model, inputs = model_of("bert"), inputs_of("bert")
    with torch.inference_mode():
        found = outliers.measure(model, split(inputs, 2), "all")
    same(found, outliers.measure(model, split(inputs, 2), "all"))


def test_a_tensor_changed_in_place_is_measured_anew_in_inference_mode():
    class Doubled(nn.Sequential):
        def forward(self, input):
            return self[0](input).mul_(2.0)

    model = nn.Sequential(Doubled(nn.Linear(6, 8)))
    with torch.inference_mode():
        inner, outer = outliers.measure(model, [{"input": torch.randn(3, 5, 6)}], ["0.0", "0"]).tensors
    assert {inner.name, outer.name} == {"0", "0.0"}
    assert sorted((inner.max_abs, outer.max_abs))[1] == 2 * sorted((inner.max_abs, outer.max_abs))[0]


def test_a_wrapped_model_is_measured_as_it_is_alone():
    model, inputs = model_of("bert"), inputs_of("bert")
    assert outliers.measure(nn.DataParallel(model), [inputs]) == outliers.measure(model, [inputs])


def test_a_quantized_model():
    model, inputs = model_of("opt", "outeffhop"), inputs_of("opt")
    for placement in ("paper", "linear"):
        quantized = simulate(model, placement)
        with Calibration(quantized), torch.no_grad():
            quantized(**inputs)
        freeze(quantized)
        if placement == "paper":
            with pytest.raises(ValueError, match="attention=False"):
                outliers.measure(quantized, [inputs])
        found = outliers.measure(quantized, [inputs], attention=placement == "linear")
        assert bool(found.attention) == (placement == "linear")
        assert found.max_inf_norm == pytest.approx(outliers.measure(model, [inputs]).max_inf_norm, rel=0.05)
        assert found.max_inf_norm != outliers.measure(model, [inputs]).max_inf_norm


@pytest.mark.parametrize("shape", [(2, 1, 1, 7, 7), (1, 3, 1, 7, 7), (2, 3, 4, 7, 7), (7, 7)])
def test_heads_under_a_mask_that_broadcasts(shape):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, mask):
            return self.linear(outeffhop.attention(x, x, x, attn_mask=mask))

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 7, 6, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[..., 0] = True
    heads = outliers.measure(Attention(), [{"x": x, "mask": mask}], "all").attention[0]
    scores = (x @ x.mT / 6**0.5).masked_fill(~mask, -torch.inf)
    p = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    assert heads.first_token == pytest.approx(p[..., 0].mean((0, 1, 3)).tolist(), rel=1e-5)
    assert heads.no_op == pytest.approx((1 - p.sum(-1)).mean((0, 1, 3)).tolist(), rel=1e-5)


def test_special_ids_of_any_kind_are_written():
    model, inputs = model_of("bert"), inputs_of("bert")
    for ids in (np.array([3, 2]), torch.tensor([2, 3]), (3, 2, 2)):
        report = outliers.measure(model, [inputs], special_ids=ids)
        assert report.special_ids == (2, 3)
        assert outliers.OutlierReport.from_json(report.to_json()) == report


def test_more_wrong_calls():
    model, inputs = model_of("bert"), inputs_of("bert")
    with pytest.raises(ValueError, match="limit=-1: must be at least 1"):
        outliers.measure(model, [inputs], limit=-1)
    for batches, kind in ((inputs, "str"), ([(inputs["input_ids"],)], "tuple")):
        with pytest.raises(TypeError, match=f"batches contains a {kind}"):
            outliers.measure(model, batches)

    class Compiled(nn.Module):
        _orig_mod = nn.Identity()

    with pytest.raises(TypeError, match="_orig_mod"):
        outliers.measure(Compiled(), [inputs], "all", attention=False)


@pytest.mark.parametrize("given", ["labels", "decoder_attention_mask"])
@pytest.mark.parametrize("length", [6, 5])
def test_padding_of_an_encoder_and_of_a_decoder(given, length):
    """A padded batch is measured as its samples are alone."""
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    more = dict(encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=20, max_position_embeddings=16)
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**sizes, **more)).eval()
    random = torch.Generator().manual_seed(0)
    # with length 6 the encoder's padding would fit the decoder's tensors
    ids, targets = (torch.randint(4, 20, (2, n), generator=random) for n in (6, length))
    padded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    padded["attention_mask"][1, 4:] = 0
    if given == "labels":
        padded["labels"] = targets.clone()
        padded["labels"][0, 3:] = -100
    else:
        padded |= {"decoder_input_ids": targets, "decoder_attention_mask": torch.ones_like(targets)}
        padded["decoder_attention_mask"][0, 3:] = 0
    name = "labels" if given == "labels" else "decoder_input_ids"
    alone = [{"input_ids": ids[:1], name: targets[:1, :3]}, {"input_ids": ids[1:, :4], name: targets[1:]}]
    patterns = ["model.encoder.layers*", "model.decoder.layers*"]
    together, apart = (outliers.measure(model, batches, patterns) for batches in ([padded], alone))
    for t, a in zip(together.tensors, apart.tensors, strict=True):
        assert (t.name, t.tokens) == (a.name, a.tokens)
        reads_encoder = "encoder.layers" in t.name or t.name.endswith(("encoder_attn.k_proj", "encoder_attn.v_proj"))
        assert t.tokens == (10 if reads_encoder else 3 + length)
        assert t.max_abs == pytest.approx(a.max_abs, rel=1e-5)
        assert t.kurtosis == pytest.approx(a.kurtosis, rel=1e-4)
    for t, a in zip(together.attention, apart.attention, strict=True):
        assert (t.name, t.queries) == (a.name, a.queries)
        assert t.first_token == pytest.approx(a.first_token, rel=1e-4)
        assert (t.special_tokens is None) == ("decoder" in t.name)
