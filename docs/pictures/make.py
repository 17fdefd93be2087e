"""The pictures of the home page and docs/concepts.md, made by the package itself.

    python docs/pictures/make.py --out docs/pictures

``energy.png`` and ``digits.png`` are what two of the examples draw; ``activations.png`` shows
benchmarks/results/activations.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from matplotlib.collections import LineCollection
from PIL import Image

from outeffhop.functional import softmax_n
from outeffhop.lab.paper import drawing
from outeffhop.methods import Method

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
FROM_EXAMPLES = {"energy.png": "energy_landscape.py", "digits.png": "retrieve_digits.py"}
MEASURED = Path(__file__).parent.parent.parent / "benchmarks" / "results"
KEYS = 16
ROWS = {"one key fits": [4.0, 1.0, 0.5, 0.0, -0.5, -1.0], "nothing fits": [-4.0, -4.5, -5.0, -5.0, -5.5, -6.0]}
METHODS = ("vanilla", "outeffhop", "clipped(gamma=-0.1)", "clipped-outeffhop(gamma=-0.1)", "gsh(alpha=1.5)", "sparse")


def no_op(folder: Path) -> None:
    """The attention that reaches the keys, all of which score the same."""
    score = torch.linspace(-10, 6, 161)
    figure, axis = drawing.new(7.0, 3.4)
    for n, style in ((0, "-"), (1, "-"), (4, "--"), (16, ":")):
        given = softmax_n(score[:, None].expand(-1, KEYS), float(n)).sum(-1)
        name = {0: "softmax, n = 0", 1: "softmax1, n = 1"}.get(n, f"n = {n}")
        axis.plot(score, given, style, lw=2, color=drawing.colour("outeffhop" if n else "vanilla"), label=name)
    axis.set(xlabel=f"score of each of {KEYS} keys", ylabel="weight of all keys together", ylim=(-0.03, 1.06))
    axis.legend(frameon=False, loc="center left")
    _save(figure, folder, "no-op")


def methods(folder: Path) -> None:
    """The weights of two rows of scores by the normalizer of each method."""
    figure, axes = drawing.new(9.0, 4.2, len(METHODS), len(ROWS))
    for first, line, (title, scores) in zip((True, False), axes, ROWS.items(), strict=True):
        for axis, name in zip(line, METHODS, strict=True):
            method = Method.parse(name)
            weights = method.normalizer(torch.tensor(scores))
            axis.bar(range(len(scores)), weights.tolist(), color=drawing.colour(name))
            axis.set(ylim=(0, 1.05), xticks=[], yticks=[0, 1])
            axis.grid(visible=False)
            axis.set_xlabel(f"sum {float(weights.sum()):.2f}", fontsize=10)
            if first:
                axis.set_title(method.name.replace("-", "-\n"), fontsize=10)
        line[0].set_ylabel(f"{title}\nweight")
    _save(figure, folder, "methods")


def activations(folder: Path) -> None:
    """|x| after one block of a language model, by token and channel, before and after mending."""
    measured = json.loads((MEASURED / "activations.json").read_text())
    grids = {when: torch.tensor(measured[when]) for when in ("before", "after")}
    top = float(grids["before"].max())
    figure = plt.figure(figsize=(9.5, 4.0))
    for place, (when, grid) in enumerate(grids.items()):
        axis: Any = figure.add_subplot(1, 2, place + 1, projection="3d")
        tokens, groups = grid.shape
        channels = torch.arange(groups) * measured["channels_joined"]
        rows = [list(zip(channels.tolist(), row.tolist(), strict=True)) for row in grid]
        colour = drawing.colour("vanilla" if when == "before" else "outeffhop")
        # the last tokens first, so that nearer ones cover them
        axis.add_collection3d(LineCollection(rows[::-1], colors=colour, linewidths=0.8), range(tokens)[::-1], zdir="y")
        axis.set(xlim=(0, int(channels[-1])), ylim=(0, tokens), zlim=(0, top))
        axis.set(xticks=[0, 250, 500], yticks=[0, 20, 40], zticks=range(0, int(top), 10_000))
        axis.set_xlabel("channel", labelpad=5, fontsize=13)
        axis.set_ylabel("token", labelpad=5, fontsize=13)
        axis.tick_params(labelsize=13, pad=-1)
        axis.tick_params(axis="z", pad=9)
        axis.zaxis.set_major_formatter("{x:,.0f}")
        axis.set_title(f"{when} mending: up to {float(grid.max()):,.0f}", fontsize=15, y=0.97)
        axis.view_init(elev=22, azim=-58)
        axis.set_box_aspect((1.25, 1.0, 0.8), zoom=0.98)
    figure.suptitle(f"|activations| after block {measured['layer']} of {measured['model']}", fontsize=15, y=0.98)
    figure.subplots_adjust(left=0.0, right=0.94, bottom=0.04, top=0.9, wspace=0.06)
    figure.savefig(folder / "activations.png", dpi=160)
    _shrink(folder / "activations.png")


def _save(figure: mpl.figure.Figure, folder: Path, name: str) -> None:
    # without a date and with a fixed salt, so that the same numbers make the same file
    with mpl.rc_context({"svg.hashsalt": name}):
        figure.savefig(folder / f"{name}.svg", facecolor="white", metadata={"Date": None})


def _shrink(file: Path) -> None:
    """To the width of a page and a palette: a fraction of the bytes."""
    picture = Image.open(file).convert("RGB")
    picture.thumbnail((1300, 1300))
    drawing.in_palette(picture).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder (default: this one)")
    folder = parser.parse_args().out
    no_op(folder)
    methods(folder)
    activations(folder)
    for name, example in FROM_EXAMPLES.items():
        command = [sys.executable, str(EXAMPLES / example), "--out", str(folder / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        _shrink(folder / name)


if __name__ == "__main__":
    main()
