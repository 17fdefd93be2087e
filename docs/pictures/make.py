"""The pictures of the home page and docs/concepts.md, made by the package itself.

    python docs/pictures/make.py --out docs/pictures

``energy.png`` and ``digits.png`` are what two of the examples draw; ``mended.svg`` shows figures of benchmarks/results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import torch
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


def mended(folder: Path) -> None:
    """Two checkpoints before and after `outeffhop mend`: their outliers, and what is left of them in W8A8."""
    language = json.loads((MEASURED / "mend-smollm2-cpu.json").read_text())
    sentence = json.loads((MEASURED / "mend-minilm.json").read_text())["summary"]
    before, after = (language[when] for when in ("as it came", "after 130 steps"))
    came, now = sentence["as it came"], sentence["mended"]
    panels = {
        "SmolLM2-135M\nlargest |activation|": (before["max_inf_norm"], after["max_inf_norm"]),
        "SmolLM2-135M\nperplexity in 8 bits": (before["W8A8 linear"], after["W8A8 linear"]),
        "MiniLM-L6\nlargest |activation|": (came["max_inf_norm"], now["max_inf_norm"]),
        "MiniLM-L6\nerror in 8 bits": tuple(10 ** (-row["linear"]["sqnr_db"] / 20) for row in (came, now)),
    }
    figure, axes = drawing.new(9.5, 3.2, len(panels))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        bars = axis.bar(("before", "after"), values, width=0.65, color=("#666666", drawing.colour("outeffhop")))
        texts = [f"{v:.0%}" if v < 1 else f"{v:.1f}" if v < 100 else f"{v:,.0f}" for v in values]
        axis.bar_label(bars, texts, padding=2, fontsize=12)
        axis.set_title(title, fontsize=12)
        axis.set(yticks=[], ylim=(0, 1.15 * max(values)))
        axis.tick_params(labelsize=12, length=0)
        axis.spines["left"].set_visible(False)
        axis.grid(visible=False)
    _save(figure, folder, "mended")


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
    mended(folder)
    for name, example in FROM_EXAMPLES.items():
        command = [sys.executable, str(EXAMPLES / example), "--out", str(folder / name)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        _shrink(folder / name)


if __name__ == "__main__":
    main()
