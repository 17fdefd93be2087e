"""``outeffhop diagnose``: what it prints, writes and refuses, for a tiny checkpoint with an outlier in its stream."""

import json
import math
import re
from html import escape

import pytest
import torch
from architectures import VOCAB, build

from outeffhop.cli.main import main
from outeffhop.lab.data import prepare
from outeffhop.lab.diagnosis import VERDICTS, DiagnosisReport, diagnose, verdict
from outeffhop.quantization import SCHEMES

QUICK = (
    "--length",
    "16",
    "--batch-size",
    "2",
    "--batches",
    "1",
    "--calibration-batches",
    "1",
    "--device",
    "cpu",
    "--no-int8",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(cache))


@pytest.fixture(scope="module")
def checkpoint(cache, tmp_path_factory):
    """A Llama with weights large enough to matter, whose last layer writes large values into one channel."""
    folder = tmp_path_factory.mktemp("checkpoint") / "mine"
    torch.manual_seed(0)
    model = build("LlamaForCausalLM")
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.dim() == 2):
            weight *= 5.0
        model.model.layers[1].mlp.down_proj.weight[3, 5] = 30.0
    model.save_pretrained(folder)
    prepare("builtin:text", "clm", vocab_size=VOCAB, cache_dir=cache).tokenizer.save_pretrained(folder)
    return folder


def command(checkpoint, out, *more):
    return main(["diagnose", str(checkpoint), "--out", str(out), *QUICK, *more])


def test_it_says_where_the_outliers_are_what_8_bits_cost_and_what_to_do(checkpoint, tmp_path, capsys):
    assert command(checkpoint, tmp_path) == 0
    said = capsys.readouterr().out
    report = DiagnosisReport.load(tmp_path / "diagnosis.json")
    assert [cost.scheme for cost in report.costs if cost.scheme != "openvino"] == list(SCHEMES)
    everything = report.cost("paper")
    assert report.full["perplexity"] > 1
    assert everything.sqnr_db < report.cost("per-token").sqnr_db
    assert everything.verdict == verdict(everything.sqnr_db)

    worst = report.outliers.worst(1)[0]
    assert worst.name == "model.layers.1"
    assert worst.channels[0].channel == 3
    blamed = report.culprits[0]
    assert "model.layers.1.mlp.down_proj/weight" in [each.name for each in blamed.tensors]
    assert blamed.remedy is not None

    page = (tmp_path / "diagnosis.html").read_text().replace("<wbr>", "")
    named = [cost.words for cost in report.costs] + [each.name for each in blamed.tensors[:3]]
    named += [advice.text for advice in report.advice] + ["No data was named", everything.verdict]
    for words in named:
        assert words in said
        assert escape(words) in page
    assert f"--exclude {blamed.tensors[0].name}" in said
    assert "Heads" in said.splitlines()
    assert "\\n" not in said
    assert f"outeffhop mend {checkpoint} --data YOUR_DATA --out mended" in said


def test_what_it_advises_does_what_it_says(checkpoint, tmp_path, capsys):
    """The command that leaves the blamed tensors in floating point has the decibels it promises, or nearly."""
    report = diagnose(checkpoint, length=16, batch_size=2, batches=1, calibration_batches=1, device="cpu", int8=False)
    advice = next(advice for advice in report.advice if "--exclude" in (advice.command or ""))
    words = advice.command.replace("YOUR_DATA", "builtin:text").replace("quantized", str(tmp_path)).split()
    main([*words[1:], *QUICK[:-1], "--seeds", "1", "--task", "embedding"])
    found = json.loads((tmp_path / "quantization.json").read_text())["quantized"]["sqnr_db"][0]
    assert abs(found - report.culprits[0].remedy.sqnr_db) < 3.0
    capsys.readouterr()


def test_json_is_the_report_and_compares(checkpoint, tmp_path, capsys):
    assert command(checkpoint, tmp_path / "a", "--json", "--task", "embedding") == 0
    first = DiagnosisReport.from_json(capsys.readouterr().out)
    assert first == DiagnosisReport.load(tmp_path / "a" / "diagnosis.json")
    assert (first.task, first.full) == ("embedding", {})
    # beside the folder of a diagnosis nothing is measured again
    assert command(checkpoint, tmp_path / "b", "--compare", str(tmp_path / "a"), "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out.count("What to do") == 2
    assert DiagnosisReport.load(tmp_path / "b" / "compared.json") == first
    assert DiagnosisReport.load(tmp_path / "b" / "diagnosis.json").dtype == "bfloat16"
    assert "Side by side" in (tmp_path / "b" / "diagnosis.html").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--task", "mln"), "task='mln' is unknown; did you mean 'mlm'"),
        (("--task", "classification"), "needs images, but LlamaForCausalLM takes text"),
        (("--batches", "0"), "batches=0: must be at least 1"),
        (("--data", "builtin:images"), "contains images, but task .clm. needs text"),
        (("--device", "meta"), "use cpu"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_before_work_begins(checkpoint, tmp_path, flags, message, capsys):
    assert command(checkpoint, tmp_path / "out", *flags) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("outeffhop: ")]
    assert re.search(message, lines[-1])
    assert said.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("decibels", "word"),
    [(math.inf, 0), (24.96, 0), (24.94, 1), (15.0, 1), (8.0, 2), (7.9, 3), (-math.inf, 3), (math.nan, 3)],
)
def test_decibels_in_words(decibels, word):
    assert verdict(decibels) == list(VERDICTS.values())[word]


@pytest.mark.slow
def test_real_int8_where_it_is_installed(checkpoint, tmp_path, capsys):
    pytest.importorskip("openvino")
    pytest.importorskip("nncf")
    quick = QUICK[:-1]
    main(["diagnose", str(checkpoint), "--out", str(tmp_path / "a"), *quick])
    report = DiagnosisReport.load(tmp_path / "a" / "diagnosis.json")
    assert report.cost("openvino").sqnr_db > report.cost("paper").sqnr_db
    assert "real int8, as OpenVINO runs it" in capsys.readouterr().out
    assert not (tmp_path / "a" / "int8").exists()
    main(["diagnose", str(checkpoint), "--out", str(tmp_path / "b"), *quick, "--int8"])
    asked = DiagnosisReport.load(tmp_path / "b" / "diagnosis.json")
    assert asked.cost("openvino").sqnr_db == report.cost("openvino").sqnr_db
    assert (tmp_path / "b" / "int8" / "int8.xml").exists()
    assert main(["diagnose", str(checkpoint), "--out", str(tmp_path / "b"), *quick, "--int8"]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
