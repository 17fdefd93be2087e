"""A result as Markdown, for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outeffhop.lab.paper.experiment import Result, Table, Verdict
from outeffhop.lab.paper.ranking import ranks
from outeffhop.lab.paper.registry import NAMES
from outeffhop.lab.report.experiments_page import text_of

__all__ = ["claims_of", "markdown_of"]

_MARKS = {1: "**{}**", 2: "<u>{}</u>"}


def markdown_of(result: Result, folder: str) -> str:
    """A section of a page: claims, figures and tables.

    Args:
        folder: of the figures, ``NAME.png``, relative to the page.
    """
    said = "; ".join(f"{_plain(k)}: {_plain(v)}" for k, v in result.conditions.items())
    command = f"`outeffhop reproduce {result.name}`; " if result.name in NAMES else ""
    parts = [
        f"## {_plain(result.of)}",
        f"{_plain(result.about)}",
        f"{command}{said}.",
        _claims(result.verdicts),
        *(
            f"![{_plain(f.title)}]({folder}/{f.name}.png)\n\n*{_plain(f.title)}. {_plain(f.caption)}*"
            for f in result.figures
        ),
        *map(_table, result.tables),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def claims_of(results: Mapping[str, Sequence[Result]]) -> str:
    """A table of every claim with its verdict and the seeds behind it; ``results`` by the scale they are of."""
    judged = [(scale, result, v) for scale, several in results.items() for result in several for v in result.verdicts]
    counts = Counter(str(v.verdict) for _, _, v in judged)
    lines = ["| of the paper | scale | claim | verdict | seeds |", "| --- | --- | --- | --- | --- |"]
    for scale, result, v in judged:
        seeds = v.seeds if v.seeds is not None else result.conditions.get("seeds", "none")
        entries = (result.of, scale, v.claim, v.verdict, "" if v.verdict == "not measured" else seeds)
        lines.append(f"| {' | '.join(map(_plain, entries))} |")
    said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
    return f"{len(judged)} claims: {said}.\n\n" + "\n".join(lines) + "\n"


def _claims(verdicts: Sequence[Verdict]) -> str:
    return "\n".join(
        f"- **{v.verdict}**{f' ({v.seeds_said})' if v.seeds_said else ''}: {_plain(v.claim)}"
        + (f": {_plain(v.numbers)}" if v.numbers else "")
        for v in verdicts
    )


def _table(table: Table) -> str:
    marks = ranks(table)
    lines = [
        [_plain(column) for column in table.columns],
        ["---"] * len(table.columns),
        *(
            [_MARKS.get(marks.get((i, j), 0), "{}").format(_plain(text_of(entry))) for j, entry in enumerate(row)]
            for i, row in enumerate(table.rows)
        ),
    ]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"### {_plain(table.title)}\n\n" + (f"{_plain(table.note)}\n\n" if table.note else "") + rows


def _plain(value: Any) -> str:
    """Text with the characters escaped that Markdown or HTML would interpret."""
    escaped = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_|[]":
        escaped = escaped.replace(sign, f"\\{sign}")
    return " ".join(escaped.split())
