"""Simulated quantization of whole models: what it changes, what it leaves, and how it refuses."""

import copy
import pickle
from dataclasses import replace

import pytest
import tiny
import torch
from subjects import OTHERS, PAPER, SIX, build, decibels, inputs, output, quantize
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration

from outeffhop.ops.probe import is_probed
from outeffhop.quantization import Calibration, Scheme, freeze, quantization_map, simulate
from outeffhop.quantization.simulation import measuring

EVERY = [*PAPER, *OTHERS]


def batches(name, count=3, **options):
    return [inputs(name, seed=i, **options) for i in range(count)]


@pytest.mark.parametrize("method", SIX)
@pytest.mark.parametrize("name", PAPER)
def test_sixteen_bits_are_nearly_floating_point_and_eight_are_less(name, method):
    model = build(name, method)
    batch = inputs(name)
    truth = output(model, batch)
    found = {}
    for bits in (16, 8):
        found[bits] = decibels(truth, output(quantize(model, [batch], f"W{bits}A{bits}"), batch), batch)
    assert found[16] > 60.0
    assert 12.0 < found[8] < found[16] - 30.0


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_at_sixteen_bits(name):
    model = build(name, "eager")
    batch = inputs(name)
    truth = output(model, batch)
    assert decibels(truth, output(quantize(model, [batch], "W16A16"), batch), batch) > 60.0


@pytest.mark.parametrize("scheme", ["paper", "linear", "per-token", "smoothquant", "fp8"])
@pytest.mark.parametrize("name", EVERY)
def test_calibration_runs_in_floating_point(name, scheme):
    model = build(name, "outeffhop")
    batch = inputs(name)
    quantized = simulate(model, scheme=scheme)
    with Calibration(quantized):
        torch.testing.assert_close(output(quantized, batch), output(model, batch), rtol=1e-4, atol=1e-4)
    freeze(quantized)
    assert not torch.equal(output(quantized, batch), output(model, batch))


@pytest.mark.parametrize("name", PAPER)
def test_the_model_itself_is_left_as_it_is(name):
    model = build(name, "gated-outeffhop").train()
    before = copy.deepcopy(model.state_dict())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    batch = inputs(name)
    quantized = quantize(model, [batch])
    output(quantized, batch)
    assert model.training
    assert not quantized.training
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert not any(hasattr(value, "_outeffhop_on_grid") for value in batch.values())
    assert not is_probed()


def test_a_sdpa_model_keeps_its_attention_and_its_copy_shows_it():
    model = build("gpt2", "sdpa")
    quantized = quantize(model, [inputs("gpt2")])
    assert model.config._attn_implementation == "sdpa"
    assert "transformer.h.0.attn/probabilities" in {row.name for row in quantization_map(quantized).rows}


@pytest.mark.parametrize("name", ["opt", "stanhop"])
def test_a_copy_and_a_pickle_of_a_simulation_stand_alone(name):
    batch = inputs(name)
    quantized = quantize(build(name, "gated-outeffhop"), [batch])
    truth = output(quantized, batch)
    copied = copy.deepcopy(quantized)
    loaded = pickle.loads(pickle.dumps(quantized))
    for module in quantized.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(torch.zeros_like(module.weight))
    quantized._outeffhop_simulation.points.clear()
    assert torch.equal(output(copied, batch), truth)
    assert torch.equal(output(loaded, batch), truth)


def test_min_max_ranges_do_not_depend_on_how_the_data_are_cut():
    model = build("opt")
    scheme = Scheme.parse("W8A8")
    scheme = Scheme(scheme.name, scheme.weights, scheme.activations, activation_range="minmax")
    whole = {k: v[:4] for k, v in inputs("opt", batch=4).items()}
    parts = [{k: v[i : i + size] for k, v in whole.items()} for size in (1, 3) for i in range(0, 4, size)]
    ranges = []
    for data in ([whole], parts[:4], parts[4:]):
        rows = quantization_map(quantize(model, data, scheme=scheme)).rows
        ranges.append({row.name: row.range for row in rows})
    for other in ranges[1:]:
        assert other.keys() == ranges[0].keys()
        for name, (low, high) in other.items():
            # other batch sizes sum in another order: the last bits of an activation differ
            assert (low, high) == pytest.approx(ranges[0][name], rel=1e-3, abs=1e-5)


