"""Planted outliers: static per-tensor grids lose much, schemes made for them little, and the report says where."""

import math
from dataclasses import replace

import pytest
import torch
from subjects import build, decibels, inputs, output, quantize

from outeffhop.metrics import metric_for
from outeffhop.quantization import Scheme, evaluate
from outeffhop.quantization.points import Power, smoothing
from outeffhop.quantization.quantizers import Uniform

CHANNEL, GAIN = 5, 200.0


def planted(model):
    """The same function with one channel of each LayerNorm's output GAIN times as large, undone in what reads it."""
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            for norm, readers in (
                (layer.self_attn_layer_norm, (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)),
                (layer.final_layer_norm, (layer.fc1,)),
            ):
                norm.weight[CHANNEL] *= GAIN
                norm.bias[CHANNEL] *= GAIN
                for reader in readers:
                    reader.weight[:, CHANNEL] /= GAIN
    return model


def spoiled(model, token=3):
    """One token stands out in one channel, and makes one hidden unit of each feed-forward fire, for it alone."""
    with torch.no_grad():
        embedding = model.model.decoder.embed_tokens.weight
        embedding[token] = 0.0
        embedding[token, CHANNEL] = 300.0
        for layer in model.model.decoder.layers:
            layer.final_layer_norm.weight.fill_(1.0)
            layer.final_layer_norm.bias.fill_(0.0)
            layer.fc1.weight[0] = 0.0
            layer.fc1.weight[0, CHANNEL] = 300.0
            layer.fc1.bias[0] = -300.0 * 4.0  # a LayerNorm of 32 gives √31 at most, to a channel that is alone
            layer.fc2.weight[:, 0] *= 0.01
    return model


def test_planting_leaves_the_function_as_it_is():
    batch = inputs("opt")
    torch.testing.assert_close(output(planted(build("opt")), batch), output(build("opt"), batch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scheme", ["paper", "linear"])
def test_outlier_channels_cost_a_static_grid_much(scheme):
    batch = inputs("opt")
    found = {}
    for name, model in (("clean", build("opt")), ("planted", planted(build("opt")))):
        found[name] = decibels(output(model, batch), output(quantize(model, [batch], scheme=scheme), batch))
    assert found["clean"] > 20.0
    assert found["planted"] < found["clean"] - 12.0


def test_smoothquant_undoes_outlier_channels():
    batch = inputs("opt")
    model = planted(build("opt"))
    truth = output(model, batch)
    found = {s: decibels(truth, output(quantize(model, [batch], scheme=s), batch)) for s in ("linear", "smoothquant")}
    assert found["smoothquant"] > found["linear"] + 12.0
    assert found["smoothquant"] > 20.0


def test_an_input_whose_weight_stays_is_not_smoothed():
    batch = inputs("opt")
    model = build("opt")
    plain = quantize(
        model, [batch], scheme=replace(Scheme.parse("linear"), activation_range="minmax"), exclude=["*/weight"]
    )
    smooth = quantize(model, [batch], scheme="smoothquant", exclude=["*/weight"])
    assert torch.equal(output(smooth, batch), output(plain, batch))


def test_a_range_of_its_own_confines_an_outlier_token():
    model = spoiled(build("opt"))
    batch = inputs("opt")
    batch["input_ids"][:, 0] = 3
    others = (slice(None), slice(1, None))
    truth = output(model, batch)[others]
    found = {}
    for name in ("linear", "per-token", "smoothquant"):
        # each row of weights has its own grid in all three: they differ in what they do to activations
        scheme = replace(Scheme.parse(name), weights=Uniform(symmetric=True, granularity="channel"))
        found[name] = decibels(truth, output(quantize(model, [batch], scheme=scheme), batch)[others])
    assert found["per-token"] > found["linear"] + 12.0
    assert found["smoothquant"] > found["linear"] + 12.0


def test_the_report_names_the_tensor_to_blame():
    model = build("opt")
    with torch.no_grad():
        model.model.decoder.layers[1].fc2.bias[7] = 400.0
    batch = {**inputs("opt"), "labels": inputs("opt")["input_ids"]}
    report = evaluate(model, [batch], [batch], seeds=1)
    assert report.worst[0].name in {"model.decoder.layers.1.fc2/output", "model.decoder.layers.1/add.1"}
    blamed = {row.name: row for row in report.worst[:4]}["model.decoder.layers.1.fc2/output"]
    assert blamed.high > 390.0
    assert blamed.largest > 4 * blamed.std
    # the outlier's own power hides its cost from the plain ratio
    assert blamed.typical_db < blamed.sqnr_db - 20.0


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_factors(alpha):
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(50, 6, generator=generator), torch.randn(4, 6, generator=generator)
    x[:, 2] *= 100.0
    x[:, 4] = 0.0
    s = smoothing(x.abs().amax(0), w, alpha)
    torch.testing.assert_close((x / s) @ (w * s).T, x @ w.T, rtol=1e-4, atol=1e-4)
    assert s[4] == 1.0
    smooth_x, smooth_w = (x / s).abs().amax(0), (w * s).abs().amax(0)
    alive = torch.arange(6) != 4
    even = {0.0: smooth_w[alive], 0.5: (smooth_x / smooth_w)[alive], 1.0: smooth_x[alive]}[alpha]
    torch.testing.assert_close(even, torch.ones(5))


def test_perplexity_shows_the_cost_too():
    """On a model that predicts: its own greedy choice as the label, so that a good model has a low loss."""
    model = planted(build("opt"))
    batch = inputs("opt", batch=6)
    batch["attention_mask"][:] = 1
    choice = output(model, batch).argmax(-1)
    labels = torch.cat([torch.full((6, 1), -100), choice[:, :-1]], 1)
    batch["labels"] = labels
    metric = metric_for("clm")
    full = metric(model, [batch])["perplexity"]
    rise = {
        s: metric(quantize(model, [batch], scheme=s), [batch])["perplexity"] / full for s in ("linear", "smoothquant")
    }
    assert rise["linear"] > 1.05
    assert rise["smoothquant"] < 1.02


def test_the_typical_error_of_batches_by_hand():
    x = torch.ones(1, 2, 3)
    power = Power().add(x, x - 0.1).add(x, x - 0.01)
    assert power.typical_db == pytest.approx((20 + 40) / 2, abs=1e-3)
    assert power.sqnr_db == pytest.approx(10 * math.log10(2 / (0.1**2 + 0.01**2)), abs=1e-3)
    assert Power().typical_db == math.inf
