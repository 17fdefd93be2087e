"""How commands speak: tables for people, JSON for programs, progress and errors beside them on stderr.

Whatever is said may hold a name from somebody's file. So all of it passes through ``printable`` here, and a control
character in it never reaches the terminal.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from outeffhop._naming import printable

__all__ = ["print_error", "print_json", "print_table", "progress", "say", "speaks"]


def speaks() -> bool:
    """Whether results are this process's to print: of those torchrun started, the first one's."""
    return os.environ.get("RANK", "0") == "0"


def say(*lines: object, beside: bool = False) -> None:
    """Prints lines; an empty one without any.

    Args:
        beside: on stderr, as progress is.
    """
    print("\n".join(map(printable, lines)), file=sys.stderr if beside else sys.stdout, flush=beside)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as the terminal; plain aligned lines where the output is not one. Empty columns are no header."""
    title, columns = printable(title), list(map(printable, columns))
    rows = [list(map(printable, row)) for row in rows]
    named = any(columns)
    if not sys.stdout.isatty():
        lines = [columns, *rows] if named else rows
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))] if lines else []
        print(title)
        for line in lines:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(box=None, pad_edge=False, show_header=named, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(title, style="italic", markup=False, highlight=False)  # as a title of the table's it would wrap to it
    console.print(table, markup=False)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on stderr, so that what is printed stays clean; lines where it is not a terminal.

    What it yields is told what is at work and how much of ``total`` is done.
    """
    if not sys.stderr.isatty():
        tenth = max(1, total // 10)
        yield lambda text, done: say(text, beside=True) if done % tenth == 0 else None
        return
    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, done: bar.update(task, description=printable(text), completed=done)


def print_error(message: object) -> None:
    """One line, however many the message has."""
    one = " ".join(str(message).split("\n"))
    say(f"outeffhop: {one}", beside=True)
