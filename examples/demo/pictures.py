"""The pictures of the demo's page, as PNG files in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from recall import Recall
from training import MENDED, METHODS, Found

# Okabe and Ito's palette, as in the library's figures
COLOURS = dict(zip((*METHODS, MENDED), ("#000000", "#0072B2", "#009E73", "#D55E00"), strict=True))
SHOWN = 32  # the first symbols of a sequence, in the maps of attention


def growth(found: Sequence[Found]) -> bytes:
    """The largest |x| over training: a line for each seed. Mending goes on where softmax ends."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axis = figure.subplots()
    end = max(each.steps[-1] for each in found if each.name != MENDED)
    for name, colour in COLOURS.items():
        of_name = [each for each in found if each.name == name]
        for i, each in enumerate(of_name):
            steps = np.array(each.steps) + (end if name == MENDED else 0)
            axis.plot(steps, each.curve, color=colour, label=None if i else name, linewidth=1.6)
    axis.axvline(end, color="#999999", linewidth=0.8, linestyle=":")
    axis.set(xlabel="training steps", ylabel="largest |x|", ylim=(0, None))
    axis.legend(frameon=False)
    return _png(figure)


def copies(found: Sequence[Found]) -> bytes:
    """How many symbols after a trigger are right, in floating point and in 8 bits: a dot for each seed."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    axis = figure.subplots()
    for row, (name, colour) in enumerate(COLOURS.items()):
        of_name = [each for each in found if each.name == name]
        axis.plot([e.copies for e in of_name], [row - 0.15] * len(of_name), "o", mfc="white", mec=colour, ms=8)
        axis.plot([e.copies8 for e in of_name], [row + 0.15] * len(of_name), "o", color=colour, ms=8)
    axis.plot([], [], "o", mfc="white", mec="#555555", label="in floating point")
    axis.plot([], [], "o", color="#555555", label="in 8 bits")
    axis.set_yticks(range(len(COLOURS)), list(COLOURS))
    axis.set(xlabel="symbols after a trigger that are right, %", ylim=(len(COLOURS) - 0.5, -0.5))
    axis.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _png(figure)


def attention(found: Sequence[Found], triggers: int) -> bytes:
    """One head of each model, of one seed: what each symbol attends to, and how much goes to nothing."""
    figure = Figure(figsize=(7.2, 7.6), layout="constrained")
    for axis, each in zip(figure.subplots(2, 2).flat, found, strict=True):
        head = each.maps[looks_back(each, triggers)][:SHOWN, :SHOWN]
        nothing = 1 - each.maps[looks_back(each, triggers)].sum(-1)[:SHOWN]
        picture = np.full((SHOWN, SHOWN + 3), np.nan)
        picture[:, :2], picture[:, 3:] = nothing[:, None], np.where(np.tri(SHOWN) > 0, head, np.nan)
        axis.imshow(picture, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        for row in np.flatnonzero(_is_trigger(each.ids[:SHOWN], triggers)):
            axis.plot(SHOWN + 3.5, row, marker="<", color="#D55E00", markersize=5, clip_on=False)
        axis.set_title(each.name, color=COLOURS[each.name], fontsize=11)
        axis.set_xticks([0.5, 3], ["nothing", "start"], rotation=90)
        axis.set_yticks([])
        axis.spines[:].set_visible(False)
        axis.set_ylabel("each symbol, first to last")
    return _png(figure)


def looks_back(each: Found, triggers: int) -> tuple[int, int]:
    """The layer and head that attend most, from triggers, to the symbol before."""
    rows = np.flatnonzero(_is_trigger(each.ids, triggers))
    back = each.maps[:, :, rows, rows - 1].mean(-1)  # [layers, heads]
    layer, head = np.unravel_index(back.argmax(), back.shape)
    return int(layer), int(head)


def memory(answers: Recall) -> bytes:
    """Queries above, answers below."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    lines = {"asked": answers.queries, "softmax\nanswers": answers.softmax, "softmax1\nanswers": answers.outeffhop}
    grid = figure.subplots(len(lines), len(answers.names))
    for (name, images), row in zip(lines.items(), grid, strict=True):
        for image, axis in zip(images, row, strict=True):
            axis.imshow(image, cmap="gray_r", vmin=-0.2, vmax=0.3)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
    for axis, name in zip(grid[0], answers.names, strict=True):
        axis.set_title(name, fontsize=11)
    for axis, share in zip(grid[-1], answers.nothing, strict=True):
        axis.set_xlabel(f"nothing: {100 * share:.0f} %", fontsize=10)
    return _png(figure)


def _is_trigger(ids: np.ndarray, triggers: int) -> np.ndarray:
    return (ids > 0) & (ids <= triggers)


def _png(figure: Any) -> bytes:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    drawn = BytesIO()
    figure.savefig(drawn, format="png", dpi=150, facecolor="white")
    return drawn.getvalue()
