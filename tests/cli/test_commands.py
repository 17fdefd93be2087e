"""The command line as a user meets it: output, JSON, errors, exit codes."""

import json
import subprocess
import sys

import pytest

from outeffhop import __version__
from outeffhop.cli.main import main
from outeffhop.methods import METHODS
from outeffhop.models import presets
from outeffhop.ops.dispatch import BACKENDS


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "outeffhop", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert __version__ in done.stdout


def test_a_reader_that_leaves_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "outeffhop", "methods"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 141)


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in (__version__, "torch", "cpu", "chosen", *BACKENDS):
        assert word in out


def test_doctor_json(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    backends = report["attention"]["cpu"]["backends"]
    assert report["attention"]["cpu"]["auto"] == "cpu"
    assert backends["cpu"]["serves"]
    assert backends["cpu"]["largest_error"] < 1e-5
    assert not backends["cudnn"]["serves"]
    assert "cuda" in backends["cudnn"]["why_not"]


def test_methods(capsys):
    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == list(METHODS)


def test_one_method(capsys):
    assert main(["methods", "outeffhop(n=4)", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "outeffhop(n=4)"
    assert found["parameters"] == {"n": 4.0, "sink": "fixed", "qk_norm": "none"}
    assert found["choices"] == {"sink": ["fixed", "learned"], "qk_norm": ["none", "rms"]}
    assert found["attention"] == "fused"


def test_presets(capsys):
    assert main(["presets"]) == 0
    out = capsys.readouterr().out
    for words in (
        "opt      paper  124.060M    124.069M  124.06M / 124.07M",
        "masked-LM head",
        "23 STHM blocks",
        "clipped(alpha=12)",
    ):
        assert words in out
    assert main(["presets", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["model"], r["size"]) for r in rows] == [(m, s) for m in presets.MODELS for s in presets.SIZES]


def test_wrong_method_is_exit_code_2(capsys):
    assert main(["methods", "outefhop"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "outeffhop: method='outefhop' is unknown; "
        "did you mean 'outeffhop' or 'gated-outeffhop' or 'clipped-outeffhop'? Available: vanilla, outeffhop, "
    )


def test_wrong_usage_is_exit_code_2(capsys):
    assert main([]) == 2
    assert "usage: outeffhop" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--nothing"])
    assert caught.value.code == 2


def test_an_unknown_command_is_told_the_nearest(capsys):
    assert main(["quantise"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "did you mean 'quantize'" in printed.err


COMMANDS = [
    "train",
    "resume",
    "runs",
    "evaluate",
    "diagnose",
    "outliers",
    "quantize",
    "mend",
    "reproduce",
    "data",
    "methods",
    "presets",
    "doctor",
]


def test_the_overview_names_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_begins_with_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 36
    assert any(f"Example: outeffhop {command}" in line for line in lines[:6])
