"""Self-contained HTML pages, with style and figures inside, for light and dark mode, desktops and phones."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Section", "breakable", "page", "picture", "table"]

_STYLE = """
:root { color-scheme: light dark; --text: #1d2129; --soft: #5c6470; --line: #dfe3e8;
  --ground: #fff; --card: #f6f7f9; --none: #e7eaee;
  --good: #116329; --bad: #b3261e; --open: #7a5b00; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7ec; --soft: #9aa3b0; --line: #333a44;
    --ground: #14171c; --card: #1d2128; --none: #2a3038;
    --good: #6fcf8b; --bad: #ff8a80; --open: #e3b341; --link: #79b8ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.2rem clamp(.8rem, 3vw, 2rem) 3rem; background: var(--ground);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .4rem 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .2rem 0 .8rem; max-width: 48rem; color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0; }
.facts div { background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .8rem; }
.facts dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.warning { border-left: .3rem solid #d1242f; background: var(--card); color: var(--text); padding: .6rem .8rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
table.heat { width: auto; border-collapse: separate; border-spacing: 2px; font-size: .75rem; }
table.heat th, table.heat td { border: 0; text-align: center; }
table.heat td { border-radius: .2rem; min-width: 3.1rem; padding: .2rem .3rem; print-color-adjust: exact; }
table.heat th { font-weight: 400; padding: .2rem .4rem .2rem 0; white-space: normal; max-width: 7rem;
  vertical-align: bottom; line-height: 1.2; }
table.heat th:first-child { position: sticky; left: 0; background: var(--ground); text-align: right; min-width: 8rem;
  max-width: min(24rem, 45vw); white-space: normal; overflow-wrap: anywhere; line-height: 1.2; }
table.heat tr + tr th { color: var(--text); }
table.heat .none { background: var(--none); }
table.heat .broken { background: #d1242f; color: #fff; }
@media (max-width: 40rem) {
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--ground); white-space: normal;
    overflow-wrap: anywhere; min-width: 8rem; max-width: 45vw; line-height: 1.25; }
}
a { color: var(--link); }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
td.best { font-weight: 700; }
td.second { text-decoration: underline; text-underline-offset: .15em; }
td.paper, th.paper { color: var(--soft); }
td.text, th.text { text-align: left; }
tr.parted td { border-top: 2px solid var(--line); }
.confirmed { color: var(--good); font-weight: 700; }
.contradicted { color: var(--bad); font-weight: 700; }
.open { color: var(--open); font-weight: 700; }
.printed { color: var(--link); font-weight: 700; }
table.verdicts td { white-space: normal; text-align: left; vertical-align: top; min-width: 5rem; }
table.verdicts th { text-align: left; }
table.verdicts td:first-child { min-width: 14rem; }
table.verdicts td:nth-child(3) { min-width: 16rem; color: var(--soft); }
summary { cursor: pointer; color: var(--link); padding: .3rem 0; }
.claims { list-style: none; margin: .6rem 0 1rem; padding: 0; }
.claims li { border-left: .25rem solid var(--line); margin: .45rem 0; padding: .1rem 0 .1rem .7rem; max-width: 60rem; }
.claims small { display: block; color: var(--soft); font-size: .85rem; }
table.results th { white-space: normal; vertical-align: bottom; min-width: 4.5rem; }
table.results td:first-child, table.results th:first-child { position: sticky; left: 0; background: var(--ground); }
figure { margin: 1rem 0; }
figure img { display: block; width: 100%; max-width: 60rem; height: auto; background: #fff; padding: .5rem;
  border-radius: .5rem; }
figcaption { color: var(--soft); font-size: .85rem; margin-top: .3rem; max-width: 48rem; }
pre { background: var(--card); border-radius: .4rem; padding: .5rem .7rem; margin: .3rem 0 .9rem; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
pre .flag { white-space: nowrap; }
.advice li { margin: .5rem 0; max-width: 60rem; overflow-wrap: anywhere; }
table.costs td { text-align: left; }
table.costs th { text-align: left; }
table.costs th, table.costs td { white-space: normal; padding: .3rem .5rem .3rem 0; vertical-align: top; }
table.costs td:first-child, table.costs th:first-child { white-space: nowrap; min-width: 0; position: static; }
.conditions { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
.conditions b { color: var(--text); font-weight: 600; }
@media print {
  :root { font-size: 11px; color-scheme: light; --text: #000; --soft: #444; --line: #bbb; --ground: #fff; --card: #fff;
    --none: #eee; --good: #116329; --bad: #b3261e; --open: #7a5b00; --link: #000; }
  body { max-width: none; padding: 0; font-size: 11px; }
  section, figure, tr, h2, h3 { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  details::details-content { content-visibility: visible; display: block; height: auto; }
  .wide { overflow: visible; }
  th, td { white-space: normal; padding: .15rem .3rem; }
}
"""


@dataclass(frozen=True)
class Section:
    """A part of a page: title and remark are plain text, the body is HTML.

    ``name`` is the target of links within the page.
    """

    title: str
    body: str
    remark: str = ""
    name: str = ""

    def __str__(self) -> str:
        remark = f"<p>{escape(self.remark)}</p>\n" if self.remark else ""
        name = f' id="{escape(self.name)}"' if self.name else ""
        return f"<section{name}>\n<h2>{escape(self.title)}</h2>\n{remark}{self.body}\n</section>"


def page(title: str, sections: Iterable[Section], head: str = "") -> str:
    """A whole page; ``head`` is HTML below the title."""
    body = "\n".join(map(str, sections))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{head}\n{body}\n</body>\n</html>\n"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain text in a table that scrolls sideways on a narrow page."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in _cells(row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>'


def picture(png: bytes, about: str, caption: str = "") -> str:
    """A PNG inside the page; ``about`` is for those who cannot see it."""
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    data = base64.b64encode(png).decode()
    return f'<figure><img alt="{escape(about)}" src="data:image/png;base64,{data}">{said}</figure>'


def breakable(name: str) -> str:
    """A name as HTML that may go on in the next line after a point, a colon, a slash or an underscore."""
    parts = re.split(r"(?<=[.:_/])(?=[^\s.:_/])", name)  # before it is escaped, which makes letters of signs
    return "<wbr>".join(map(escape, parts))


def _cells(row: Sequence[str]) -> list[str]:
    """The cells as HTML; the first one is a name."""
    return [breakable(cell) if i == 0 else escape(cell) for i, cell in enumerate(row)]
