"""Figures in one style: a method has the same colour everywhere, from a palette for colour-blind readers too."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from outeffhop._io import write_whole
from outeffhop._naming import require

__all__ = [
    "COLOURS",
    "MARKERS",
    "colour",
    "empty",
    "in_palette",
    "legend",
    "logarithmic",
    "marker",
    "new",
    "png",
    "save",
    "shades",
]

# Okabe and Ito's palette
COLOURS = {
    "vanilla": "#000000",
    "outeffhop": "#0072B2",
    "clipped": "#E69F00",
    "clipped-outeffhop": "#56B4E9",
    "gated": "#D55E00",
    "gated-outeffhop": "#009E73",
    "dense": "#000000",
    "sparse": "#CC79A7",
    "gsh": "#8A6D00",
    "polynomial": "#999999",
}
MARKERS = dict(zip(COLOURS, "os^vDPoXd<", strict=True))


def colour(method: str) -> str:
    """The colour of a method, whatever its parameters and however it was trained ("vanilla, penalty 0.1")."""
    return COLOURS.get(re.split(r"[(,]", method)[0], "#666666")


def marker(method: str) -> str:
    return MARKERS.get(method.split("(")[0], "o")


def shades(count: int, ordered: bool) -> list[Any]:
    """Colours of lines that are no methods: from dark to light where they have an order, else as unlike as can be."""
    require("matplotlib")
    from matplotlib import colormaps

    distinct = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
    if ordered or count > len(distinct):
        return [colormaps["viridis"](0.85 * i / max(count - 1, 1)) for i in range(count)]
    return list(distinct[:count])


def empty(width: float, height: float, layout: Any = "constrained") -> Any:
    """A figure without axes.

    About 9 inches wide it fills a page's width, and text of 10 points can be read there.
    """
    require("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # not pyplot, which keeps every figure in memory and needs a display
    figure = Figure(figsize=(width, height), layout=layout)
    FigureCanvasAgg(figure)
    return figure


def legend(figure: Any, marks: Mapping[str, Any], columns: int = 4) -> None:
    """Says above the panels what every mark means.

    Args:
        marks: meaning → the artist, or the options of a Line2D that looks like it.
    """
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **mark) if isinstance(mark, Mapping) else mark for mark in marks.values()]
    figure.legend(handles, marks.keys(), loc="outside upper center", ncols=columns, frameon=False)


def new(width: float = 9.0, height: float = 4.0, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes."""
    figure = empty(width, height)
    axes = figure.subplots(rows, columns)
    for axis in figure.axes:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def logarithmic(axis: Any, side: str) -> None:
    """Puts the x or y axis of a panel on a logarithmic scale, with plain numbers at its ticks.

    Call it after everything is drawn. An axis without positive values stays linear.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    ruler = getattr(axis, f"{side}axis")
    if not math.isfinite(ruler.get_minpos()):
        return
    getattr(axis, f"set_{side}scale")("log")
    low, high = ruler.get_view_interval()
    ruler.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)))
    ruler.set_major_formatter("{x:g}")
    ruler.set_minor_locator(NullLocator())


def save(figure: Any, folder: Path, name: str) -> None:
    """Writes ``NAME.png``."""
    write_whole(folder / f"{name}.png", png(figure))


def in_palette(picture: Any) -> Any:
    """A PIL image in 256 colours on white: a quarter of the bytes, and thin lines keep their colours."""
    from PIL import Image

    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return white.convert("RGB").quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


def png(figure: Any) -> bytes:
    """The figure as a PNG, on white so that a dark page can show it."""
    from matplotlib import __version__
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    software = PngInfo()
    software.add_text("Software", f"matplotlib {__version__}")
    small = BytesIO()
    in_palette(Image.open(drawn)).save(small, format="png", optimize=True, pnginfo=software)
    return small.getvalue()
