"""``outeffhop quantize`` as a user meets it: tables, JSON, files, and refusals that leave everything as it was."""

import json

import pytest
import torch

from outeffhop.cli.main import main
from outeffhop.lab.data import prepare
from outeffhop.models import presets
from outeffhop.quantization import QuantizationReport

SMALL = dict(hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4)
QUICK = ("--length", "32", "--batch-size", "4", "--calibration-batches", "2", "--batches", "2", "--seeds", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints by name, and a cache of their own."""
    root = tmp_path_factory.mktemp("quantize")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTEFFHOP_CACHE", str(root / "cache"))
        prepared = prepare("builtin:text", "clm", length=32, vocab_size=400)
        torch.manual_seed(0)
        opt = presets.build("opt", "tiny", "gated-outeffhop", **SMALL, **prepared.changes)
        opt.save_pretrained(root / "opt")
        prepared.tokenizer.save_pretrained(root / "opt")
        opt.save_pretrained(root / "untold")  # without its tokenizer
        with torch.no_grad():
            opt.model.decoder.layers[0].fc1.weight[0, 0] = float("nan")
        opt.save_pretrained(root / "nan")
        prepared.tokenizer.save_pretrained(root / "nan")
        plain = presets.build("opt", "tiny", "vanilla", **SMALL, **prepared.changes)
        plain.save_pretrained(root / "plain")
        prepared.tokenizer.save_pretrained(root / "plain")
        plain.bfloat16().save_pretrained(root / "half")
        prepared.tokenizer.save_pretrained(root / "half")
        presets.build("vit", "tiny", "outeffhop", hidden_size=32, num_hidden_layers=1).save_pretrained(root / "vit")
        yield root


def quantize(folder, name, *arguments, data="builtin:text"):
    return main(["quantize", str(folder / name), "--data", data, "--device", "cpu", *arguments])


def test_a_table_and_a_file(folder, tmp_path, capsys):
    assert quantize(folder, "opt", *QUICK, "--out", str(tmp_path / "out")) == 0
    captured = capsys.readouterr()
    for word in ("OPTForCausalLM", "gated-outeffhop", "W8A8", "perplexity", "±", "Worst rounded", "model.decoder"):
        assert word in captured.out
    assert "calibration 2 of 2" in captured.err
    report = QuantizationReport.load(tmp_path / "out" / "quantization.json")
    assert report.seeds == (0, 1)
    assert report.scheme == "W8A8 paper"
    assert (report.calibration_batches, report.evaluation_batches) == (2, 2)
    assert all(value > 1.0 for value in report.quantized["perplexity"])
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["quantization.json"]


@pytest.mark.parametrize("scheme", ["linear", "per-token", "smoothquant"])
def test_json_of_other_schemes(folder, scheme, capsys):
    assert quantize(folder, "opt", *QUICK, "--bits", "W6A6", "--scheme", scheme, "--json") == 0
    report = QuantizationReport.from_json(capsys.readouterr().out)
    assert report.scheme == f"W6A6 {scheme}"
    assert report.placement == "linear"


def test_8_bit_floating_point(folder, capsys):
    assert quantize(folder, "opt", *QUICK, "--scheme", "fp8", "--json") == 0
    report = QuantizationReport.from_json(capsys.readouterr().out)
    assert (report.scheme, report.placement) == ("W8A8 fp8", "paper")
    assert report.quantized["perplexity"][0] == pytest.approx(report.full["perplexity"], rel=0.5)


def test_ranges_by_percentile(folder, capsys):
    found = {}
    for how in ("running", "percentile"):
        assert quantize(folder, "opt", *QUICK, "--range", how, "--json") == 0
        found[how] = json.loads(capsys.readouterr().out)["quantized"]["loss"]
    assert found["running"] != found["percentile"]


def test_folding_layernorms(folder, capsys):
    assert quantize(folder, "opt", *QUICK, "--fold-layernorm", "--bits", "W4A8", "--json") == 0
    report = QuantizationReport.from_json(capsys.readouterr().out)
    assert len(report.folding.folded) == 4
    assert report.folding.folded["model.decoder.layers.0.final_layer_norm"] == ("model.decoder.layers.0.fc1",)
    assert "shared" in report.folding.kept["model.decoder.final_layer_norm"]
    assert quantize(folder, "opt", *QUICK, "--fold-layernorm") == 0
    assert "folded in 4 of 5 norms" in capsys.readouterr().out


def test_images(folder, capsys):
    assert quantize(folder, "vit", *QUICK, "--json", data="builtin:images") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["task"] == "classification"
    assert set(report["full"]) == {"accuracy"}


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("nothing", (), "is not a folder"),
        ("nan", (), "fc1.weight"),
        ("untold", (), "--tokenizer"),
        ("vit", (), "builtin:text"),
        ("opt", ("--bits", "W8"), "scheme='W8 paper'"),
        ("opt", ("--bits", "W1A8"), "bits=1"),
        ("opt", ("--scheme", "smoothquant", "--range", "percentile"), "activation_range='minmax'"),
        ("opt", ("--scheme", "fp8", "--bits", "W4A8"), "bits=4: fp8 has 8 bits"),
        ("opt", ("--scheme", "fp8", "--int8"), "scheme='W8A8 fp8' with int8"),
        ("opt", ("--seeds", "0"), "seeds=0"),
        ("opt", ("--batch-size", "0"), "batch-size=0"),
        ("opt", ("--device", "nowhere"), "device='nowhere'"),
    ],
)
def test_bad_input_is_exit_code_2_and_overwrites_nothing(folder, tmp_path, name, arguments, match, capsys):
    kept = tmp_path / "quantization.json"
    kept.write_text("mine")
    assert quantize(folder, name, "--out", str(tmp_path), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("outeffhop: ")
    assert match in captured.err
    assert kept.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [kept]


def test_a_pattern_that_matches_nothing_is_said_before_anything_is_measured(folder, capsys):
    assert quantize(folder, "opt", *QUICK, "--exclude", "*fc1", "*.none.*") == 2
    assert capsys.readouterr().err == "outeffhop: exclude='*.none.*' matches no module of OPTForCausalLM\n"


def test_a_tokenizer_named_apart(folder, capsys):
    assert quantize(folder, "untold", *QUICK, "--tokenizer", str(folder / "opt"), "--json") == 0
    assert json.loads(capsys.readouterr().out)["task"] == "clm"


def test_a_corrupt_checkpoint_is_exit_code_2(folder, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (folder / "opt").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert main(["quantize", str(broken), "--data", "builtin:text", *QUICK]) == 2
    assert "broken" in capsys.readouterr().err


def test_an_out_that_is_a_file_is_refused_before_any_work(folder, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    assert quantize(folder, "opt", "--out", str(file)) == 2
    assert "is a file" in capsys.readouterr().err
    assert file.read_text() == "mine"


# A checkpoint to deploy


def evaluate(folder, *arguments):
    return main(
        ["evaluate", str(folder), "--data", "builtin:text", "--device", "cpu", "--json", *QUICK[:4], *arguments]
    )


@pytest.mark.parametrize(("name", "bits"), [("plain", "W8A8"), ("plain", "W4A8"), ("half", "W8A8")])
def test_a_saved_checkpoint_gives_the_metric_that_was_printed(folder, tmp_path, name, bits, capsys):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    saved = tmp_path / "saved"
    given = ("--scheme", "linear", "--bits", bits, "--save", str(saved), "--out", str(tmp_path / "out"))
    assert quantize(folder, name, *QUICK, *given, "--json") == 0
    report = QuantizationReport.from_json(capsys.readouterr().out)
    assert report == QuantizationReport.load(tmp_path / "out" / "quantization.json")
    first = {metric: values[0] for metric, values in report.quantized.items()}
    assert report.saved.path == str(saved)
    assert report.saved.metric == pytest.approx(first, rel=1e-4)
    assert report.saved.bytes_before == (folder / name / "model.safetensors").stat().st_size
    assert report.saved.bytes_after == (saved / "model.safetensors").stat().st_size < report.saved.bytes_before
    assert evaluate(saved, "--batches", "2") == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(report.saved.metric, rel=1e-6)


def test_a_table_of_what_was_saved(folder, tmp_path, capsys):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    assert quantize(folder, "plain", *QUICK, "--scheme", "linear", "--save", str(tmp_path / "saved")) == 0
    printed = capsys.readouterr().out
    assert f"Saved to {tmp_path / 'saved'}" in printed
    assert "loaded again" in printed


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("plain", (), "--scheme linear"),
        ("nothing", (), "--scheme linear"),  # said before the checkpoint is read
        ("plain", ("--scheme", "smoothquant"), "scheme='W8A8 smoothquant'"),
        ("plain", ("--scheme", "fp8"), "scheme='W8A8 fp8'"),
        ("plain", ("--scheme", "per-token"), "fc1 takes inputs of 2 dimensions"),
        ("plain", ("--scheme", "linear", "--bits", "W6A6"), "bits='W6A6'"),
        ("plain", ("--scheme", "linear", "--fold-layernorm"), "--fold-layernorm"),
        ("opt", ("--scheme", "linear"), "attention method gated-outeffhop"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_measured(folder, tmp_path, name, arguments, match, capsys):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    assert quantize(folder, name, *QUICK, "--save", str(tmp_path / "saved"), *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert match in captured.err
    assert "floating point\n" not in captured.err  # the first step of measuring
    assert list(tmp_path.iterdir()) == []


def test_a_folder_to_save_to_that_holds_something_is_left_alone(folder, tmp_path, capsys):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    (tmp_path / "mine").write_text("mine")
    assert quantize(folder, "plain", *QUICK, "--scheme", "linear", "--save", str(tmp_path)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
