"""Figure 1: the energy of a few patterns in the plane, and where its no-op point attracts.

The paper adds a dimension. In it the patterns have the coordinate 0 and the no-op pattern is Ω = (0, ..., 0, C), the
zero-energy point. Restricted to the original space, Ω contributes exp 0 = 1 to the sum, and its place is x = 0. Two
numbers describe such a point: how far one update moves it, and the largest eigenvalue of the update's Jacobian there.
It attracts if the first is 0 and the second below 1. It is then a minimum of the energy, because ∇²H = I − ∇T.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from outeffhop.lab.paper import drawing
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values, Verdict
from outeffhop.lab.paper.running import one_thread
from outeffhop.memory import HopfieldMemory, plot_energy

__all__ = ["EXPERIMENT"]

BETA, EDGE = 8.0, 1.45
NO_OPS = (0, 1, 4, 8, 10, 20, 40)  # n; 0 is the dense model
DRAWN = (0, 1, 40)
# angles of unit patterns: if they are evenly spread, the patterns sum to 0
PATTERNS = {"centred": (90.0, 210.0, 330.0), "one-sided": (90.0, 150.0, 30.0)}
LIFTED = 3.0  # C
AT_NO_OP = 0.2  # a query that ends this close to x = 0 has retrieved nothing


def stored(name: str) -> Tensor:
    angle = torch.tensor(PATTERNS[name], dtype=torch.float64).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], 1)


def memory_of(name: str, n: int) -> HopfieldMemory:
    return HopfieldMemory(stored(name), BETA, f"outeffhop(n={n})" if n else "vanilla")


def lifted(name: str) -> Values:
    """Where the dimension is kept: how far the fixed point next to Ω is away from it, and its eigenvalue."""
    flat = stored(name)
    omega = flat.new_tensor([0.0, 0.0, LIFTED])
    memory = HopfieldMemory(torch.cat([torch.nn.functional.pad(flat, (0, 1)), omega[None]]), BETA, "vanilla")
    rest = memory.retrieve(omega, None, tol=1e-12).state
    jacobian = torch.autograd.functional.jacobian(lambda x: memory.retrieve(x).state, rest)
    return {"moved": float((rest - omega).norm()), "eigenvalue": float(torch.linalg.eigvalsh(jacobian).max())}


def grid(points: int) -> Tensor:
    """Queries that cover the square the figure shows, row by row.  [points², 2]"""
    line = torch.linspace(-EDGE, EDGE, points, dtype=torch.float64)
    x, y = torch.meshgrid(line, line, indexing="xy")
    return torch.stack([x, y], -1).reshape(-1, 2)


def cells(settings: Settings) -> list[Cell]:
    points = 9 if settings.quick else 61
    return [
        Cell(f"{name}-n{n}", {"patterns": name, "n": n, "points": points, "beta": BETA})
        for name in PATTERNS
        for n in NO_OPS
    ]


@one_thread()
def measure(cell: Cell, settings: Settings) -> Values:
    memory = memory_of(cell.values["patterns"], cell.values["n"])
    origin = torch.zeros(2, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda x: memory.retrieve(x).state, origin)
    rest = memory.retrieve(grid(cell.values["points"]), None, tol=1e-9, max_steps=10_000)
    return {
        "moved": float(memory.retrieve(origin).state.norm()),
        "eigenvalue": float(torch.linalg.eigvalsh(jacobian).max()),
        "basin": float((rest.state.norm(dim=1) < AT_NO_OP).double().mean()),
        "unsettled": int((~rest.converged).sum()),
        "energy_rises": int((memory.energy(rest.state) > memory.energy(grid(cell.values["points"])) + 1e-12).sum()),
    }


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    draw(found, folder)
    rows = [
        [name, n, f["moved"], f["eigenvalue"], "yes" if attracts(f) else "no", f"{f['basin']:.1%}"]
        for name in PATTERNS
        for n in NO_OPS
        for f in [found[f"{name}-n{n}"]]
    ]
    columns = ["patterns", "no-op patterns n", "‖T(0)‖", "eigenvalue at 0", "attracts", "queries that end at 0"]
    note = f"Three unit patterns in the plane, β = {BETA:g}. n = 0 is the dense model, n = 1 the paper's softmax1."
    return EXPERIMENT.result(
        [Table("The no-op point x = 0", columns, rows, note=note)],
        [
            Figure(
                "energy",
                "Energy landscape of three patterns",
                "Queries in the no-op region retrieve nothing: they come to rest with most of their weight on the "
                "no-op patterns. A dot is an update.",
            ),
            Figure(
                "no-op",
                "When the no-op point attracts",
                "Left: the largest eigenvalue of the update's Jacobian at x = 0; right: how far an update moves x = 0.",
            ),
        ],
        verdicts(found),
        {"patterns": "three unit vectors, at " + "; ".join(f"{k}: {v}°" for k, v in PATTERNS.items()), "β": BETA},
    )


def attracts(values: Values) -> bool:
    return bool(values["moved"] < 1e-9 and values["eigenvalue"] < 1)


def verdicts(found: dict[str, Values]) -> list[Verdict]:
    one, side = found["centred-n1"], found["one-sided-n1"]
    above = {name: lifted(name) for name in PATTERNS}
    minimum = all(v["eigenvalue"] < 1 and v["moved"] < 1e-6 for v in above.values())
    many = [n for n in NO_OPS if n and attracts(found[f"centred-n{n}"])]
    last = NO_OPS[-1]
    rises = sum(values["energy_rises"] for values in found.values())
    unsettled = sum(values["unsettled"] for values in found.values())
    least = f"from n = {min(many)} on" if many else "for none of the n tried"
    return [
        Verdict(
            "The zero-energy point Ω is a local minimum in the space with the added dimension",
            "confirmed" if minimum else "contradicted",
            f"C = {LIFTED:g}, β = {BETA:g}: the minimum is "
            + ", ".join(f"{v['moved']:.1g} from Ω, eigenvalue {v['eigenvalue']:.1g} ({n})" for n, v in above.items())
            + f". In the original space x = 0 is not one: eigenvalue {one['eigenvalue']:.2f} (centred), "
            f"moved by {side['moved']:.2f} (one-sided)",
        ),
        Verdict(
            "With many no-op patterns (lse_K) the no-op point attracts",
            "confirmed" if many else "contradicted",
            f"centred: {least}; at n = {last}, {found[f'centred-n{last}']['basin']:.1%} of queries end there. "
            f"One-sided: x = 0 still moves by {found[f'one-sided-n{last}']['moved']:.3f}, and "
            f"{found[f'one-sided-n{last}']['basin']:.1%} of queries end within {AT_NO_OP:g} of it",
        ),
        Verdict(
            "Retrieval lowers the energy and comes to rest",
            "confirmed" if rises == unsettled == 0 else "contradicted",
            f"{rises} queries ended at a higher energy, {unsettled} did not come to rest",
        ),
    ]


def draw(found: dict[str, Values], folder: Path) -> None:
    angle = torch.arange(8, dtype=torch.float64) * (math.pi / 4) + 0.35
    ring = torch.stack([angle.cos(), angle.sin()], 1)
    figure = drawing.empty(9.5, 7.4, "compressed")
    memories = {_title(name, n, found[f"{name}-n{n}"]): memory_of(name, n) for name in PATTERNS for n in DRAWN}
    plot_energy(memories, torch.cat([0.4 * ring, 1.3 * ring]), edge=EDGE, columns=len(DRAWN), figure=figure)
    drawing.save(figure, folder, "energy")

    figure, axes = drawing.new(9.0, 3.6, 2)
    parts = {"eigenvalue": "largest eigenvalue of ∇T(0)", "moved": "‖T(0)‖"}
    for ax, (what, label) in zip(axes, parts.items(), strict=True):
        for name, colour, style in zip(PATTERNS, ("#56B4E9", "#0072B2"), ("-o", "--s"), strict=True):
            values = [found[f"{name}-n{n}"][what] for n in NO_OPS]
            ax.plot(NO_OPS, values, style, color=colour, lw=5 if style == "-o" else 1.5, label=name)
        ax.set(xlabel="no-op patterns, n", ylabel=label, ylim=(0, None))
    axes[0].axhline(1.0, color="#D55E00", lw=1, label="below: x = 0 attracts, if it is fixed")
    axes[0].legend(title="patterns", frameon=False)
    drawing.save(figure, folder, "no-op")


def _title(name: str, n: int, values: Values) -> str:
    word = "attracts" if attracts(values) else "is not a fixed point" if values["moved"] >= 1e-9 else "repels"
    return f"{f'OutEffHop, n = {n}' if n else 'Dense'}; {name}\nx = 0 {word}"


EXPERIMENT = Experiment(
    "energy",
    "Figure 1",
    "The energy landscape of three patterns in the plane, with its no-op point: where that attracts, and where not.",
    cells,
    measure,
    conclude,
)
