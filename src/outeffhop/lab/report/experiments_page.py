"""The page of all experiments: our numbers next to the paper's, figures, and a verdict on each claim."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from outeffhop._io import write_whole
from outeffhop.lab.paper.experiment import Figure, Result, Table, Verdict
from outeffhop.lab.paper.ranking import entry_text, ranks
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.result_file import read_all
from outeffhop.lab.paper.running import redraw
from outeffhop.lab.report.html import Section, page

__all__ = ["claim_groups", "experiments_page", "write_report"]

_FILE = "report.html"
_TITLE = "The paper's tables and figures, measured again"
_CLASSES = {1: "best", 2: "second"}
_VERDICTS = ("confirmed", "not seen", "contradicted", "not as printed", "not measured")
_THEORY = ("energy", "theory")  # about formulas; all other experiments are about what a user gains


def claim_groups(results: Mapping[str, Result]) -> dict[str, dict[str, Result]]:
    """The results, by title, in two parts without empty ones: what the method does for its users, and the theory."""
    parts: dict[str, dict[str, Result]] = {"What it does for you": {}, "The paper's theory": {}}
    for title, result in results.items():
        parts["The paper's theory" if result.name in _THEORY else "What it does for you"][title] = result
    return {name: part for name, part in parts.items() if part}


def write_report(out: Path, title: str = _TITLE) -> Path:
    """Writes one HTML file, ``out/report.html``, with every result in ``out/*.json``.

    The page needs no other file and no network. Figures that are missing are drawn again.
    """
    results = {path: kept.result for path, kept in read_all(out).items() if kept.result is not None}
    if not results:
        raise ValueError(f"out={str(out)!r} has no result yet: outeffhop reproduce writes them")
    folders = {path: out / path.stem for path in results}
    for path, result in results.items():
        drawn = all((folders[path] / f"{figure.name}.png").exists() for figure in result.figures)
        if path.stem in NAMES and not drawn:
            redraw(find(path.stem), path, folders[path])
    write_whole(out / _FILE, experiments_page({folders[path]: result for path, result in results.items()}, title))
    return out / _FILE


def experiments_page(results: dict[Path, Result], title: str = _TITLE) -> str:
    """The page of results in the paper's order; ``results`` maps the folder with the figures to the result."""
    order = {name: i for i, name in enumerate(NAMES)}
    chosen = sorted(results.items(), key=lambda item: (order.get(item[1].name, len(order)), item[1].name))
    sections = [Section(r.of, _body(r, folder), r.about, f"of-{r.name}") for folder, r in chosen]
    return page(title, sections, _summary([r for _, r in chosen]))


def _summary(results: Sequence[Result]) -> str:
    """The number of claims per verdict, and a table of every claim with a link to its section."""
    parts = []
    for title, group in claim_groups({r.name: r for r in results}).items():
        part = group.values()
        counts = Counter(str(v.verdict) for r in part for v in r.verdicts)
        boxes = "".join(f"<div><dt>{word}</dt><dd>{counts[word]}</dd></div>" for word in _VERDICTS if counts[word])
        rows = "\n".join(_row(r, v) for r in part for v in r.verdicts)
        head = "<tr><th>claim</th><th>verdict</th><th>numbers</th><th>seeds</th><th>of the paper</th></tr>"
        parts.append(
            f'<h2>{escape(title)}</h2>\n<dl class="facts">{boxes}</dl>\n'
            f'<div class="wide"><table class="verdicts">{head}\n{rows}</table></div>'
        )
    return (
        "<p>Every claim is judged by numbers measured at the scale stated in its section. “Not as printed” is about a "
        "formula that needs a correction, not about what the method does. In tables the best numbers are bold, the "
        "second best underlined, and numbers within their ± of each other share a mark; the paper's own numbers are "
        "next to ours.</p>\n" + "\n".join(parts)
    )


def _row(result: Result, verdict: Verdict) -> str:
    seeds = "" if verdict.seeds is None else str(verdict.seeds)
    link = f'<a href="#of-{escape(result.name)}">{escape(result.of)}</a>'
    cells = (escape(verdict.claim), _word(verdict), escape(verdict.numbers), seeds, link)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _word(verdict: Verdict) -> str:
    """The verdict in its colour: green or red for what was measured, neutral for a formula's misprint."""
    kinds = {"confirmed": "confirmed", "contradicted": "contradicted", "not as printed": "printed"}
    return f'<span class="{kinds.get(verdict.verdict, "open")}">{escape(verdict.verdict)}</span>'


def _claims(verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return ""
    lines = []
    for verdict in verdicts:
        said = "; ".join(filter(None, (verdict.numbers, verdict.seeds_said)))
        seen = f"<small>{escape(said)}</small>" if said else ""
        lines.append(f"<li>{_word(verdict)} {escape(verdict.claim)}{seen}</li>")
    return '<ul class="claims">' + "\n".join(lines) + "</ul>"


def _body(result: Result, folder: Path) -> str:
    said = "; ".join(f"<b>{escape(str(k))}</b> {escape(str(v))}" for k, v in result.conditions.items())
    command = f"<b>outeffhop reproduce {escape(result.name)}</b>; " if result.name in NAMES else ""
    parts = [f'<p class="conditions">{command}{said}</p>']
    if "mean nothing" in str(result.conditions.get("scale", "")):
        parts.append('<p class="warning">A trial run, cut down to seconds: these numbers mean nothing.</p>')
    parts += [_figure(figure, folder) for figure in result.figures]
    tables = "\n".join(map(_table, result.tables))
    details = _claims(result.verdicts) + tables
    if details:
        parts.append(f"<details><summary>Claims and tables</summary>\n{details}\n</details>")
    return "\n".join(filter(None, parts))


def _figure(figure: Figure, folder: Path) -> str:
    """A PNG inside the page, which looks the same in every browser."""
    try:
        data = base64.b64encode((folder / f"{figure.name}.png").read_bytes()).decode()
    except OSError:
        picture = f'<p class="warning">The figure {escape(figure.name)}.png is missing.</p>'
    else:
        picture = f'<img alt="{escape(figure.title)}" src="data:image/png;base64,{data}">'
    caption = f"{escape(figure.title)}. {escape(figure.caption)}"
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"


def _table(table: Table) -> str:
    marks = ranks(table)
    kinds = [_kinds(str(column), [row[j] for row in table.rows]) for j, column in enumerate(table.columns)]
    pairs = zip(table.columns, kinds, strict=True)
    head = "".join(f"<th{_classes(kind)}>{escape(str(column))}</th>" for column, kind in pairs)
    at = None if table.group is None else list(table.columns).index(table.group)
    rows, last = [f"<tr>{head}</tr>"], None
    for i, row in enumerate(table.rows):
        begins = at is not None and i > 0 and row[at] != last
        last = None if at is None else row[at]
        marked = [[_CLASSES[marks[i, j]]] if (i, j) in marks else [] for j in range(len(row))]
        cells = "".join(
            f"<td{_classes(marked[j] + kinds[j])}>{escape(entry_text(entry))}</td>" for j, entry in enumerate(row)
        )
        rows.append(f"<tr{_classes(['parted'] if begins else [])}>{cells}</tr>")
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    body = "\n".join(rows)
    return f'<h3>{escape(table.title)}</h3>{note}<div class="wide"><table class="results">\n{body}\n</table></div>'


def _kinds(column: str, entries: list[Any]) -> list[str]:
    """Classes of a column: words are aligned left and numbers right; the paper's numbers have a softer colour."""
    texts = [entry for entry in entries if entry is not None]
    words = bool(texts) and all(isinstance(text, str) and text[:1].isalpha() for text in texts)
    return ["paper"] * column.startswith("paper: ") + ["text"] * (words and not column.startswith("paper: "))


def _classes(names: list[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""
