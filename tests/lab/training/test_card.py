"""The model card of a finished run: it says what the run's files say, and its code loads the model."""

import contextlib
import json
import re
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard
from runs import MODELS, config, result

from outeffhop.cli.main import main
from outeffhop.lab.training import RunFolder, save_pretrained, train
from outeffhop.lab.training.card import CARD, model_card, write_card
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.quantization import QuantizationReport

QUICK = ("--batch-size", "4", "--calibration-batches", "1", "--batches", "1", "--seeds", "2", "--device", "cpu")


@pytest.fixture
def run(whole_run, tmp_path):
    """A copy of a finished OPT's run."""
    return RunFolder(shutil.copytree(whole_run("opt"), tmp_path / "run"))


def rows(card):
    """Every table's lines, by their first cell."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in card.splitlines() if line.startswith("|")]
    return {cells[0].strip(): [c.strip() for c in cells[1:]] for cells in lines}


@pytest.mark.parametrize("model", MODELS)
def test_its_numbers_are_the_results(model, whole_run):
    out = whole_run(model)
    card, found = ModelCard.load(out / "model" / CARD), result(out)
    told = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert told == found["metrics"]
    assert card.data.library_name == "transformers"
    assert card.data.tags == ["outeffhop", model]  # of which the method is the first
    table = rows(card.content)
    for name, value in [*found["metrics"].items(), ("max inf norm", found["max_inf_norm"])]:
        assert float(table[name][0]) == pytest.approx(value, rel=1e-5)
    env = json.loads((out / "env.json").read_text())
    assert f"{env['parameters']:,} parameters, 12 steps of 8 samples" in card.content
    assert f"torch {env['packages']['torch']}" in table["versions"][0]
    assert "Not measured yet" in card.content
    assert str(out.parent) not in card.content


@pytest.mark.parametrize("model", MODELS)
def test_its_code_loads_the_model(model, whole_run):
    folder = whole_run(model) / "model"
    (code,) = re.findall(r"```python\n(.*?)```", (folder / CARD).read_text(), re.S)
    assert len(code.splitlines()) == 3
    names = {}
    with contextlib.chdir(folder):
        exec(code, names)
    loaded, wanted = names["model"].state_dict(), load_checkpoint(folder).state_dict()
    assert loaded.keys() == wanted.keys()
    assert all(loaded[name].equal(wanted[name]) for name in wanted)


def test_quantizing_a_run_tells_its_card(run, tmp_path):
    before = (run.model / CARD).read_text()
    assert main(["quantize", str(run.path), *QUICK, "--out", str(tmp_path / "elsewhere")]) == 0
    assert (run.model / CARD).read_text() == before
    assert main(["quantize", str(run.path), *QUICK, "--out", str(run.path)]) == 0
    report = QuantizationReport.load(run.path / "quantization.json")
    table = rows((run.model / CARD).read_text().split("## Quantized")[1])
    full, quantized = table["perplexity"]
    assert float(full) == pytest.approx(report.full["perplexity"], rel=1e-5)
    assert float(quantized.split(" ± ")[0]) == pytest.approx(report.mean("perplexity"), rel=1e-5)
    assert table["metric"] == ["floating point", "W8A8"]
    save_pretrained(run.path, tmp_path / "public")
    assert {p.name for p in (tmp_path / "public").iterdir()} == {p.name for p in run.model.iterdir()}
    assert "Simulated `W8A8 paper`" in (tmp_path / "public" / CARD).read_text()
    load_checkpoint(tmp_path / "public")


def test_a_damaged_report_is_named(run):
    before = (run.model / CARD).read_text()
    (run.path / "quantization.json").write_text("{")
    with pytest.raises(ValueError, match=r"quantization\.json: not a valid QuantizationReport"):
        write_card(run)
    assert (run.model / CARD).read_text() == before


def test_only_a_finished_run_is_published(run, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(ValueError, match="never overwritten"):
        save_pretrained(run.path, tmp_path / "full")
    (run.path / "result.json").unlink()
    with pytest.raises(ValueError, match="not a finished run"):
        save_pretrained(run.path, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_names_cannot_break_out(run, tmp_path):
    """A data file's and a folder's name, whatever they hold, stay what they are: text."""
    hostile = "a|b `c` <script>alert(1)<script> [x](y) *z*\n---\n# Title"
    folder = tmp_path / "private" / hostile
    shutil.copytree(run.path, folder)
    text = (folder / "config.yaml").read_text()
    values = yaml.safe_load(text) | {"data": str(folder), "init": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    card = model_card(RunFolder(folder), RunFolder(folder).config(), result(folder))
    parsed = ModelCard(card)
    one_line = " ".join(folder.name.split())
    assert parsed.data.model_name == parsed.data.eval_results[0].dataset_name == one_line
    assert "private" not in card
    body = card.split("\n---\n", 1)[1]
    assert [line for line in body.splitlines() if line.startswith("#")][1:] == [
        "## How to load",
        "## Numbers",
        "## Quantized",
        "## How it was made",
    ]
    # HTML is inert within a code span, and escaped without
    assert "<script>" not in re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", body)
    assert rows(body)["data"] == ["`` " + one_line.replace("|", r"\|") + " ``"]


def test_what_is_not_finite_is_told(run):
    found = result(run.path) | {"max_inf_norm": float("inf"), "metrics": {"perplexity": float("nan"), "loss": 2.0}}
    card = model_card(run, run.config(), found)
    assert [r.metric_type for r in ModelCard(card).data.eval_results] == ["loss"]
    assert rows(card)["perplexity"] == ["nan"]
    assert rows(card)["max inf norm"] == ["inf"]


def test_a_run_that_goes_on_from_a_checkpoint(whole_run, cache, tmp_path):
    train(config("bert", tmp_path / "a", cache, init=whole_run("bert") / "model", max_steps=1), quiet=True)
    assert "started from the checkpoint `model`" in (tmp_path / "a" / "model" / CARD).read_text()
