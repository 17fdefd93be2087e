"""``outeffhop runs``, and a run's folder in place of a checkpoint."""

import dataclasses
import json
import shutil

import pytest

from outeffhop.cli.main import main
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, train
from outeffhop.lab.training.recipes import resolve
from outeffhop.outliers import OutlierReport


def config(out, steps=2, **fields):
    settings = TrainConfig(max_steps=steps, batch_size=4, eval_batches=1, outlier_batches=1, log_steps=1)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
    return RunConfig(
        data="builtin:text", out=str(out), changes=small, train=settings, samples=DataConfig(length=24), **fields
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, one that has not saved yet, one whose config and one whose result was damaged."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTEFFHOP_CACHE", str(tmp_path_factory.mktemp("cache")))
        train(config(root / "done", method="gated-outeffhop"), quiet=True)
        begun = RunFolder(root / "deep" / "begun")
        begun.create(resolve(config(begun.path, steps=9)))
        begun.append({"step": 4, "loss": 6.0, "eval_perplexity": 99.0})
        shutil.copytree(root / "done", root / "torn")
        (root / "torn" / "config.yaml").write_text("model: [")
        shutil.copytree(root / "done", root / "cut")
        (root / "cut" / "result.json").write_text('{"steps": 2, "metr')
        yield root


def test_a_table_of_all_runs_whatever_their_state(runs, capsys):
    assert main(["runs", str(runs)]) == 0
    printed = capsys.readouterr()
    rows = {line.split()[0]: line for line in printed.out.splitlines()[2:]}
    assert list(rows) == ["cut", "deep/begun", "done", "torn"]
    assert "gated-outeffhop  0     2/2   finished" in rows["done"]
    assert "outeffhop        0     4/9   unfinished  perplexity 99" in rows["deep/begun"]
    assert "unreadable" in rows["torn"]
    assert "unreadable" in rows["cut"]
    assert [line.split()[1] for line in printed.err.splitlines() if "is unreadable" in line] == ["cut", "torn"]


def test_the_same_as_json(runs, capsys):
    assert main(["runs", str(runs), "--json"]) == 0
    found = {run["run"]: run for run in json.loads(capsys.readouterr().out)}
    assert {name: run["state"] for name, run in found.items()} == {
        "cut": "unreadable",
        "deep/begun": "unfinished",
        "done": "finished",
        "torn": "unreadable",
    }
    assert "config.yaml" in found["torn"]["error"]
    done = json.loads((runs / "done" / "result.json").read_text())
    assert found["done"]["metrics"]["result"] == done
    assert found["done"]["metrics"]["eval_perplexity"] == done["metrics"]["perplexity"]


def test_no_runs(tmp_path, capsys):
    assert main(["runs", str(tmp_path)]) == 0
    assert "outeffhop train --data builtin:text" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert main(["runs", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_run_stands_for_its_model_and_data_in_evaluate(runs, tmp_path, capsys):
    command = ["evaluate", str(runs / "done"), "--batches", "1", "--batch-size", "4", "--out", str(tmp_path / "e")]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # no bars of other libraries
    found = json.loads(printed.out)
    assert (found["data"], found["split"], found["samples"]) == ("builtin:text", "validation", 4)
    assert found["method"] == "gated-outeffhop"
    # the same model on the same samples of the same length as at the end of training
    said = json.loads((runs / "done" / "result.json").read_text())["metrics"]
    assert found["metrics"] == pytest.approx(said, rel=1e-6)
    assert json.loads((tmp_path / "e" / "evaluation.json").read_text()) == found
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "OPTForCausalLM (gated-outeffhop) on builtin:text, validation, 4 samples" in out
    assert f"written to {tmp_path / 'e' / 'evaluation.json'}" in out


def test_the_masks_of_evaluate_are_the_runs_own(tmp_path, monkeypatch, capsys):
    """Which tokens are to be guessed depends on the seed."""
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "cache"))
    settings = TrainConfig(max_steps=1, batch_size=4, eval_batches=1, outlier_batches=1, seed=3)
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    run = config(tmp_path / "a", model="bert")
    said = train(dataclasses.replace(run, changes=small, train=settings), quiet=True).metrics
    assert main(["evaluate", str(tmp_path / "a"), "--batches", "1", "--batch-size", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(said, rel=1e-6)


def test_its_flags_win_over_the_run(runs, tmp_path, capsys):
    text = tmp_path / "mine.txt"
    text.write_text("A text of one's own, said again and again.\n\n" * 200)
    command = ["evaluate", str(runs / "done"), "--data", str(text), "--length", "12", "--split", "train", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["data"] == str(text)


def test_a_run_in_outliers_and_quantize(runs, tmp_path, capsys):
    run = str(runs / "done")
    assert main(["outliers", run, "--out", str(tmp_path), "--batches", "1", "--batch-size", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    said = json.loads((runs / "done" / "result.json").read_text())
    assert found["max_inf_norm"] == pytest.approx(said["max_inf_norm"], rel=1e-6)
    assert OutlierReport.load(tmp_path / "outliers.json").samples == 4
    small = ["--batch-size", "4", "--batches", "1", "--calibration-batches", "1", "--seeds", "1"]
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert main(["quantize", str(copy), "--out", str(copy), *small]) == 0
    out = capsys.readouterr().out
    assert "1 calibration seed of 1 batch" in out
    assert f"written to {copy / 'quantization.json'}" in out
    assert main(["runs", str(copy)]) == 0
    assert "(W8A8 paper)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("none", [], "is not a folder"),
        ("deep/begun", [], "has no checkpoint yet"),
        ("torn", [], "config.yaml"),
        ("done/model", [], "data is missing"),
        ("done", ["--data", "builtin:images"], "needs text"),
        ("done", ["--batches", "0"], "batches=0"),
        ("done", ["--batch-size", "0"], "batch-size=0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_and_nothing_written(name, flags, words, runs, tmp_path, capsys):
    assert main(["evaluate", str(runs / name), "--out", str(tmp_path / "e"), *flags]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert not list(tmp_path.iterdir())
