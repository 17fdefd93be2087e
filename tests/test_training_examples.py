"""The examples that train, cut down to seconds: they leave what they promise, and the numbers they print are those."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from outeffhop.models import model_summary
from outeffhop.models.checkpoint import load_checkpoint

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ("--steps", "2", "--batches", "1", "--length", "32")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture
def example(tokens, tmp_path, monkeypatch, capsys):
    """Runs an example in a folder of its own, as a script; gives what it prints and the numbers it wrote."""
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tokens))

    def run(name, *arguments, folder="a"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments), "--out", "out"])
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        assert [p.name for p in (tmp_path / folder).iterdir()] == ["out"]
        out = tmp_path / folder / "out"
        return out, capsys.readouterr().out, json.loads((out / "numbers.json").read_text())

    return run


def cells(printed, title):
    """The numbers of the last table's line that begins with a title."""
    (line,) = [line for line in printed.splitlines() if line.startswith(title)][-1:]
    return [float(word) for word in line.removeprefix(title).split()]


def test_fine_tuning_a_converted_checkpoint(example):
    """First without a checkpoint; then from the one that was made there, to another method."""
    out, printed, numbers = example("finetune_converted", *SMALL)
    assert "no checkpoint was given" in printed
    assert list(numbers) == ["as it came", "outeffhop at once", "softmax, fine-tuned", "outeffhop, fine-tuned"]
    for title, row in numbers.items():
        assert cells(printed, title) == pytest.approx(list(row.values()), rel=1e-3)
    assert numbers["as it came"]["perplexity"] != numbers["softmax, fine-tuned"]["perplexity"]
    assert model_summary(load_checkpoint(out / "model")).method == "outeffhop"

    given = (out / "start" / "model", "--method", "gated-outeffhop", *SMALL)
    out, printed, again = example("finetune_converted", *given, folder="b")
    assert "no checkpoint was given" not in printed
    assert again["as it came"] == pytest.approx(numbers["as it came"])
    found = load_checkpoint(out / "model")
    assert model_summary(found).method.startswith("gated-outeffhop")
    assert "annealing" not in found.config.outeffhop  # the schedule went all the way


def test_pretraining_and_quantizing(example):
    out, printed, numbers = example("pretrain_and_quantize", *SMALL)
    assert {p.name for p in out.iterdir()} == {"vanilla", "outeffhop", "numbers.json"}
    assert numbers["vanilla"]["attention to nothing"] == 0 < numbers["outeffhop"]["attention to nothing"]
    for name in numbers["vanilla"]:
        assert cells(printed, f"{name:22}") == pytest.approx([row[name] for row in numbers.values()], rel=1e-4)
    for method, row in numbers.items():
        assert json.loads((out / method / "result.json").read_text())["steps"] == 2
        quantized = json.loads((out / method / "quantization.json").read_text())
        assert row["perplexity"] == quantized["full"]["perplexity"]


def test_forecasting(example):
    given = ("--steps", "2", "--batches", "1", "--methods", "outeffhop", "--in-len", "24", "--out-len", "30")
    out, printed, numbers = example("forecast_series", *given)
    assert (out / "forecast.png").read_bytes().startswith(b"\x89PNG")
    assert "32 test windows" in printed
    assert list(numbers) == ["outeffhop", "yesterday again"]
    assert cells(printed, "outeffhop ") == pytest.approx(list(numbers["outeffhop"].values()), abs=1e-4)
    assert numbers["yesterday again"]["mse"] < numbers["outeffhop"]["mse"]  # two steps teach nothing yet


@pytest.mark.parametrize("name", ["finetune_converted", "pretrain_and_quantize", "forecast_series"])
def test_help(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    page = capsys.readouterr().out
    for word in (f"python examples/{name}.py", "--steps", "numbers.json"):
        assert word in page
