"""One flag means one thing: its value, its default and its help are the same in every command, or a reason is given.

What is compared is what a user reads, the help of every command.
"""

import re
import subprocess
import sys
from collections import defaultdict

import pytest

from outeffhop.cli.main import _COMMANDS, main

# Why a flag differs between commands; ``train`` has most of its own under --train and --samples.
MEASURING = ("evaluate", "diagnose", "outliers", "quantize")
REASONS = {
    "--batch-size": "by default as many samples as the work of the command takes memory; a step of mend is one batch",
    "--batches": "by default all where it is cheap, few where every scheme is measured",
    "--calibration-batches": "by default few where every scheme is calibrated; quantize draws them anew for each seed",
    "--data": "by default the run's own, in diagnose else built-in; train and mend need some; reproduce has a folder",
    "--device": "fine-tuning runs on cpu or cuda; a checkpoint is measured on any device",
    "--length": "fine-tuned models are given longer texts than measured ones",
    "--method": "mend keeps that of the checkpoint by default",
    "--out": "which files are written there, and whether it must be new",
    "--resume": "a run, or a mending",
    "--seeds": "calibration draws, or trained models",
    "--task": "that of the checkpoint by default; that of the data in data and train",
    "--teacher": "a model without a head is its own teacher in mend, and --init is it in train",
    "--tokenizer": "reproduce may also train one, or take one from the hub",
    "--dry-run": "a run's config and its cost, or an experiment's settings",
}
# of the flags above, those that also take another kind of value
KINDS_DIFFER = {"--data", "--device", "--tokenizer"}
ENTRY = re.compile(r"(?:-h, )?(?P<flag>--[a-z][\w.-]*)(?: (?P<value>\S.*?))?(?:  +(?P<help>.*))?")


def flags(command, capsys, monkeypatch):
    """Of every flag in the help of a command: what it takes, and what is said about it with its default."""
    monkeypatch.setenv("COLUMNS", "100")  # at most: a wide terminal has two columns
    with pytest.raises(SystemExit) as caught:
        main([command, "--help-all"])
    assert caught.value.code == 0
    found, last = {}, None
    for line in capsys.readouterr().out.splitlines():
        line = line.removeprefix("│").removeprefix(" ").removesuffix("│").rstrip()
        entry = ENTRY.fullmatch(line.removeprefix(" ")) if line.removeprefix(" ").startswith("-") else None
        if entry is not None:
            last = entry["flag"]
            found[last] = [(entry["value"] or "").strip(), entry["help"] or ""]
        elif last is not None and line.startswith("    "):
            found[last][1] = f"{found[last][1]} {line.strip()}".strip()
        else:
            last = None
    return found


@pytest.fixture
def every(capsys, monkeypatch):
    """Flag → what it takes and what is said → the commands that have it so."""
    found = defaultdict(lambda: defaultdict(set))
    for command in _COMMANDS:
        for flag, (value, help_of_it) in flags(command, capsys, monkeypatch).items():
            assert help_of_it, f"{flag} of {command} has no help"
            found[flag][value, help_of_it].add(command)
    return found


def test_a_flag_means_the_same_in_every_command(every):
    assert {"--data", "--out", "--json", "--batches", "--train.seed", "--samples.length"} <= every.keys()
    assert set().union(*every["--json"].values()) == set(_COMMANDS)  # all of the help was read
    differ = {flag for flag, meanings in every.items() if len(meanings) > 1}
    assert differ == REASONS.keys()


def test_it_takes_the_same_kind_of_value(every):
    plain = {"STR", "{None}|STR"}  # how the parser itself shows those of train
    kinds = {flag: {value for value, _ in meanings} - plain for flag, meanings in every.items()}
    assert {flag for flag, taken in kinds.items() if len(taken) > 1} == KINDS_DIFFER


def test_the_commands_that_measure_a_checkpoint_differ_in_defaults_alone(every):
    for flag in ("--length", "--tokenizer", "--task", "--dtype", "--device", "--trust-remote-code", "--json"):
        assert any(set(MEASURING) <= commands for commands in every[flag].values()), flag


def test_help_imports_nothing_heavy():
    """Nor does a wrong flag: torch alone takes seconds."""
    code = """
import sys
from outeffhop.cli.main import _COMMANDS, main
for command in [[], *([name] for name in _COMMANDS)]:
    for words in (["--help"], ["--help-all"], ["--nothing"]):
        try:
            main([*command, *words])
        except SystemExit:
            pass
print("HEAVY", *({"torch", "numpy", "transformers", "matplotlib", "datasets"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "HEAVY"
