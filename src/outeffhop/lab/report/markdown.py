"""A result as Markdown, for the documentation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from outeffhop.lab.paper.experiment import Result, Table, Verdict
from outeffhop.lab.paper.ranking import entry_text, ranks
from outeffhop.lab.paper.registry import NAMES
from outeffhop.lab.report.experiments_page import claim_groups

__all__ = ["claims_of", "markdown_of"]

_ENTRIES = 75  # a longer table is not for reading on a page
_MARKS = {1: "**{}**", 2: "<u>{}</u>"}


def markdown_of(
    result: Result,
    folder: str,
    remark: str = "",
    title: str | None = None,
    without: Collection[str] = (),
    conditions: Collection[str] | None = None,
) -> str:
    """A section of a page: what it is about and the remark, then figures, tables and conditions, folded.

    Args:
        folder: of the figures, ``NAME.png``, relative to the page.
        remark: Markdown that follows the first sentence.
        title: of the section; by default the place in the paper.
        without: what is left out, by the titles of tables and the names of columns.
        conditions: the names of those to show; by default all.
    """
    shown = result.conditions if conditions is None else [k for k in result.conditions if k in conditions]
    said = [f"{_plain(k)}: {_plain(result.conditions[k])}" for k in shown]
    command = [f"`outeffhop reproduce {result.name}`"] if result.name in NAMES else []
    tables = [t for t in result.tables if len(t.rows) * len(_shown(t, without)) <= _ENTRIES and t.title not in without]
    parts = [
        f"## {_plain(title or result.of)}",
        f"{_plain(result.about)}",
        remark.strip(),
        "<details markdown>\n<summary>Figures and numbers</summary>",
        *(
            f"![{_plain(f.title)}]({folder}/{f.name}.png)" + (f"\n\n*{_plain(f.caption)}*" if f.caption else "")
            for f in result.figures
        ),
        *(_table(table, without) for table in tables),
        "; ".join([*command, *said]) + ".",
        "</details>",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def claims_of(results: Mapping[str, Result]) -> str:
    """Tables of the claims that can be judged, in two parts, with the verdict, numbers and seeds.

    ``results`` are by the title of their section, to which a claim links. A claim that several results judge is shown
    once, with the most seeds; claims of one seed and claims that were not measured are only counted.
    """
    best: dict[tuple[str, str], tuple[str, Verdict]] = {}
    for section, result in results.items():
        for v in result.verdicts:
            kept = best.get((result.name, v.claim))
            if kept is None or _weight(v) > _weight(kept[1]):
                best[result.name, v.claim] = (section, v)
    open_ = Counter("one seed" if v.seeds == 1 else "not measured" for _, v in best.values() if not _judged(v))
    parts = []
    for title, group in claim_groups(results).items():
        rows = [(section, v) for section, v in best.values() if section in group and _judged(v)]
        counts = Counter(str(v.verdict) for _, v in rows)
        said = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        lines = ["| claim | verdict | numbers | seeds |", "| --- | --- | --- | --- |"]
        for section, v in rows:
            entries = (v.verdict, v.numbers, "none" if v.seeds is None else v.seeds)
            lines.append(f"| [{_plain(v.claim)}](#{_anchor(section)}) | {' | '.join(map(_plain, entries))} |")
        table = "\n".join(['<div class="claims" markdown>\n', *lines, "\n</div>"])  # the site gives its columns a width
        parts.append(f"### {title}\n\n{len(rows)} claims: {said}.\n\n{table}")
    left = " and ".join(
        f"{count} with {word}" if word == "one seed" else f"{count} {word}" for word, count in open_.items()
    )
    return "\n\n".join(parts) + (f"\n\nNot in these tables: {left}.\n" if left else "\n")


def _anchor(title: str) -> str:
    """What a heading is linked by, on the site and on GitHub."""
    return re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-")


def _judged(v: Verdict) -> bool:
    return v.verdict != "not measured" and v.seeds != 1


def _weight(v: Verdict) -> float:
    return -1 if v.verdict == "not measured" else 0 if v.seeds is None else v.seeds


def _table(table: Table, without: Collection[str]) -> str:
    marks = ranks(table)
    shown = _shown(table, without)
    lines = [
        [_plain(table.columns[j]) for j in shown],
        ["---"] * len(shown),
        *(
            [_MARKS.get(marks.get((i, j), 0), "{}").format(_plain(entry_text(row[j]))) for j in shown]
            for i, row in enumerate(table.rows)
            if _measured(table, row)
        ),
    ]
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"### {_plain(table.title)}\n\n" + (f"{_plain(table.note)}\n\n" if table.note else "") + rows


def _shown(table: Table, without: Collection[str]) -> list[int]:
    """The columns on the page."""
    return [j for j, column in enumerate(table.columns) if column not in without]


def _measured(table: Table, row: Sequence[Any]) -> bool:
    """Whether a row has numbers of ours, not only names and the paper's numbers."""
    ours = [entry for column, entry in zip(table.columns, row, strict=True) if not column.startswith("paper: ")]
    return None not in ours or any(not isinstance(entry, str) or not entry[:1].isalpha() for entry in ours if entry)


def _plain(value: Any) -> str:
    """Text with the characters escaped that Markdown or HTML would interpret."""
    escaped = str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for sign in "\\`*_|[]":
        escaped = escaped.replace(sign, f"\\{sign}")
    return " ".join(escaped.split())
