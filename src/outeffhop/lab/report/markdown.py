"""A result as Markdown, for the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from outeffhop.lab.paper.experiment import Result, Table, Verdict
from outeffhop.lab.paper.ranking import entry_text, ranks
from outeffhop.lab.paper.registry import NAMES
from outeffhop.lab.report.experiments_page import claim_groups

__all__ = ["claims_of", "markdown_of"]

_ENTRIES = 110  # a longer table is not for reading on a page
_MARKS = {1: "**{}**", 2: "<u>{}</u>"}


def markdown_of(result: Result, folder: str, remark: str = "") -> str:
    """A section of a page: figures first, then the conditions, claims and tables, folded.

    Args:
        folder: of the figures, ``NAME.png``, relative to the page.
        remark: Markdown that follows the first sentence.
    """
    said = "; ".join(f"{_plain(k)}: {_plain(v)}" for k, v in result.conditions.items())
    command = f"`outeffhop reproduce {result.name}`; " if result.name in NAMES else ""
    tables = [table for table in result.tables if len(table.rows) * len(table.columns) <= _ENTRIES]
    left = "" if len(tables) == len(result.tables) else "Longer tables are in the result file and the HTML report."
    parts = [
        f"## {_plain(result.of)}",
        f"{_plain(result.about)}",
        remark.strip(),
        *(
            f"![{_plain(f.title)}]({folder}/{f.name}.png)\n\n*{_plain(f.title)}. {_plain(f.caption)}*"
            for f in result.figures
        ),
        "<details markdown>\n<summary>Conditions and tables</summary>",
        f"{command}{said}.",
        *map(_table, tables),
        left,
        "</details>",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def claims_of(results: Mapping[str, Sequence[Result]]) -> str:
    """Tables of the claims that can be judged, in two parts, with the verdict, numbers and seeds.

    ``results`` are by the scale they are of. A claim judged at several scales is shown once, with the most seeds;
    claims of one seed and claims that were not measured are only counted.
    """
    best: dict[tuple[str, str], Verdict] = {}
    order: dict[str, Result] = {}
    for several in results.values():
        for result in several:
            order.setdefault(result.name, result)
            for v in result.verdicts:
                kept = best.get((result.name, v.claim))
                if kept is None or (_weight(v) >= _weight(kept)):
                    best[result.name, v.claim] = v
    open_ = Counter("one seed" if v.seeds == 1 else "not measured" for v in best.values() if not _judged(v))
    parts = []
    for title, part in claim_groups(order.values()).items():
        names = {result.name: result.of for result in part}
        rows = [(names[n], v) for (n, _), v in best.items() if n in names and _judged(v)]
        counts = Counter(str(v.verdict) for _, v in rows)
        said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        lines = ["| claim | verdict | numbers | seeds | of the paper |", "| --- | --- | --- | --- | --- |"]
        for of, v in rows:
            entries = (v.claim, v.verdict, v.numbers, "none" if v.seeds is None else v.seeds, of)
            lines.append(f"| {' | '.join(map(_plain, entries))} |")
        parts.append(f"### {title}\n\n{len(rows)} claims: {said}.\n\n" + "\n".join(lines))
    left = " and ".join(
        f"{count} with {word}" if word == "one seed" else f"{count} {word}" for word, count in open_.items()
    )
    return "\n\n".join(parts) + (f"\n\nNot in these tables: {left}.\n" if left else "\n")


def _judged(v: Verdict) -> bool:
    return v.verdict != "not measured" and v.seeds != 1


def _weight(v: Verdict) -> float:
    return -1 if v.verdict == "not measured" else 0 if v.seeds is None else v.seeds


def _table(table: Table) -> str:
    marks = ranks(table)
    lines = [
        [_plain(column) for column in table.columns],
        ["---"] * len(table.columns),
        *(
            [_MARKS.get(marks.get((i, j), 0), "{}").format(_plain(entry_text(entry))) for j, entry in enumerate(row)]
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
