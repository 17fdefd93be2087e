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
import torch
from torch import Tensor

from outeffhop.memory import HopfieldMemory, plot_energy

BETA = 8.0
PANELS = {"Dense": "vanilla", "OutEffHop, one Ω (n = 1)": "outeffhop", "OutEffHop, n = 40": "outeffhop(n=40)"}


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
    jacobian = torch.autograd.functional.jacobian(lambda x: memory(x).state, origin)
    return float(torch.linalg.eigvalsh(jacobian).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="energy_landscape.png", help="the figure (default %(default)s)")
    arguments = parser.parse_args()
    memories = {title: HopfieldMemory(stored(), BETA, method) for title, method in PANELS.items()}
    panels = plot_energy(memories, queries(), edge=1.45)
    print(f"{'model':34} {'eigenvalue at x = 0':>20} {'queries that end there':>23}")
    for axes, (title, memory) in zip(panels, memories.items(), strict=True):
        largest, rest = attraction(memory), memory.retrieve(queries(), None).state
        axes.set_title(f"{title}\nx = 0 {'attracts' if largest < 1 else 'repels'}: eigenvalue {largest:.2f}")
        print(f"{title:34} {largest:20.2f} {int((rest.norm(dim=1) < 0.2).sum()):>16} of {len(rest)}")
    panels[0].figure.savefig(arguments.out, dpi=150, bbox_inches="tight")
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
