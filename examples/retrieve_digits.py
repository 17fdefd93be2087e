"""Half-hidden digits, retrieved by every model side by side.

    python examples/retrieve_digits.py --out retrieve_digits.png

A hundred 8×8 digits are stored; a query shows the upper half of one. The last query is the negative of a digit,
unlike anything stored: models without a no-op pattern must answer with some digit all the same (the polynomial one,
blind to the sign, with a negative), OutEffHop answers with nothing. Below each answer is its squared error, summed
over pixels in [0, 1].
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from outeffhop.memory import HopfieldMemory

PATTERNS = 100
# A method and its β: sparse weights separate scores at a smaller β, and polynomial weights have an order instead of β.
MODELS = {
    "Dense": ("vanilla", 8.0),
    "OutEffHop": ("outeffhop", 8.0),
    "Sparse": ("sparse", 4.0),
    "GSH": ("gsh(alpha=1.5)", 6.0),
    "Polynomial": ("polynomial(order=30)", 1.0),
}


def load() -> tuple[Tensor, Tensor]:
    """The first digits of scikit-learn's set, pixels in [0, 1], and their labels.  [M, 64], [M]"""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from error
    pixels, labels = load_digits(return_X_y=True)
    return torch.tensor(pixels[:PATTERNS] / 16.0, dtype=torch.float32), torch.tensor(labels[:PATTERNS])


def hide_lower_half(images: Tensor) -> Tensor:
    """0 is the mean grey, so a hidden pixel counts neither for nor against any pattern."""
    visible = torch.ones(8, 8)
    visible[4:] = 0
    return images * visible.reshape(64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="retrieve_digits.png", help="the figure (default %(default)s)")
    arguments = parser.parse_args()
    rows, table, grey = compare()
    print(f"{'model':12} {'β':>4} {'mean squared error':>19} {'digits found':>13} {'no-op weight of the negative':>29}")
    for name, beta, error, found, no_op in table:
        print(f"{name:12} {beta:>4} {error:19.3f} {found:>13} {no_op:29.3f}")
    draw(rows, grey, arguments.out)
    print(f"written to {arguments.out}")


Rows = dict[str, tuple[Tensor, Tensor | None]]  # name → images and, of answers, their errors


def compare() -> tuple[Rows, list[tuple[str, str, float, str, float]], float]:
    """The answers of every model as images and as a table, and the mean grey that is subtracted from the images."""
    pixels, labels = load()
    grey = pixels.mean()
    patterns = pixels - grey
    shown = torch.stack([(labels == digit).nonzero()[0, 0] for digit in range(10)])
    targets = torch.cat([patterns[shown], torch.zeros(1, 64)])  # the right answer to the last query is nothing
    queries = torch.cat([hide_lower_half(patterns[shown]), -patterns[shown[:1]]])
    rows: Rows = {"wanted": (targets, None), "query": (queries, None)}
    table = []
    for name, (method, beta) in MODELS.items():
        memory = HopfieldMemory(patterns, beta, method)
        everyone = memory.retrieve(hide_lower_half(patterns)).state
        error = float((everyone - patterns).square().sum(1).mean())
        found = int((torch.cdist(everyone, patterns).argmin(1) == torch.arange(len(patterns))).sum())
        answer = memory.retrieve(queries)
        rows[name] = (answer.state, (answer.state - targets).square().sum(1))
        shown_beta = "" if method.startswith("polynomial") else f"{beta:g}"
        table.append((name, shown_beta, error, f"{found} of {len(patterns)}", float(answer.no_op[-1])))
    return rows, table, float(grey)


def draw(rows: Rows, grey: float, out: str | Path) -> None:
    columns = len(next(iter(rows.values()))[0])
    figure, grid = plt.subplots(len(rows), columns, figsize=(0.72 * columns + 1.0, 1.02 * len(rows)))
    for (name, (images, errors)), line in zip(rows.items(), grid, strict=True):
        for column, (image, axes) in enumerate(zip(images, line, strict=True)):
            axes.imshow(image.reshape(8, 8) + grey, cmap="gray_r", vmin=0, vmax=1)
            axes.set(xticks=[], yticks=[])
            if errors is not None:
                axes.set_xlabel(f"{errors[column]:.2f}", fontsize=10, labelpad=2)
        line[0].set_ylabel(name, fontsize=11, rotation=0, ha="right", va="center", labelpad=8)
    for digit, axes in enumerate(grid[0]):
        axes.set_title(str(digit) if digit < 10 else "nothing", fontsize=11)
    figure.suptitle("Half-hidden digits, one update (below each answer: its squared error)", fontsize=12)
    figure.tight_layout(pad=0.4, h_pad=0.5, w_pad=0.3, rect=(0, 0, 1, 0.985))
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
