"""Figures as SVG text, which takes its letters' colours from the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

__all__ = ["heat_map"]

_CELL, _ROW, _LETTER = 46, 24, 6.4  # a cell's width and height, a letter's width, in pixels


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[float | None]],
    *,
    low: float | None = None,
    high: float | None = None,
    logarithmic: bool = False,
    corner: str = "",
    write: Callable[[float], str] = "{:.3g}".format,
) -> str:
    """Cells coloured by their value, which stands in them; on a narrow page the figure scrolls.

    Args:
        rows, columns: their names.
        values: a number for each row and column; None leaves a cell empty, a number that is not finite is marked red.
        low, high: the ends of the scale; by default those of the values.
        logarithmic: colours by the logarithm, for values > 0 that differ by factors.
        corner: what the columns are.
        write: a number as it stands in its cell.
    """
    known = [v for row in values for v in row if v is not None and math.isfinite(v)]
    low = min(known, default=0.0) if low is None else low
    high = max(known, default=1.0) if high is None else high
    left = 14 + _LETTER * max(map(len, [*rows, corner]), default=0)
    width, height = left + _CELL * len(columns), 20 + _ROW * len(rows)
    parts = [f'<text class="tick" x="{left - 8:.0f}" y="14" text-anchor="end">{escape(corner)}</text>']
    for j, column in enumerate(columns):
        x = left + _CELL * (j + 0.5)
        parts.append(f'<text class="tick" x="{x:.0f}" y="14" text-anchor="middle">{escape(column)}</text>')
    for i, row in enumerate(rows):
        y = 20 + _ROW * i
        parts.append(f'<text class="name" x="{left - 8:.0f}" y="{y + 16}" text-anchor="end">{escape(row)}</text>')
        for j, column in enumerate(columns):
            value = values[i][j]
            title = f"{row}, {corner} {column}: {'none' if value is None else value}"
            parts.append(_cell(left + _CELL * j, y, value, _share(value, low, high, logarithmic), title, write))
    size = f'width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}"'
    return f'<div class="wide"><svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(parts)}</svg></div>'


def _share(value: float | None, low: float, high: float, logarithmic: bool) -> float | None:
    """Where a value stands between the ends, in [0, 1]."""
    if value is None or not math.isfinite(value):
        return None
    if logarithmic:
        tiny = 1e-12
        value, low, high = (math.log(max(v, tiny)) for v in (value, low, high))
    return 0.0 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))


def _cell(
    x: float, y: float, value: float | None, share: float | None, title: str, write: Callable[[float], str]
) -> str:
    box = f'x="{x + 1:.1f}" y="{y + 1}" width="{_CELL - 2}" height="{_ROW - 2}" rx="3"'
    if value is None:
        return f'<rect class="none" {box}><title>{escape(title)}</title></rect>'
    if share is None:
        fill, ink, text = "#d1242f", "#fff", str(value)
    else:
        fill, ink = _colour(share)
        text = write(value)
    return (
        f'<g><title>{escape(title)}</title><rect fill="{fill}" {box}/>'
        f'<text fill="{ink}" x="{x + _CELL / 2:.1f}" y="{y + 16}" text-anchor="middle">{escape(text)}</text></g>'
    )


def _colour(share: float) -> tuple[str, str]:
    """Of matplotlib's viridis, and an ink that can be read on it."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    red, green, blue, _ = colormaps["viridis"](share)
    bright = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5
    return to_hex((red, green, blue)), "#111" if bright else "#fff"
