"""The energy landscape of three patterns, without and with no-op patterns (the paper's Figure 1).

    python examples/energy_landscape.py --out energy_landscape.png

Left, the dense model: every query falls to a pattern. Middle, OutEffHop with one no-op pattern Ω: the energy is
flatter around the no-op point, x = 0, but that is not a minimum yet. Right, one Ω for each of 40 outliers (lse_K): the
no-op point has its own basin, and queries that resemble no pattern fall into it. The table shows this in one
number: the largest eigenvalue of T's Jacobian at the no-op point, which attracts if it is below 1.
"""

from __future__ import annotations

import argparse
import math

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.contour import QuadContourSet
from torch import Tensor

from outeffhop.memory import HopfieldMemory

BETA, EDGE = 8.0, 1.45
# Okabe and Ito's colours, which people with any colour vision can tell apart
ORANGE, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
PANELS = {
    "vanilla": "Dense",
    "outeffhop": "OutEffHop, one Ω (n = 1)",
    "outeffhop(n=40)": "OutEffHop, 40 outliers (n = 40)",
}


def stored() -> Tensor:
    """Three patterns on the unit circle, so that their mean, T(0) of the dense model, is 0 too."""
    angle = torch.tensor([90.0, 210.0, 330.0], dtype=torch.float64).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], 1)


def queries() -> Tensor:
    """One near each pattern, and a ring around the no-op point."""
    near = stored() * 1.25 + torch.tensor([[0.3, 0.0], [0.1, -0.25], [0.0, 0.3]], dtype=torch.float64)
    angle = torch.arange(6, dtype=torch.float64) * (math.pi / 3) + 0.35
    return torch.cat([near, 0.42 * torch.stack([angle.cos(), angle.sin()], 1)])


def attraction(memory: HopfieldMemory) -> float:
    """The largest eigenvalue of T's Jacobian at x = 0."""
    origin = torch.zeros(2, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: memory.retrieve(x).state, origin)
    return float(torch.linalg.eigvalsh(jacobian).max())


def trajectories(memory: HopfieldMemory, x: Tensor) -> Tensor:
    """Every state on the way to rest.  [T + 1, Q, 2]"""
    states = [x]
    for _ in range(int(memory.retrieve(x, None, tol=1e-6).steps.max())):
        states.append(memory.retrieve(states[-1]).state)
    return torch.stack(states)


def draw(axes: Axes, memory: HopfieldMemory, levels: Tensor) -> QuadContourSet:
    line = torch.linspace(-EDGE, EDGE, 201, dtype=torch.float64)
    x, y = torch.meshgrid(line, line, indexing="xy")
    height = memory.energy(torch.stack([x, y], -1))
    surface = axes.contourf(x, y, height - height.min(), levels, cmap="cividis", extend="max")
    axes.contour(x, y, height - height.min(), levels, colors="white", linewidths=0.4, alpha=0.6)
    for path in trajectories(memory, queries()).unbind(1):
        no_op = bool(path[-1].norm() < 0.2)
        axes.plot(*path.T, color=ORANGE if no_op else SKY, lw=1.8, marker="o", ms=3, zorder=3)
        axes.plot(*path[0], marker="o", ms=6, mfc="white", mec=BLACK, zorder=4)
    axes.plot(*memory.patterns.T, ls="", marker="*", ms=17, mfc=SKY, mec=BLACK, zorder=5)
    axes.plot(0, 0, marker="D", ms=8, mfc=ORANGE, mec=BLACK, zorder=5)
    axes.set(aspect="equal", xlim=(-EDGE, EDGE), ylim=(-EDGE, EDGE), xticks=[-1, 0, 1], yticks=[-1, 0, 1])
    return surface


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="energy_landscape.png", help="the figure (default %(default)s)")
    arguments = parser.parse_args()
    figure, panels = plt.subplots(1, 3, figsize=(13, 5.2), layout="constrained", sharey=True)
    levels = torch.linspace(0, 0.6, 25)
    print(f"{'model':34} {'eigenvalue at x = 0':>20} {'queries that end there':>23}")
    for axes, (method, title) in zip(panels, PANELS.items(), strict=True):
        memory = HopfieldMemory(stored(), BETA, method)
        surface = draw(axes, memory, levels)
        largest, rest = attraction(memory), memory.retrieve(queries(), None, tol=1e-6).state
        ended = int((rest.norm(dim=1) < 0.2).sum())
        axes.set_title(title, fontsize=13)
        axes.set_xlabel(f"x₁\nno-op point {'attracts' if largest < 1 else 'repels'}: eigenvalue {largest:.2f}")
        print(f"{title:34} {largest:20.2f} {ended:>16} of {len(rest)}")
    panels[0].set_ylabel("x₂")
    bar = figure.colorbar(surface, ax=panels, shrink=0.8, pad=0.01, ticks=[0.0, 0.2, 0.4, 0.6])
    bar.set_label("energy above its minimum")
    handles = [
        plt.Line2D([], [], ls="", marker="*", ms=15, mfc=SKY, mec=BLACK, label="pattern ξ"),
        plt.Line2D([], [], ls="", marker="D", ms=8, mfc=ORANGE, mec=BLACK, label="no-op point"),
        plt.Line2D([], [], ls="", marker="o", ms=6, mfc="white", mec=BLACK, label="query"),
        plt.Line2D([], [], color=SKY, lw=2, marker="o", ms=3, label="retrieves a pattern"),
        plt.Line2D([], [], color=ORANGE, lw=2, marker="o", ms=3, label="retrieves nothing (no-op)"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(arguments.out, dpi=150)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
