"""A name from a file may hold what a terminal obeys: it is shown with escapes, wherever it is shown."""

import json
import re

import pytest
import torch
from fuzzing import command
from safetensors.torch import load_file, save_file

from outeffhop._naming import printable
from outeffhop.cli import console
from outeffhop.lab.training import RunConfig, RunFolder
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint

EVIL = "\x1b[31mred\x1b]0;title\x07\b\r\x9b2J\u202eyes"
SHOWN = r"\x1b[31mred\x1b]0;title\x07\x08\r\x9b2J\u202eyes"
SIZES = dict(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=300)


def test_printable():
    assert printable(EVIL) == SHOWN
    assert printable("α, 中文, a b\n") == "α, 中文, a b\\n"


def quiet(text):
    """Whether a terminal would only show the text, line by line."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def bert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    presets.build("bert", "tiny", "vanilla", **SIZES).save_pretrained("model")
    return tmp_path / "model"


def evaluated(folder):
    code, out, err = command("evaluate", folder, "--data", "builtin:text", "--batches", 1, "--device", "cpu")
    assert quiet(out + err)
    return code, err.splitlines()


def test_names_of_tensors(bert):
    file = bert / "model.safetensors"
    whole = load_file(file)
    layer = "bert.encoder.layer.0.output.dense.weight"
    save_file(whole | {f"bert.encoder.layer.0.{EVIL}": torch.ones(2)}, file, {"format": "pt"})
    code, err = evaluated(bert)
    assert code == 2
    assert SHOWN in err[0]
    with pytest.raises(ValueError, match=re.escape(SHOWN)):  # in Python too, where nobody stands between
        load_checkpoint(bert)
    save_file(whole | {layer: torch.ones(3, 3)}, file, {"format": "pt"})
    code, err = evaluated(bert)
    assert code == 2
    assert err == [
        f"outeffhop: checkpoint '{bert}' does not fit BertForMaskedLM: {layer} has shape [3, 3], "
        "but by config.json it has [16, 16]"
    ]


@pytest.mark.parametrize("field", ["architectures", "model_type", "hidden_act", "dtype"])
def test_values_of_a_config(bert, field):
    file = bert / "config.json"
    value = [EVIL] if field == "architectures" else EVIL
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    code, err = evaluated(bert)
    assert code == 2
    assert len(err) == 1


def test_names_of_files(bert):
    (bert / "model.safetensors").unlink()
    (bert / f"{EVIL}.bin").write_bytes(b"")
    code, err = evaluated(bert)
    assert code == 2
    assert f"{SHOWN}.bin is a pickle" in err[0]


def test_names_of_runs_and_of_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunFolder(tmp_path / "runs" / EVIL).create(RunConfig(data="builtin:series", model="stanhop"))
    code, out, err = command("runs")
    assert code == 0
    assert SHOWN in out
    assert quiet(out + err)


@pytest.mark.parametrize("terminal", [False, True])
def test_everything_that_is_said(terminal, capsys, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("COLUMNS", "300")
    console.print_table(EVIL, ("name", EVIL), [("a", EVIL)])
    console.say(EVIL, EVIL)
    console.say(EVIL, beside=True)
    console.print_json({EVIL: EVIL})
    console.print_error(f"{EVIL}\nand more")
    with console.progress(1) as tell:
        tell(f"[/]{EVIL}", 0)
    out, err = capsys.readouterr()
    assert json.loads(out[out.index("{") :]) == {EVIL: EVIL}
    assert out.count(SHOWN) == 5  # JSON has escapes of its own
    assert f"outeffhop: {SHOWN} and more\n" in err
    assert "\x1b[31m" not in out + err
    assert "\x9b" not in out + err
    assert "\u202e" not in out + err
    assert terminal or quiet(out + err)