def ranges_of(model, batch, scheme):
    return {row.name: row.range for row in quantization_map(quantize(model, [batch], scheme=scheme)).rows}


def same_ranges(before, after):
    assert after.keys() == before.keys()
    for name, ends in after.items():
        assert ends == pytest.approx(before[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("scheme", ["W8A8KV8", "W8A8 linear", "W8A8 smoothquant"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_gives_no_range(name, scheme):
    model = build(name)
    whole = {k: v[1:] for k, v in inputs(name).items()}  # the first text has padding
    padded = {k: torch.nn.functional.pad(v, (0, 4), value=0 if k == "attention_mask" else 63) for k, v in whole.items()}
    before = ranges_of(model, whole, scheme)
    same_ranges(before, ranges_of(model, padded, scheme))
    padded["attention_mask"][:] = 1
    assert any(ends != before[name] for name, ends in ranges_of(model, padded, scheme).items())


@pytest.mark.parametrize("scheme", ["W8A8", "W8A8 linear"])
def test_an_encoder_and_a_decoder_have_padding_of_their_own(scheme):
    torch.manual_seed(0)
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    more = dict(encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=20, max_position_embeddings=16)
    model = BartForConditionalGeneration(BartConfig(**sizes, **more)).eval()
    ids, targets = (torch.randint(4, 20, (1, n)) for n in (4, 3))

    def padded(name, x):  # both as long as each other, so that a shape does not tell them apart
        pads = (0, 6 - x.shape[1])
        mask = torch.nn.functional.pad(torch.ones_like(x), pads)
        return {name: torch.nn.functional.pad(x, pads, value=19), name.replace("input_ids", "attention_mask"): mask}

    both = padded("input_ids", ids) | padded("decoder_input_ids", targets)
    same_ranges(
        ranges_of(model, {"input_ids": ids, "decoder_input_ids": targets}, scheme), ranges_of(model, both, scheme)
    )


def test_static_ranges_stay_and_dynamic_ones_are_each_tokens_own():
    model = build("opt")
    x = torch.tensor([[0.5, 1.0, 1000.0], [0.5, 1.0, 2.0]])
    place = "model.decoder.layers.0.self_attn.q_proj/"
    static = quantize(model, batches("opt"))._outeffhop_simulation.points[place + "output"]
    assert torch.equal(static(x)[0, :2], static(x)[1, :2])
    assert static(x)[0, 2] == pytest.approx(static.grid.range[1])
    dynamic = quantize(model, batches("opt"), scheme="per-token")._outeffhop_simulation.points[place + "input"]
    assert dynamic.grid is None
    assert dynamic(x)[1, 1] == pytest.approx(1.0, abs=0.01)
    assert dynamic(x)[0].tolist() == pytest.approx([0.0, 0.0, 1000.0])


def test_attention_that_stays_in_floating_point_stays_the_models_own():
    config, auto = tiny.MODELS["opt"]
    model = auto.from_config(config())
    assert simulate(model, "linear").config._attn_implementation == "sdpa"
    assert simulate(model, "W8A8").config._attn_implementation == "vanilla"


def test_the_map_as_text():
    place = "model.decoder.layers.0.self_attn.q_proj"
    rows = {}
    for scheme in ("linear", "per-token"):
        lines = str(quantization_map(quantize(build("opt"), batches("opt"), scheme=scheme))).splitlines()
        rows[scheme] = next(line.split() for line in lines if line.startswith(f"{place}/input "))
        assert any(line.startswith("lm_head ") and line.endswith("head") for line in lines)
    row = row_of(quantize(build("opt"), batches("opt"), scheme="linear"), f"{place}/input")
    low, high = row.range
    assert f"[{low:.4g}, {high:.4g}] {row.scale:.4g} {row.zero_point}" in " ".join(rows["linear"])
    assert " ".join(rows["per-token"]).endswith("its own")


def test_batches_of_any_length_find_the_same_quantizers():
    model = build("bert")
    quantized = quantize(model, [inputs("bert", length=n) for n in (5, 11)])
    names = {row.name for row in quantization_map(quantized).rows}
    for length, size in ((1, 1), (17, 2), (11, 5)):
        assert torch.isfinite(output(quantized, inputs("bert", batch=size, length=length))).all()
    assert {row.name for row in quantization_map(quantized).rows} == names


def row_of(quantized, name):
    return next(row for row in quantization_map(quantized).rows if row.name == name)


def test_the_running_order_of_calibration_follows_the_momentum():
    model = build("vit")
    data = batches("vit", 4)
    seen = []
    for batch in data:
        row = row_of(quantize(model, [batch]), "vit.layers.1/add.0")
        seen.append(row.scale)
    scale = row_of(quantize(model, data), "vit.layers.1/add.0").scale
    expected = seen[0]
    for s in seen[1:]:
        expected = 0.9 * expected + 0.1 * s
    assert scale == pytest.approx(expected, rel=1e-4)


class Twice(torch.nn.Module):
    """One layer that runs twice, and sees larger numbers the first time."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(0.1 * self.layer(x))


def test_a_layer_that_runs_twice_has_the_range_of_both_runs():
    torch.manual_seed(0)
    model, x = Twice(), 5.0 * torch.randn(8, 4)
    quantized = quantize(model, [{"x": x}, {"x": x}], scheme="linear")
    low, high = row_of(quantized, "layer/input").range
    assert (low, high) == pytest.approx((float(x.min()), float(x.max())), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = build("bert").to(dtype)
    batch = inputs("bert")
    truth = output(model, batch)
    found = output(quantize(model, [batch]), batch)
    assert found.dtype == dtype
    assert decibels(truth, found) > 12.0


def test_autocast():
    model = build("opt")
    batch = inputs("opt")
    with torch.autocast("cpu", torch.bfloat16):
        found = output(quantize(model, [batch]), batch)
    assert decibels(output(model, batch), found) > 12.0


def test_a_call_of_a_part_is_quantized_as_well():
    model = build("bert")
    batch = inputs("bert")
    quantized = quantize(model, [batch])
    with torch.no_grad():
        whole = quantized(**batch, output_hidden_states=True).hidden_states[-1]
        part = quantized.bert(**batch).last_hidden_state
    assert torch.equal(whole, part)


def test_running_too_early_is_refused_and_leaves_nothing_behind():
    quantized = simulate(build("opt"))
    batch = inputs("opt")
    with pytest.raises(ValueError, match="not quantized yet"):
        quantized(**batch)
    assert not is_probed()
    with Calibration(quantized):
        quantized(**batch)
    with pytest.raises(ValueError, match=r"freeze\(quantized\)"):
        quantized(**batch)
    freeze(quantized)
    quantized(**batch)


def test_a_forward_that_fails_leaves_nothing_behind():
    quantized = simulate(build("opt"))
    with Calibration(quantized):
        with pytest.raises(IndexError):
            quantized(input_ids=torch.full((1, 4), 1000))
        assert not is_probed()
        assert torch.overrides._get_current_function_mode() is None
        quantized(**inputs("opt"))
    assert torch.isfinite(output(freeze(quantized), inputs("opt"))).all()


def test_a_path_that_calibration_did_not_take_is_named():
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x, left=True):
            return (self.left if left else self.right)(x)

    model = simulate(Fork())
    with Calibration(model):
        model(torch.randn(2, 3))
    freeze(model)
    model(torch.randn(2, 3))
    with pytest.raises(ValueError, match="right/input was not seen in calibration"):
        model(torch.randn(2, 3), left=False)


def test_nan_weights_and_inputs_are_refused_by_name():
    model = build("opt")
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.weight[3, 4] = float("nan")
    quantized = simulate(model)
    with Calibration(quantized), pytest.raises(ValueError, match=r"layers\.1\.fc1/output holds NaN or inf"):
        quantized(**inputs("opt"))
    pixels = inputs("vit")
    pixels["pixel_values"][0, 0, 0, 0] = float("inf")
    quantized = simulate(build("vit"))
    with Calibration(quantized), pytest.raises(ValueError, match="projection/input holds NaN or inf"):
        quantized(**pixels)


def test_a_nan_weight_that_calibration_does_not_meet_is_refused_when_frozen():
    model = build("opt")
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[63] = float("nan")
        batch = inputs("opt")
        batch["input_ids"].clamp_(max=60)
    quantized = simulate(model, scheme="paper")
    with Calibration(quantized):
        quantized.model(**batch)
    with pytest.raises(ValueError, match="embed_tokens/weight holds NaN or inf"):
        freeze(quantized)


class Compiled(nn.Module):
    """What torch.compile makes of a model, as far as one can tell them apart."""

    _orig_mod = nn.Identity()


def test_wrong_order_is_refused():
    model = build("vit")
    with pytest.raises(ValueError, match="is not a simulation"):
        freeze(model)
    with pytest.raises(ValueError, match="calibration saw no batch"):
        freeze(simulate(model))
    quantized = quantize(model, [inputs("vit")])
    with pytest.raises(ValueError, match="frozen already"):
        freeze(quantized)
    with pytest.raises(ValueError, match="its ranges are fixed"), Calibration(quantized):
        pass
    with pytest.raises(ValueError, match="a simulation already"):
        simulate(quantized)
    with pytest.raises(TypeError, match="_orig_mod"):
        simulate(Compiled())
    with pytest.raises(ValueError, match="bits=1"):
        simulate(model, "W1A8")
    with pytest.raises(ValueError, match="placement='all'"):
        replace(Scheme.parse("W8A8"), placement="all")


def test_ranges_by_percentile_and_by_error_serve_a_model_too():
    model = build("opt")
    batch = inputs("opt")
    truth = output(model, batch)
    paper = Scheme.parse("W3A16")  # seven values: better spent on the middle of a bell than on its ends
    found = {
        how: decibels(truth, output(quantize(model, [batch], scheme=replace(paper, weight_range=how)), batch))
        for how in ("minmax", "mse")
    }
    assert found["mse"] > found["minmax"] + 1.0
    wide, narrow = (
        row_of(
            quantize(model, [batch], scheme=replace(paper, activation_range=how, percentile=99.0)),
            "model.decoder.layers.0.fc1/output",
        )
        for how in ("running", "percentile")
    )
    assert narrow.range[1] < 0.8 * wide.range[1]
    with pytest.raises(ValueError, match="activation_range='max'"):
        replace(paper, activation_range="max")


def test_per_token_needs_no_calibration():
    model = build("opt")
    quantized = freeze(simulate(model, scheme="per-token"))
    assert decibels(output(model, inputs("opt")), output(quantized, inputs("opt"))) > 20.0


def test_measuring_finds_the_error_of_each_quantizer():
    quantized = quantize(build("opt"), batches("opt"))
    with measuring(quantized) as powers, torch.no_grad():
        for batch in batches("opt"):
            quantized(**batch)
    names = {row.name for row in quantization_map(quantized).rows if row.kind == "activation"}
    assert powers.keys() == names
    power = powers["model.decoder.layers.0/add.1"]
    row = row_of(quantized, "model.decoder.layers.0/add.1")
    assert power.count == 3 * 3 * 11 * 32
    # a uniform error within one step has the variance scale²/12
    assert (power.noise / power.count) ** 0.5 == pytest.approx(row.scale / 12**0.5, rel=0.1)
    with measuring(quantized) as again:
        pass
    assert again == {}


@pytest.mark.parametrize(
    ("text", "expected", "placement"),
    [
        ("W8A8", "W8A8 paper", "paper"),
        ("w4a8", "W4A8 paper", "paper"),
        ("per-token", "W8A8 per-token", "linear"),
        ("W6A6 smoothquant", "W6A6 smoothquant", "linear"),
        ("linear W4A16", "W4A16 linear", "linear"),
        ("fp8", "W8A8 fp8", "paper"),
        ("W8A8KV8 fp8", "W8A8KV8 fp8", "paper"),
    ],
)
def test_schemes_by_name(text, expected, placement):
    scheme = Scheme.parse(text)
    assert str(scheme) == expected
    assert scheme.placement == placement
    assert Scheme.parse(str(scheme)) == scheme


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("W8", "scheme='W8'"),
        ("smoothqant", "did you mean 'smoothquant'"),
        ("W1A8", "bits=1"),
        ("W8 paper", "scheme='W8 paper'"),
        ("paper linear", "scheme='paper linear'"),
        ("W4A8 fp8", "bits=4: fp8 has 8 bits"),
        ("W8A8KV4 fp8", "bits=4: fp8 has 8 bits"),
    ],
)
def test_unknown_schemes_are_refused(text, match):
    with pytest.raises(ValueError, match=match):
        Scheme.parse(text)


def test_smoothquant_does_not_go_with_the_papers_placement():
    with pytest.raises(ValueError, match="placement='linear'"):
        replace(Scheme.parse("smoothquant"), placement="paper")


@pytest.mark.parametrize("scheme", ["paper", "linear", "per-token", "smoothquant", "fp8"])
def test_nan_is_not_rounded_away(scheme):
    batch = inputs("vit")
    quantized = quantize(build("vit"), [batch], scheme=scheme)
    truth = output(quantized, batch)
    batch["pixel_values"][0, 0, 0, 0] = float("nan")
    found = output(quantized, batch)
    assert found[0].isnan().all()
    assert torch.equal(found[1:], truth[1:])


@pytest.mark.parametrize("scheme", ["paper", "per-token", "fp8"])
def test_gradients_reach_the_input(scheme):
    quantized = quantize(build("opt"), [inputs("opt")], scheme=scheme)
    embedded = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    quantized(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad.isfinite().all()
    assert embedded.grad.abs().sum() > 0


def interrupted(quantized, batch):
    """A forward that the user ends by Ctrl-C, in the middle of a Linear, of which no hook hears."""

    def press(*_):
        raise KeyboardInterrupt

    handle = quantized.get_submodule("model.decoder.layers.1.fc1").register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        output(quantized, batch)
    handle.remove()


def test_an_interrupted_forward_does_not_change_the_next():
    batch = inputs("opt")
    quantized = quantize(build("opt"), [batch])
    truth = output(quantized, batch)
    interrupted(quantized, batch)
    assert torch.equal(output(quantized, batch), truth)
    assert not is_probed()
    assert torch.overrides._get_current_function_mode() is None


@pytest.mark.parametrize("within", [Calibration, measuring])
def test_an_interrupted_calibration_or_measurement_leaves_nothing_behind(within):
    batch = inputs("opt")
    quantized = simulate(build("opt"))
    if within is measuring:
        with Calibration(quantized):
            quantized(**batch)
        freeze(quantized)
    with within(quantized):
        interrupted(quantized, batch)
    assert not is_probed()
    assert torch.overrides._get_current_function_mode() is None


def test_freezing_within_calibration():
    batch = inputs("vit")
    quantized = simulate(build("vit"))
    with Calibration(quantized), torch.no_grad():
        quantized(**batch)
        freeze(quantized)
    assert torch.equal(output(quantized, batch), output(quantize(build("vit"), [batch]), batch))
    with pytest.raises(ValueError, match="frozen already"):
        freeze(quantized)


def test_freezing_that_fails_leaves_the_weights_and_can_be_tried_again():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    quantized = simulate(model, "W2A8")
    with Calibration(quantized):
        quantized(x)
    with torch.no_grad():
        quantized[1].weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="1/weight holds NaN"):
        freeze(quantized)
    assert torch.equal(quantized[0].weight, model[0].weight)
    with torch.no_grad():
        quantized[1].weight.copy_(model[1].weight)
    assert torch.equal(freeze(quantized)(x), quantize(model, [{"input": x}], "W2A8")(x))


def test_calibration_that_ended_early_is_told():
    quantized = simulate(nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ValueError, match="0/input holds NaN"), Calibration(quantized):
        quantized(torch.full((2, 3), float("nan")))
    with pytest.raises(ValueError, match=r"0/input has no range"):
        freeze(quantized)


def test_a_model_that_is_one_linear_is_smoothed_too():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5), torch.randn(40, 6)
    with torch.no_grad():
        x[:, 1] *= 100.0
        model.weight[:, 1] /= 100.0
    truth = model(x).detach()
    linear, smooth = (quantize(model, [{"input": x}], scheme=s) for s in ("linear", "smoothquant"))
    assert {row.name for row in quantization_map(smooth).rows} == {"/input", "/weight"}
    assert decibels(truth, output_of(smooth, x)) > decibels(truth, output_of(linear, x)) + 12.0


@torch.no_grad()
def output_of(model, x):
    return model(x)
