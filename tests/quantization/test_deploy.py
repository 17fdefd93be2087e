"""Checkpoints to deploy: what transformers loads from the folder computes what the simulation computed."""

import json
import subprocess
import sys
from dataclasses import replace

import architectures
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import outeffhop
from outeffhop.metrics import metric_for, task_of
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.quantization import Calibration, Scheme, freeze, save_compressed, simulate
from outeffhop.quantization.simulation import simulation_of

pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")

FOUR = ("llama", "bert", "vit", "opt")


def build(name, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    config, auto = tiny.MODELS[name]
    given = config()
    for key, value in changes.items():
        setattr(given, key, value)
    model = auto.from_config(given).eval()
    with torch.no_grad():
        for p in model.parameters():  # not model.to(dtype), which would also round the frequencies of positions
            p.copy_(p.to(dtype))
    return model


def batches(name, count=3):
    """Batches with labels, different from each other."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        if name == "vit":
            pixels = torch.randn(4, 3, 12, 12, generator=generator)
            found.append({"pixel_values": pixels, "labels": torch.randint(5, (4,), generator=generator)})
        else:
            ids = torch.randint(3, tiny.VOCAB, (4, 11), generator=generator)
            found.append({"input_ids": ids, "labels": ids})
    return found


@torch.no_grad()
def quantize(model, name, scheme="linear", **options):
    quantized = simulate(model, scheme, **options)
    with Calibration(quantized):
        for batch in batches(name)[:2]:
            quantized(**batch)
    return freeze(quantized)


def metric(model, name):
    return metric_for(task_of(model))(model, batches(name))


@torch.no_grad()
def logits(model, name):
    return torch.cat([model(**batch).logits for batch in batches(name)]).float()


def is_same(found, truth):
    """As far apart as one flipped rounding in a few thousand may bring them, and no farther."""
    return (found - truth).square().sum() <= 1e-4 * truth.square().sum()


@pytest.mark.parametrize(
    ("name", "scheme"),
    [*((name, scheme) for name in FOUR for scheme in ("linear", "W4A8 linear")), ("llama", "per-token")]
    + [(name, "W4A8 per-token") for name in ("bert", "vit")],
)
def test_what_is_loaded_computes_what_was_simulated(name, scheme, tmp_path):
    model = build(name)
    quantized = quantize(model, name, scheme)
    save_compressed(quantized, tmp_path / "saved")
    for loaded in (type(model).from_pretrained(tmp_path / "saved"), load_checkpoint(tmp_path / "saved")):
        assert metric(loaded.eval(), name) == pytest.approx(metric(quantized, name), rel=1e-3)
        assert is_same(logits(loaded, name), logits(quantized, name))
    assert not is_same(logits(model, name), logits(quantized, name))  # quantization shows, so the above can fail
    weights = dict(loaded.named_parameters())  # decompressed when it ran
    for layer in simulation_of(quantized).layout.sites:
        assert torch.equal(weights[f"{layer}.weight"], quantized.get_submodule(layer).weight)


@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_mixture_of_experts_is_loaded_with_its_experts(name, tmp_path):
    quantized = quantize(architectures.build(name), name)
    save_compressed(quantized, tmp_path / "saved")
    loaded = type(quantized).from_pretrained(tmp_path / "saved").eval()
    assert is_same(logits(loaded, name), logits(quantized, name))


def test_what_transformers_cannot_load_is_refused_in_one_line(tmp_path):
    model = architectures.build("Dinov2ForImageClassification")
    quantized = simulate(model, "linear")
    with Calibration(quantized), torch.no_grad():
        quantized(pixel_values=torch.randn(2, 3, architectures.SIDE, architectures.SIDE))
    with pytest.raises(ValueError, match=r"transformers cannot load a Dinov2ForImageClassification.*--int8") as refused:
        save_compressed(freeze(quantized), tmp_path / "saved")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "saved").exists()


def test_integers_and_grids_are_those_of_the_simulation(tmp_path):
    quantized = quantize(build("llama"), "llama")
    save_compressed(quantized, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    points = simulation_of(quantized).points
    for layer in simulation_of(quantized).layout.sites:
        weight, received = points[f"{layer}/weight"].grid, points[f"{layer}/input"].grid
        integers = saved[f"{layer}.weight"]
        assert integers.dtype == torch.int8
        assert integers.abs().max() == 127
        assert torch.equal(integers * saved[f"{layer}.weight_scale"], quantized.get_submodule(layer).weight)
        assert torch.equal(saved[f"{layer}.weight_scale"], weight.scale)
        assert torch.equal(saved[f"{layer}.input_scale"], received.scale)
        assert torch.equal(saved[f"{layer}.input_zero_point"].int() + 128, received.zero_point)


def test_the_config_as_others_read_it(tmp_path):
    save_compressed(quantize(build("llama"), "llama", "per-token"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    entry = config["quantization_config"]
    assert entry["quant_method"] == "compressed-tensors"
    assert entry["format"] == "int-quantized"
    assert entry["quantization_status"] == "compressed"
    assert entry["ignore"] == ["lm_head"]
    group = entry["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"]
    assert {key: group["weights"][key] for key in ("num_bits", "type", "symmetric", "strategy", "dynamic")} == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    assert group["input_activations"]["strategy"] == "token"
    assert group["input_activations"]["dynamic"] is True
    assert group["input_activations"]["symmetric"] is False
    assert "outeffhop" not in config
    assert "attn_implementation" not in config


def test_in_another_process_that_does_not_know_this_package(tmp_path):
    quantized = quantize(build("llama"), "llama")
    save_compressed(quantized, tmp_path / "saved")
    batch = batches("llama")[0]
    torch.save((batch["input_ids"], logits(quantized, "llama")[:4]), tmp_path / "expected.pt")
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
ids, expected = torch.load("expected.pt")
torch.set_num_threads(1)
with torch.no_grad():
    found = AutoModelForCausalLM.from_pretrained("saved").eval()(input_ids=ids).logits
assert not [name for name in sys.modules if name.startswith("outeffhop")]
print(float((found - expected).square().sum() / expected.square().sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_heads_stay_in_floating_point(tied, tmp_path):
    model = build("llama", tie_word_embeddings=tied)
    quantized = quantize(model, "llama")
    save_compressed(quantized, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) is not tied
    assert torch.equal(saved["model.embed_tokens.weight"], model.model.embed_tokens.weight)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert is_same(logits(loaded, "llama"), logits(quantized, "llama"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_kept_in_the_file_and_loaded_as_float32(dtype, tmp_path):
    model = build("llama", dtype)
    quantized = quantize(model, "llama")
    save_compressed(quantized, tmp_path, dtype=dtype)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["model.embed_tokens.weight"].dtype == saved["model.norm.weight"].dtype == dtype
    assert all(value.dtype == torch.float32 for name, value in saved.items() if name.endswith("_scale"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters() if p.is_floating_point()} == {torch.float32}
    assert metric(loaded, "llama") == pytest.approx(metric(quantized, "llama"), rel=1e-3)
    assert is_same(logits(loaded, "llama"), logits(quantized, "llama"))


def test_a_dtype_that_would_lose_digits_is_not_used(tmp_path):
    model = build("llama")
    save_compressed(quantize(model, "llama"), tmp_path, dtype=torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight"], model.model.embed_tokens.weight)


def test_a_simulation_in_bfloat16(tmp_path):
    quantized = quantize(build("llama").bfloat16(), "llama")
    save_compressed(quantized, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    weight = quantized.model.layers[0].mlp.up_proj.weight
    rounded = saved["model.layers.0.mlp.up_proj.weight"] * saved["model.layers.0.mlp.up_proj.weight_scale"]
    assert torch.equal(rounded.bfloat16(), weight)  # the integers survive 8 bits of mantissa


def test_excluded_layers_are_ignored(tmp_path):
    quantized = quantize(build("llama"), "llama", exclude=("*.down_proj",))
    save_compressed(quantized, tmp_path)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(ignored) == ["lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"]
    assert is_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path), "llama"), logits(quantized, "llama"))


def test_plain_softmax_of_this_package_is_saved_as_transformers_own(tmp_path):
    torch.manual_seed(0)
    model = presets.build("opt", "tiny", "vanilla", vocab_size=tiny.VOCAB, pad_token_id=1).eval()
    quantized = quantize(model, "opt")
    save_compressed(quantized, tmp_path)
    assert '"outeffhop"' not in (tmp_path / "config.json").read_text()
    assert is_same(logits(AutoModelForCausalLM.from_pretrained(tmp_path), "opt"), logits(quantized, "opt"))


# Refusals


@pytest.mark.parametrize(
    ("scheme", "match"),
    [
        ("W8A8 paper", "--scheme linear"),
        ("smoothquant", "factors.*linear or per-token"),
        ("fp8", "scheme='W8A8 fp8' is 8-bit floating point"),
        (replace(Scheme.parse("fp8"), placement="linear"), "scheme='W8A8 fp8' is 8-bit floating point"),
        ("W6A8 linear", "bits='W6A8'"),
        ("W8A4 linear", "bits='W8A4'"),
        (replace(Scheme.parse("linear"), weights=Scheme.parse("linear").activations), "symmetric weights"),
    ],
)
def test_schemes_that_the_format_cannot_hold(scheme, match, tmp_path):
    quantized = quantize(build("llama"), "llama", scheme)
    with pytest.raises(ValueError, match=match):
        save_compressed(quantized, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["outeffhop", "gated", "vanilla(qk_norm=rms)", "clipped-outeffhop"])
def test_methods_that_only_this_package_knows(method, tmp_path):
    quantized = quantize(outeffhop.convert(build("llama"), method), "llama")
    with pytest.raises(ValueError, match=r"has the attention method .*plain softmax"):
        save_compressed(quantized, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_models_that_others_cannot_load(tmp_path):
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.c_attn .* Conv1D"):
        save_compressed(quantize(build("gpt2"), "gpt2"), tmp_path / "saved")
    series = simulate(
        presets.build("stanhop", "tiny", "vanilla", e_layers=1, d_model=16, d_ff=24, num_heads=2), "linear"
    )
    with Calibration(series), torch.no_grad():
        series(past_values=torch.randn(2, series.config.in_len, series.config.num_series))
    with pytest.raises(ValueError, match="not one of transformers' models"):
        save_compressed(freeze(series), tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_quantized_already(tmp_path):
    save_compressed(quantize(build("llama"), "llama"), tmp_path / "first")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    loaded(**batches("llama")[0])
    with pytest.raises(ValueError, match="quantized already"):
        save_compressed(quantize(loaded, "llama"), tmp_path / "second")


def test_what_is_not_frozen_or_not_complete(tmp_path):
    model = build("llama")
    with pytest.raises(ValueError, match="is not a simulation"):
        save_compressed(model, tmp_path / "saved")
    with pytest.raises(ValueError, match="is new"):
        save_compressed(simulate(model, "linear"), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_proj has no quantizer of both"):
        save_compressed(freeze(simulate(model, "per-token")), tmp_path / "saved")  # never ran
    with pytest.raises(ValueError, match=r"up_proj has no quantizer of both"):
        save_compressed(quantize(model, "llama", exclude=("*.up_proj/input",)), tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


def test_tokens_that_transformers_would_not_tell_apart(tmp_path):
    """OPT flattens batch and length before its feed-forward layers."""
    with pytest.raises(ValueError, match=r"layers\.0\.fc1 takes inputs of 2 dimensions"):
        save_compressed(quantize(build("opt"), "opt", "per-token"), tmp_path / "saved")
    save_compressed(quantize(build("opt"), "opt", "per-token", exclude=("*.fc1", "*.fc2")), tmp_path / "saved")


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        save_compressed(quantize(build("llama"), "llama"), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_a_fault_leaves_nothing(tmp_path):
    class Full:
        def save_pretrained(self, folder):
            assert (folder / "model.safetensors").is_file()
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_compressed(quantize(build("llama"), "llama"), tmp_path / "saved", tokenizer=Full())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "match"), [({"dtype": "bfloat16"}, "is another tensor"), ({"num_hidden_layers": 1}, "is missing")]
)
def test_a_checkpoint_that_loads_as_another_is_not_published(change, match, tmp_path):
    class Spoiler:
        """Runs after the model is written, and changes what transformers would load."""

        def save_pretrained(self, folder):
            file = folder / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(ValueError, match=match):
        save_compressed(quantize(build("llama"), "llama"), tmp_path / "saved", tokenizer=Spoiler())
    assert list(tmp_path.iterdir()) == []


def test_without_the_package(tmp_path, monkeypatch):
    quantized = quantize(build("llama"), "llama")
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(ImportError, match=r"needs compressed-tensors: pip install 'outeffhop\[deploy\]'"):
        save_compressed(quantized, tmp_path / "saved")


def test_roundings_differ_only_at_a_half(tmp_path):
    """compressed-tensors divides by the scale where PyTorch multiplies: the same integers, except beside a tie."""
    quantized = quantize(build("bert"), "bert")
    save_compressed(quantized, tmp_path)
    loaded = load_checkpoint(tmp_path)
    loaded(**batches("bert")[0])  # decompresses it
    generator = torch.Generator().manual_seed(2)
    for name in simulation_of(quantized).layout.sites:
        grid = simulation_of(quantized).points[f"{name}/input"].grid
        layer = loaded.get_submodule(name)
        x = torch.randn(2000, layer.in_features, generator=generator) * grid.scale * 100
        steps = x.double() / grid.scale.double()
        near = ((steps - steps.floor()) - 0.5).abs() < 1e-4
        x = torch.where(near, torch.zeros_like(x), x)  # and zero is exact
        with torch.no_grad():
            truth = torch.nn.functional.linear(grid.fake(x), quantized.get_submodule(name).weight, layer.bias)
            torch.testing.assert_close(layer(x), truth, rtol=1e-5, atol=1e-5 * float(truth.abs().max()))
