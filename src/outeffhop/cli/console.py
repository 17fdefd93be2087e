"""How commands speak: tables for people, JSON for programs, errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_json", "print_table", "print_error"]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table as wide as the terminal; plain aligned lines where the output is not one."""
    rows = [list(map(str, row)) for row in rows]
    if not sys.stdout.isatty():
        widths = [max(len(line[i]) for line in [list(columns), *rows]) for i in range(len(columns))]
        print(title)
        for line in [list(columns), *rows]:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def print_error(message: object) -> None:
    print(f"outeffhop: {message}", file=sys.stderr)
