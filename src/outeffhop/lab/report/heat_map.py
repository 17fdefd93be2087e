"""A heat map as an HTML table: each cell shows its value and is coloured by it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape

from outeffhop._naming import require

__all__ = ["heat_map"]


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
    """Scrolls sideways on a narrow page, while the names of the rows stay in view.

    Args:
        rows, columns: their names.
        values: a number for each row and column; None leaves a cell empty, a number that is not finite is red.
        low, high: the ends of the colour scale; by default the smallest and the largest value.
        logarithmic: colours by the logarithm, for values > 0 that differ by factors.
        corner: what the columns are, if their names do not say it.
        write: formats a number for its cell.
    """
    known = [v for row in values for v in row if v is not None and math.isfinite(v)]
    ends = (min(known, default=0.0) if low is None else low, max(known, default=1.0) if high is None else high)
    head = "".join(f'<th scope="col">{_breakable(column)}</th>' for column in columns)
    lines = [f"<tr><th>{escape(corner)}</th>{head}</tr>"]
    for name, row in zip(rows, values, strict=True):
        cells = "".join(
            _cell(value, ends, logarithmic, write, f"{name}, {f'{corner} {column}'.strip()}")
            for column, value in zip(columns, row, strict=True)
        )
        lines.append(f'<tr><th scope="row">{_breakable(name)}</th>{cells}</tr>')
    body = "\n".join(lines)
    return f'<div class="wide"><table class="heat">\n{body}\n</table></div>'


def _breakable(name: str) -> str:
    """A name that may go on in the next line after a point, a colon or an underscore."""
    return re.sub(r"([.:_])", r"\1<wbr>", escape(name))


def _cell(
    value: float | None, ends: tuple[float, float], logarithmic: bool, write: Callable[[float], str], place: str
) -> str:
    if value is None:
        return f'<td class="none" title="{escape(place)}: none"></td>'
    title = f'title="{escape(place)}: {value}"'
    if not math.isfinite(value):
        return f'<td class="broken" {title}>{value}</td>'
    fill, ink = _colours(_share(value, *ends, logarithmic))
    return f'<td style="background: {fill}; color: {ink}" {title}>{escape(write(value))}</td>'


def _share(value: float, low: float, high: float, logarithmic: bool) -> float:
    """Where a value lies between the ends, in [0, 1]."""
    if logarithmic:
        value, low, high = (math.log(max(v, 1e-12)) for v in (value, low, high))
    return 0.0 if high <= low else min(1.0, max(0.0, (value - low) / (high - low)))


def _colours(share: float) -> tuple[str, str]:
    """A colour of matplotlib's viridis, and an ink that can be read on it."""
    require("matplotlib")
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    red, green, blue, _ = colormaps["viridis"](share)
    bright = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5
    return to_hex((red, green, blue)), "#111111" if bright else "#ffffff"
