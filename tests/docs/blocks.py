"""The fenced blocks of README and docs, and what a reader who follows them does.

A comment before a block says what is special about it:

    <!-- not run: why -->     it is parsed only, since it needs what a test has not
    <!-- exit: 2 -->          the command ends with this code
    <!-- file: name -->       the block is what the reader puts into this file
    <!-- leaves: name -->     this file is there afterwards

A block of text after one that runs is what that one prints.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from outeffhop.cli import options
from outeffhop.cli.main import _COMMANDS, main

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    *sorted(p for p in ROOT.glob("*.md")),
    *sorted(p for p in (ROOT / "docs").rglob("*.md")),
    *sorted(p for p in (ROOT / "src").rglob("README.md")),
]
LANGUAGES = ("python", "sh", "text", "yaml")
NOTES = ("not run", "exit", "file", "leaves")
FENCE = re.compile(r"^```(.*?)\n(.*?)^```$", re.S | re.M)
NOTE = re.compile(r"<!-- ([\w ]+): (.*?) -->")
SHELL = re.compile(r"[&|;$<>]|^(?!outeffhop |$)", re.M)  # what only a shell can do
NUMBER = re.compile(r"[+-]?\d[\d,]*\.?\d*(e[+-]?\d+)?")
ELSEWHERE = re.compile(r"\d (seconds|minutes|hours)")  # how long a run takes is the machine's affair
MODULE = ["-m", "outeffhop.cli.main"]


@dataclass
class Block:
    language: str
    text: str
    place: str
    notes: dict[str, str] = field(default_factory=dict)
    shown: str | None = None


def blocks(page: str, name: str = "page") -> list[Block]:
    """The blocks of a page's text; one of text that follows another is what that one shows."""
    found, end = [], 0
    for match in FENCE.finditer(page):
        between = page[end : match.start()]
        notes = dict(NOTE.findall(between))
        place = f"{name}:{page.count(chr(10), 0, match.start()) + 1}"
        assert notes.keys() <= set(NOTES), f"{place}: a note is one of {NOTES}"
        end = match.end()
        if match[1] == "text" and found and not NOTE.sub("", between).strip() and found[-1].shown is None:
            found[-1].shown = match[2]
        else:
            found.append(Block(match[1], match[2], place, notes))
    return found


def commands(text: str) -> list[list[str]]:
    """A shell block's commands, word by word."""
    lines = text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def without_numbers(text: str) -> list[str]:
    """Lines without their numbers, which differ from machine to machine, and without alignment."""
    return [" ".join(NUMBER.sub("#", ELSEWHERE.sub("0 time", line)).split()) for line in text.splitlines()]


class Reader:
    """Follows a page block after block, in an empty folder that is the working directory."""

    def __init__(self) -> None:
        self.names: dict[str, object] = {"__name__": "page"}

    def follow(self, page: str, name: str = "page") -> None:
        for block in blocks(page, name):
            assert block.language in LANGUAGES, f"{block.place}: the language of a block is one of {LANGUAGES}"
            if "file" in block.notes:
                Path(block.notes["file"]).write_text(block.text)
            elif "not run" in block.notes:
                self.parse(block)
            elif block.language == "python":
                self.run_python(block)
            elif block.language == "sh":
                self.run_commands(block)
            else:
                raise AssertionError(f"{block.place}: {block.language} that nothing prints and no file holds")
            left = block.notes.get("leaves")
            assert left is None or Path(left).is_file(), f"{block.place} did not leave {left}"

    def parse(self, block: Block) -> None:
        if block.language == "python":
            compile(block.text, block.place, "exec")
        elif block.language == "sh":
            for words in commands(block.text):
                parse_command(words, block.place)

    def run_python(self, block: Block) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, block.place, "exec"), self.names)
        assert printed.getvalue() == (block.shown or ""), f"{block.place} prints\n{printed.getvalue()}"

    def run_commands(self, block: Block) -> None:
        code, printed = _in_shell(block.text) if SHELL.search(block.text.replace("\\\n", " ")) else _here(block.text)
        assert code == int(block.notes.get("exit", 0)), f"{block.place} ends with {code}\n{printed}"
        assert "Traceback" not in printed, f"{block.place}\n{printed}"
        assert block.shown is not None, f"{block.place}: no output is shown"
        found = without_numbers(printed)
        for line in without_numbers(block.shown):
            assert line in found or line == "…", f"{block.place}: {line!r} is not printed\n{printed}"


def _here(text: str) -> tuple[int, str]:
    """Our commands in this process, which has imported everything already."""
    printed, code = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        for words in commands(text):
            try:
                code = main(words[1:])
            except SystemExit as end:
                code = int(end.code or 0)
    return code, printed.getvalue()


def _in_shell(text: str) -> tuple[int, str]:
    here = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": here, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def parse_command(words: list[str], place: str) -> None:
    """Holds a command line that is not run to what it names: our flags, targets, extras, files."""
    program, *arguments = words
    if program == "outeffhop":
        parse_arguments(arguments)
    elif program == "torchrun":
        at = next(i for i in range(len(arguments)) if arguments[i : i + 2] == MODULE)
        parse_arguments(arguments[at + 2 :])
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M), f"{place}: no target {arguments}"
    elif program == "pip":
        for extra in re.findall(r"\[(\w+)\]", " ".join(arguments)):
            assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.M), f"{place}: no {extra}"
    elif program.endswith("python"):
        assert (ROOT / arguments[0]).is_file(), f"{place}: no file {arguments[0]}"
    else:
        raise AssertionError(f"{place}: cannot tell whether {program} is right")


def parse_arguments(arguments: list[str]) -> None:
    """Reads a command line of ours as the command would, and does nothing; ValueError where it is wrong."""
    name, *rest = arguments
    if name in ("--help", "--version"):
        return
    options.parse_train(rest) if name == "train" else options.parse(_COMMANDS[name][0], name, rest)
