"""The command line as a user meets it: output, JSON, errors, exit codes."""

import json
import os
import subprocess
import sys

import pytest

from outeffhop import __version__
from outeffhop.cli.main import _COMMANDS, main
from outeffhop.cli.usage import in_one_line
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


def test_without_a_command_it_shows_the_usage(capsys):
    assert main([]) == 2
    assert "usage: outeffhop" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("doctor --nothing", "unknown option: --nothing; see outeffhop doctor --help"),
        ("quantize x --bachtes 3", "unknown option: --bachtes; did you mean --batches? See outeffhop quantize --help"),
        ("mend a --data d --out o --stps 3 --minuts 4", "--stps, --minuts; did you mean --steps or --minutes?"),
        ("evaluate", "missing: CHECKPOINT; see outeffhop evaluate --help"),
        ("outliers a", "missing: --out FOLDER; see"),
        ("mend a --stps 3 b", "missing: --data SPEC, --out FOLDER; unknown option: --stps; see"),
        ("quantize x --seeds y", "--seeds='y': must be a whole number; see"),
        ("quantize x --batches y", "--batches='y': must be a whole number; see"),
        ("mend a --data d --out o --lr high", "--lr='high': must be a number; see"),
        ("train --train.betas 1 x", "--train.betas='1 x': must be two numbers; see"),
        ("train --train.eval-steps now", "--train.eval-steps='now': must be a whole number or epoch; see"),
        ("train --changes dropout", "--changes needs pairs of a name and a value; see"),
        (
            "quantize x --scheme papr",
            "--scheme='papr' is unknown; did you mean 'paper'? Available: fp8, linear, paper,",
        ),
        (
            "mend a --data d --out o --device tpu",
            "--device='tpu' is unknown; did you mean 'cpu'? Available: cpu, cuda;",
        ),
        ("diagnose x --batches", "--batches needs a value; see"),
        (f"diagnose x --batches {'y' * 300}", f"--batches='{'y' * 300}': must be a whole number; see"),
    ],
)
@pytest.mark.parametrize("width", ["40", None])
def test_wrong_usage_is_said_in_one_line(command, says, width, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    if width is not None:
        monkeypatch.setenv("COLUMNS", width)
    assert main(command.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("outeffhop: ")
    assert printed.err.count("\n") == 1
    assert says in printed.err
    assert os.environ.get("COLUMNS") == width


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("before", [False, True])
def test_every_command_suggests_a_flag_for_one_that_is_nearly_right(command, before, capsys):
    needed = {"evaluate", "diagnose", "outliers", "quantize", "mend", "resume"} & {command}
    words = [*(["--jsno"] if before else []), *(["somewhere"] if needed else []), *([] if before else ["--jsno"])]
    more = {"outliers": ["--out", "a"], "mend": ["--data", "a", "--out", "b"]}.get(command, [])
    assert main([command, *words, *more]) == 2
    assert capsys.readouterr().err.startswith("outeffhop: unknown option: --jsno; did you mean --json")


def test_a_box_of_an_unknown_kind_keeps_its_words():
    """In a terminal of UTF-8, in another one, and where it is no box."""
    box = "╭─ New ─────╮\n│ Something │\n│   new.    │\n│ ───────── │\n│ help      │\n╰───────────╯\n"
    assert in_one_line(box, "train") == "Something new. See outeffhop train --help"
    box = " New\n -----------\n  Something\n    new.\n  ---------\n  help\n\n"
    assert in_one_line(box, "train") == "Something new. See outeffhop train --help"
    assert in_one_line("no box at all", "train") == "no box at all; see outeffhop train --help"


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
