"""Pictures of a memory: its energy in a plane, and what queries retrieve from it.

Both make a figure of ``matplotlib.pyplot`` and return its panels: ``plt.show()`` shows it, ``panels[0].figure.savefig``
writes it. A query retrieves nothing if the no-op patterns have more than half of the weight in its last update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outeffhop._naming import require
from outeffhop.memory.arguments import check_queries
from outeffhop.memory.energy import why_no_energy
from outeffhop.memory.hopfield_memory import HopfieldMemory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_energy", "plot_retrieval"]

# Okabe and Ito's colours, which people with any colour vision can tell apart
_PATTERN, _NOTHING, _OTHERS = "#56B4E9", "#E69F00", "#C8C8C8"
_POINTS = 161  # of the grid, along each side
_READABLE = 40  # queries
_QUERIES = ("query", "query, projected")  # in the plane, or beside it
_PATHS = {False: "its updates, to patterns", True: "its updates, to nothing"}


def plot_energy(
    memory: HopfieldMemory | Mapping[str, HopfieldMemory],
    queries: Tensor | None = None,
    *,
    plane: tuple[int, int] | None = None,
    edge: float | None = None,
    highest: float | None = None,
    columns: int = 3,
    figure: Figure | None = None,
) -> list[Axes]:
    """Maps the energy in a plane, with the patterns, the no-op point and region, and the paths that queries take.

    The no-op region is where queries retrieve nothing, once they are at rest.

    Args:
        memory: one memory, or title → memory for panels with the same scale and colours.
        queries: [Q, d], drawn with each of their updates until they are at rest.
        plane: of a memory of size 3 or more, two indices of ``patterns``: the plane through these and x = 0, by default
            (0, 1). Patterns outside of it are left out; queries are drawn where they project to.
        edge: the picture goes from −edge to edge; by default all that is drawn has room.
        highest: the top of the colour scale, as an energy above the minimum; by default 85 % of the picture lie
            below it.
        columns: panels in a row.
        figure: an empty figure to draw into, which should have ``layout="compressed"``.
    """
    memories = memory if isinstance(memory, Mapping) else {f"{_checked(memory).method}, β = {memory.beta:g}": memory}
    frames = {title: _Frame(_checked(each), plane) for title, each in memories.items()}
    if not frames:
        raise ValueError("memory={}: give at least one memory")
    if edge is None:
        edge = max(frame.reach(queries) for frame in frames.values())
    line = torch.linspace(-edge, edge, _POINTS, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)  # [P, P, 2]
    heights = [frame.memory.energy(frame.lift(grid)).double().cpu() for frame in frames.values()]
    heights = [height - height.min() for height in heights]
    if highest is None:
        highest = float(torch.cat([height.flatten() for height in heights]).quantile(0.85))

    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    figure = _figure(figure, max(3.0 * columns + 0.6, 5.0), (4.2 if columns == 1 else 3.0) * rows + 1.2)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    marks: dict[str, Any] = {}
    for axes, (title, frame), height in zip(panels.flat, frames.items(), heights, strict=False):
        levels = torch.linspace(0, highest, 19)
        surface = axes.contourf(line, line, height, levels, cmap="cividis", extend="max")
        axes.contour(line, line, height, levels[::2], colors="white", linewidths=0.5, alpha=0.5)
        marks |= _no_op(axes, frame, grid) | _paths(axes, frame, queries) | _patterns(axes, frame)
        axes.set(title=title, aspect="equal", xlim=(-edge, edge), ylim=(-edge, edge))
    for axes in panels.flat[len(frames) :]:
        axes.remove()
    for axes in panels[-1]:
        axes.set_xlabel(frame.labels[0])
    for axes in panels[:, 0]:
        axes.set_ylabel(frame.labels[1])
    for side in (panels[0, 0].xaxis, panels[0, 0].yaxis):  # shared by all
        side.set_major_locator(_few_ticks())
    bar = figure.colorbar(surface, ax=panels, shrink=0.8, pad=0.02, spacing="proportional", ticks=_few_ticks())
    bar.set_label("energy above its minimum")
    order = ("pattern", "no-op point", "no-op region", *_QUERIES, *_PATHS.values())
    _legend(figure, {name: marks[name] for name in order if name in marks}, 2 if columns == 1 else 3)
    return list(panels.flat[: len(frames)])


def plot_retrieval(
    memory: HopfieldMemory, queries: Tensor, steps: int | None = 1, *, figure: Figure | None = None
) -> list[Axes]:
    """Shows what each query retrieves: the energy after each update, and who has the weight in the last one.

    Methods without an energy have the second panel alone.

    Args:
        queries: [Q, d], at most 40.
        steps: how many updates, as for ``retrieve``; None for as many as all queries need to be at rest.
        figure: an empty figure to draw into, which should have ``layout="compressed"``.
    """
    queries = _rows(queries, _checked(memory))
    if not 0 < len(queries) <= _READABLE:
        raise ValueError(f"queries has {len(queries)} rows: give 1 to {_READABLE}, as many as can be read")
    states = _states(memory, queries, steps)
    weights, no_op = memory.association(states[-2]).double().abs().cpu(), memory.retrieve(states[-2]).no_op.cpu()
    most, first = weights.max(1)
    nothing = no_op > 0.5
    lines: dict[str, Any] = {}
    has_energy = why_no_energy(memory.method.normalizer) is None

    figure = _figure(figure, 8.0 if has_energy else 5.5, max(2.6, 0.3 * len(queries) + 1.6))
    panels = figure.subplots(1, 1 + has_energy, squeeze=False)[0]
    if has_energy:
        lines = _energies(panels[0], memory.energy(states).double().cpu(), nothing)
    bars, at = panels[-1], range(len(queries))
    parts = {
        "the pattern with the largest weight": (most, _PATTERN),
        "all other patterns": (weights.sum(1) - most, _OTHERS),
        "nothing (no-op)": (no_op.double(), _NOTHING),
    }
    left = torch.zeros(len(queries), dtype=torch.float64)
    marks: dict[str, Any] = {}
    for label, (width, colour) in parts.items():
        if label.startswith("nothing") and memory.n == 0:
            continue
        marks[label] = bars.barh(at, width, left=left, color=colour, height=0.75)
        left = left + width
    ends = ["nothing" if none else f"pattern {int(index)}" for none, index in zip(nothing, first, strict=True)]
    bars.set_yticks(at, [f"query {i} → {end}" for i, end in enumerate(ends)])
    bars.invert_yaxis()
    bars.set(title="Weights of the last update", xlabel="weight")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, marks | lines, 3)
    return list(panels)


def _energies(axes: Axes, energies: Tensor, nothing: Tensor) -> dict[str, Any]:
    """The energy [T + 1, Q] of each query along its updates."""
    marks = {}
    for line, none in zip(energies.T, nothing.tolist(), strict=True):
        label = "query that retrieves nothing" if none else "query that retrieves patterns"
        marks[label] = axes.plot(line, marker="o", ms=3, lw=1.5, color=_NOTHING if none else _PATTERN)[0]
    axes.set(title="Energy", xlabel="updates")
    axes.xaxis.set_major_locator(_few_ticks(integer=True))
    axes.grid(alpha=0.25)
    return marks


class _Frame:
    """The plane in which a memory is drawn."""

    def __init__(self, memory: HopfieldMemory, plane: tuple[int, int] | None) -> None:
        patterns, self.memory = memory.patterns.double(), memory
        size = patterns.shape[1]
        if size == 1:
            raise ValueError("memory has patterns of size 1: the energy is drawn in a plane, for sizes from 2 on")
        if size == 2 and plane is None:
            self.axes, self.labels = torch.eye(2, dtype=torch.float64, device=patterns.device), ("x₁", "x₂")
        else:
            one, two = (0, 1) if plane is None else plane
            if not max(one, two) < len(patterns) or min(one, two) < 0:
                raise ValueError(f"plane={(one, two)}: expected two indices of the {len(patterns)} active patterns")
            span, upper = torch.linalg.qr(patterns[[one, two]].T)  # [d, 2]
            if upper.diagonal().abs().min() <= 1e-9 * float(patterns.norm(dim=1).max()):
                raise ValueError(f"plane={(one, two)}: these patterns and 0 lie on a line; choose two others")
            self.axes = (span * upper.diagonal().sign()).T  # [2, d], so that both lie towards their pattern
            self.labels = (f"along pattern {one}", f"towards pattern {two}")
        flat = self.flat(patterns)
        outside = (patterns - flat @ self.axes).norm(dim=1)
        self.patterns = flat[outside <= 1e-4 * patterns.norm(dim=1).max()].cpu()

    def flat(self, x: Tensor) -> Tensor:
        """Coordinates in the plane.  [..., d] → [..., 2]"""
        return x.detach().double() @ self.axes.T

    def lift(self, x: Tensor) -> Tensor:
        """Points of the plane.  [..., 2] → [..., d]"""
        return (x.to(self.axes) @ self.axes).to(self.memory.patterns)

    def reach(self, queries: Tensor | None) -> float:
        """How far the picture must go for all to have room."""
        drawn = self.patterns
        if queries is not None:
            drawn = torch.cat([drawn, self.flat(_rows(queries, self.memory)).cpu()])
        return 1.1 * float(drawn.abs().max()) + 0.15 * float(self.patterns.norm(dim=1).max())


def _no_op(axes: Axes, frame: _Frame, grid: Tensor) -> dict[str, Any]:
    """The no-op point, and where queries end with more than half of their weight on the no-op patterns."""
    from matplotlib.patches import Patch

    if frame.memory.n == 0:
        return {}
    marks: dict[str, Any] = {}
    rest = frame.memory.retrieve(frame.lift(grid), None).no_op.cpu()
    if (rest > 0.5).any():
        line = grid[0, :, 0]
        axes.contourf(line, line, rest, [0.5, 1.1], colors="none", hatches=["//"]).set_edgecolor(f"{_NOTHING}66")
        axes.contour(line, line, rest, [0.5], colors=[_NOTHING], linewidths=1.5, linestyles="--")
        marks["no-op region"] = Patch(fc="none", ec=_NOTHING, ls="--", lw=1.5, hatch="//")
    marks["no-op point"] = axes.plot(0, 0, ls="", marker="D", ms=8, mfc=_NOTHING, mec="black", zorder=5)[0]
    return marks


def _paths(axes: Axes, frame: _Frame, queries: Tensor | None) -> dict[str, Any]:
    """Each query, and the points it moves to."""
    if queries is None or len(queries) == 0:
        return {}
    marks: dict[str, Any] = {}
    states = _states(frame.memory, _rows(queries, frame.memory), None)
    nothing = frame.memory.retrieve(states[-1]).no_op > 0.5
    for path, none in zip(frame.flat(states).cpu().unbind(1), nothing.tolist(), strict=True):
        colour = _NOTHING if none else _PATTERN
        marks[_PATHS[none]] = axes.plot(*path.T, color=colour, lw=1.8, marker="o", ms=3, zorder=3)[0]
        marks[_QUERIES[frame.memory.patterns.shape[1] > 2]] = axes.plot(
            *path[0], ls="", marker="o", ms=6, mfc="white", mec="black", zorder=4
        )[0]
    return marks


def _patterns(axes: Axes, frame: _Frame) -> dict[str, Any]:
    return {"pattern": axes.plot(*frame.patterns.T, ls="", marker="*", ms=15, mfc=_PATTERN, mec="black", zorder=5)[0]}


def _states(memory: HopfieldMemory, x: Tensor, steps: int | None) -> Tensor:
    """The queries, and these after each of ``steps`` updates, by default until all are at rest.  [T + 1, Q, d]"""
    states = [x]
    for _ in range(int(memory.retrieve(x, steps).steps.max())):
        states.append(memory.retrieve(states[-1]).state)
    return torch.stack(states)


def _checked(memory: HopfieldMemory) -> HopfieldMemory:
    if not isinstance(memory, HopfieldMemory):
        raise TypeError(f"memory is a {type(memory).__name__}: expected a HopfieldMemory, which has all patterns here")
    return memory


def _rows(queries: Tensor, memory: HopfieldMemory) -> Tensor:
    check_queries(queries, memory.patterns, "queries")
    if queries.dim() != 2:
        raise ValueError(f"queries has shape {tuple(queries.shape)}: expected [Q, {memory.patterns.shape[1]}]")
    return queries.detach()


def _figure(figure: Figure | None, width: float, height: float) -> Figure:
    if figure is not None:
        return figure
    plt = require("matplotlib.pyplot")
    return plt.figure(figsize=(width, height), layout="compressed")  # type: ignore[no-any-return]


def _few_ticks(integer: bool = False) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4, steps=[1, 2, 5, 10], integer=integer)


def _legend(figure: Figure, marks: Mapping[str, Any], columns: int) -> None:
    figure.legend(marks.values(), marks.keys(), loc="outside upper center", ncols=columns, frameon=False)
