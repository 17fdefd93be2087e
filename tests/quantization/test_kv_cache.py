"""Keys and values in few bits, as a KV cache holds them: where they are rounded, what it costs, and what it leaves."""

import math

import pytest
import torch
from subjects import build, decibels, inputs, output, quantize

from outeffhop.models.inspection import inspecting
from outeffhop.quantization import Scheme, evaluate, quantization_map, simulate

PARTS = ("key", "value")


def cached(model, batch):
    """Keys and values of each attention layer, as they enter it."""
    found = {}

    def see(name, part, tensor):
        if part in PARTS:
            found[f"{name}/{part}"] = tensor.clone()
        return tensor

    with inspecting(model, probe=see), torch.no_grad():
        model(**batch)
    return found


def rounded(model, batch, scheme):
    """The same in a quantized model: what its attention goes on with."""
    quantized, found = quantize(model, [batch], scheme), {}
    simulation = quantized._outeffhop_simulation
    own = simulation._part

    def see(part, tensor):
        out = own(part, tensor)
        found[f"{simulation._frames[-1].name}/{part}"] = out.clone()
        return out

    simulation._part = see
    output(quantized, batch)
    return found


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_keys_and_values_are_on_a_grid_of_their_bits(name):
    batch = inputs(name, length=30)
    model = build(name)
    plain = cached(model, batch)
    assert {part.rpartition("/")[2] for part in plain} == set(PARTS)
    assert all(tensor.unique().numel() > 256 for tensor in plain.values())
    for scheme, most in (("W8A8KV8", 256), ("W8A8KV4 linear", 16)):
        found = rounded(model, batch, scheme)
        for part in plain:
            values = found[part].unique()
            assert most / 4 < values.numel() <= most
            steps = values.diff()
            torch.testing.assert_close(steps / steps.min(), (steps / steps.min()).round(), rtol=0, atol=1e-2)
    names = [row.name for row in quantization_map(quantize(model, [batch], "W8A8")).rows]
    assert not any(name.endswith(("/key", "/value")) for name in names)


def test_keys_of_shared_heads_are_quantized_once():
    """[B, G, S, D], as a cache holds them, with fewer heads than queries have."""
    model = build("llama")
    found = cached(model, inputs("llama", batch=3, length=11))
    shape = (3, model.config.num_key_value_heads, 11, model.config.head_dim)
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert {tuple(tensor.shape) for tensor in found.values()} == {shape}


def test_the_papers_placement_has_eight_bits_there_already():
    """Rotary positions end with a sum, and sums are quantized; the linear placement quantizes neither."""
    batch = inputs("llama", length=30)
    model = build("llama")
    found = rounded(model, batch, "W8A8")
    assert all(found[f"model.layers.{i}.self_attn/{part}"].unique().numel() <= 256 for i in (0, 1) for part in PARTS)
    both = [output(quantize(model, [batch], scheme), batch) for scheme in ("W8A8", "W8A8KV8")]
    assert torch.equal(*both)
    assert not torch.equal(both[0], output(quantize(model, [batch], "W8A8KV7"), batch))


@pytest.mark.parametrize("outlier", [10.0, 100.0])
def test_an_outlier_in_a_key_costs_what_its_step_says(outlier):
    """An outlier r makes the grid's step larger, and the error of all other keys is as large as the step.

    It is a bias of the keys: each query's scores all move by the same, which softmax does not see.
    """
    batch = inputs("opt", batch=8, length=40)
    only_keys = ("*/weight", "*/input", "*/value", "*layers.1.self_attn/key")
    steps, found = [], []
    for bias in (0.0, outlier):
        model = build("opt", "vanilla")
        with torch.no_grad():
            model.model.decoder.layers[0].self_attn.k_proj.bias[3] += bias
        quantized = quantize(model, [batch], "W8A8KV8 linear", exclude=only_keys)
        (row,) = quantization_map(quantized).rows
        assert row.name == "model.decoder.layers.0.self_attn/key"
        steps.append((row.range[1] - row.range[0]) / 255)
        found.append(decibels(output(model, batch), output(quantized, batch)))
    assert steps[1] > (outlier - 2) / 255
    assert found[0] - found[1] == pytest.approx(20 * math.log10(steps[1] / steps[0]), abs=1.5)


def test_the_report_names_the_keys():
    model = build("opt", "vanilla")
    with torch.no_grad():
        model.model.decoder.layers[0].self_attn.k_proj.bias[3] += 100.0
    batch = inputs("opt", batch=8)
    given = [{**batch, "labels": batch["input_ids"]}]
    report = evaluate(model, lambda seed: [batch], given, scheme="W8A8KV8 linear", seeds=1)
    assert report.worst[0].name == "model.decoder.layers.0.self_attn/key"
    assert report.scheme == "W8A8KV8 linear"


def test_exclude_leaves_keys_or_values():
    batch = inputs("llama")
    for left, stays in (("key", "value"), ("value", "key")):
        quantized = quantize(build("llama"), [batch], "W8A8KV8", exclude=[f"*/{left}"])
        names = {row.name for row in quantization_map(quantized).rows}
        assert "model.layers.0.self_attn/" + stays in names
        assert not any(name.endswith(f"/{left}") for name in names)
    with pytest.raises(ValueError, match=r"'\*/key' matches no quantizer"):
        quantize(build("llama"), [batch], "W8A8", exclude=["*/key"])


def test_sixteen_bits_cost_next_to_nothing():
    batch = inputs("llama")
    model = build("llama")
    for scheme in ("linear", "per-token", "smoothquant", "paper"):
        without = output(quantize(model, [batch], f"W8A8 {scheme}"), batch)
        assert decibels(without, output(quantize(model, [batch], f"W8A8KV16 {scheme}"), batch)) > 40
        few = output(quantize(model, [batch], f"W8A8KV4 {scheme}"), batch)
        assert decibels(without, few) < 30


@pytest.mark.parametrize("scheme", ["W8A8KV8", "W8A8KV8 per-token"])
def test_generation_with_a_cache_is_that_without(scheme):
    batch = inputs("llama", batch=2, length=9)
    batch["attention_mask"][:] = 1
    quantized = quantize(build("llama"), [inputs("llama", batch=2, length=30)], scheme)
    with torch.no_grad():
        both = [quantized.generate(**batch, max_new_tokens=8, do_sample=False, use_cache=use) for use in (True, False)]
    assert torch.equal(*both)


def test_schemes_with_a_cache_are_read_and_written():
    scheme = Scheme.parse("w4a8kv6 per-token")
    assert (scheme.weights.bits, scheme.activations.bits, scheme.kv_bits) == (4, 8, 6)
    assert str(scheme) == "W4A8KV6 per-token"
    assert Scheme.parse(str(scheme)) == scheme
    assert Scheme.parse("W4A8").kv_bits is None
    for wrong in ("W8A8KV1", "W8A8KV17"):
        with pytest.raises(ValueError, match="bits=1"):
            Scheme.parse(wrong)
    with pytest.raises(ValueError, match=r"W8A8KV.*unknown"):
        Scheme.parse("W8A8KV")


def test_a_model_without_a_cache_refuses():
    with pytest.raises(ValueError, match=r"KV8.*StanhopForForecasting"):
        simulate(build("stanhop"), "W8A8KV8")
