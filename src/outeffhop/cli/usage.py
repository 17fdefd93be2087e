"""What is wrong with a command line, said in one line as every other error is.

The parser draws a box of several lines. Its words are read here, and those of the usual mistakes are put in order: the
flag, the value it had and what would be right.
"""

from __future__ import annotations

import ast
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from difflib import get_close_matches

from outeffhop._naming import did_you_mean

__all__ = ["in_one_line", "one_line_errors"]

_KINDS = {"INT": "a whole number", "FLOAT": "a number", "FLOAT FLOAT": "two numbers"}
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_WIDTH = "100000"  # no line is broken, not even a long path


@contextmanager
def one_line_errors(command: str) -> Iterator[None]:
    """Raises a ValueError of one line where the parser would print its box and exit with 2."""
    said, width = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _WIDTH
    try:
        with redirect_stderr(said):
            yield
    except SystemExit as ended:
        if ended.code != 2:
            raise
        raise ValueError(in_one_line(said.getvalue(), command)) from None
    finally:
        os.environ.pop("COLUMNS")
        if width is not None:
            os.environ["COLUMNS"] = width
    sys.stderr.write(said.getvalue())


def in_one_line(box: str, command: str) -> str:
    """What a box says; all of its words, if it is of a kind that is not known here."""
    problem, more = _parts(box)
    text = " ".join(line.strip() for line in problem)
    for pattern, say in _SAID.items():
        found = re.fullmatch(pattern, problem[0] if problem else "")
        if found is not None:
            text = say(found, [*problem[1:], *more])
            break
    end = " See" if text.endswith(("?", ".")) else "; see"
    return f"{text}{end} outeffhop {command} --help"


def _parts(box: str) -> tuple[list[str], list[str]]:
    """The lines of a box above its first rule, and those below."""
    lines = _COLOUR.sub("", box).splitlines()
    inner = [line[2:-1].rstrip() for line in lines if line.startswith("│")]
    if not inner:  # where the terminal knows no such lines: a title, a rule, and an indentation
        inner = [line[2:].rstrip() for line in lines if line.startswith("  ")] or lines or [""]
    rule = next((i for i, line in enumerate(inner) if line and not line.strip("─-")), len(inner))
    return [line for line in inner[:rule] if line], inner[rule:]


def _unknown(found: re.Match[str], below: list[str]) -> str:
    words = found["words"].split(", ")
    flags = [word for word in words if word.startswith("-")] or words
    offered = sorted({line.split()[0] for line in below if line.startswith("    --")})
    closest = [match for flag in flags for match in get_close_matches(flag, offered, n=1, cutoff=0.5)]
    near = dict.fromkeys(closest) or offered  # the parser's own order changes from run to run
    return f"unknown option: {', '.join(flags)}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _missing(_: re.Match[str], below: list[str]) -> str:
    names = [line.strip() for line in below if re.match(r" {4}\S", line) and "--help" not in line]
    at = below.index("Unrecognized options:") if "Unrecognized options:" in below else len(below)
    unknown = [line.strip() for line in below[at:] if line.strip() in names]
    flags = [word for word in unknown if word.startswith("-")]
    missing = ", ".join(names[: len(names) - len(unknown)])
    return f"missing: {missing}" + (f"; unknown option: {', '.join(flags)}" if flags else "")


def _wrong_kind(found: re.Match[str], _: list[str]) -> str:
    kinds = [kind.strip("{}") for kind in found["kinds"].split("|") if kind != "{None}"]
    given = " ".join(map(str, ast.literal_eval(found["given"])))
    return f"{found['flag']}={given!r}: must be {' or '.join(_KINDS.get(kind, kind) for kind in kinds)}"


def _no_number(found: re.Match[str], _: list[str]) -> str:
    kind = "INT" if "int()" in found["why"] else "FLOAT"
    return f"{found['flag']}={found['given']}: must be {_KINDS[kind]}"


def _no_choice(found: re.Match[str], _: list[str]) -> str:
    choices = sorted(choice for choice in ast.literal_eval(found["choices"]) if choice != "None")
    near = did_you_mean(found["given"], choices)
    return f"{found['flag']}={found['given']!r} is unknown{near} Available: {', '.join(choices)}"


_SAID: dict[str, Callable[[re.Match[str], list[str]], str]] = {
    r"Unrecognized options: (?P<words>.*)": _unknown,
    r"Missing from .*:": _missing,
    r"Error parsing (?P<flag>\S+): no type matching (?P<kinds>.+?) could be instantiated from (?P<given>\[.*\])\.": (
        _wrong_kind
    ),
    r"Error parsing (?P<flag>\S+): (?P<why>invalid literal for int\(\)|could not convert)[^:]*: (?P<given>.*)": (
        _no_number
    ),
    r"invalid choice '(?P<given>.*)' for argument '(?P<flag>\S+)'\. Expected one of (?P<choices>\(.*\))\.": _no_choice,
    r"Missing value for argument '(?P<flag>\S+)'.*": lambda found, _: f"{found['flag']} needs a value",
    r"Error parsing (?P<flag>\S+): Failed to parse key-value pairs!": (
        lambda found, _: f"{found['flag']} needs pairs of a name and a value"
    ),
}
