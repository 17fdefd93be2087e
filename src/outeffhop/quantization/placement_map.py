"""What is quantized in a model, with which ranges, and what stays in floating point."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from outeffhop.quantization.placement import Layout
from outeffhop.quantization.points import Point
from outeffhop.quantization.quantizers import Grid, read_grids
from outeffhop.quantization.simulation import simulation_of

__all__ = ["MapRow", "QuantizationMap", "in_floating_point", "quantization_map"]

_ORDER = ("input", "weight", "key", "value", "scores", "probabilities", "context", "output")


@dataclass(frozen=True)
class MapRow:
    """One quantizer.

    Attributes:
        name: the module and which of its tensors is quantized.
        kind: "weight" or "activation".
        bits: bits of its grid.
        scheme: symmetric or asymmetric, per tensor, channel or token.
        range: the ends of the grid, over all channels; None before ``freeze`` and if each token has its own.
        scale: the grid's step, the largest over all channels.
        zero_point: None if channels have their own.
    """

    name: str
    kind: str
    bits: int
    scheme: str
    range: tuple[float, float] | None
    scale: float | None
    zero_point: int | None


@dataclass(frozen=True)
class QuantizationMap:
    """The quantizers of a model in the order of its modules, and what has none and why."""

    scheme: str
    placement: str
    rows: tuple[MapRow, ...]
    floating: dict[str, str]

    def __str__(self) -> str:
        header = ("quantizer", "kind", "bits", "scheme", "range", "scale", "zero point")
        cells = [
            (
                row.name,
                row.kind,
                str(row.bits),
                row.scheme,
                "its own" if row.range is None else f"[{row.range[0]:.4g}, {row.range[1]:.4g}]",
                "" if row.scale is None else f"{row.scale:.4g}",
                "" if row.zero_point is None else str(row.zero_point),
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [header, *cells]) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [header, *cells]
        ]
        width = max(map(len, self.floating), default=0)
        left = [f"{name:{width}}  {why}" for name, why in self.floating.items()]
        return "\n".join([f"{self.scheme}, placement {self.placement}", *lines, "", "In floating point", *left])


def quantization_map(model: nn.Module) -> QuantizationMap:
    """The map of a model that ``simulate`` returned and that was calibrated."""
    simulation = simulation_of(model)
    places = {name: i for i, (name, _) in enumerate(model.named_modules())}

    def order(point: Point) -> tuple[int, int, str]:
        module, _, what = point.name.rpartition("/")
        return places.get(module, 0), _ORDER.index(what) if what in _ORDER else len(_ORDER), what

    points = sorted(simulation.points.values(), key=order)
    grids = read_grids({point.name: point.grid for point in points if point.grid is not None})
    rows = tuple(_row(point, grids.get(point.name)) for point in points)
    scheme = simulation.scheme
    return QuantizationMap(str(scheme), scheme.placement, rows, in_floating_point(model))


def _row(point: Point, grid: Grid | None) -> MapRow:
    how = f"{point.spec}, smoothed" if point.factors is not None else str(point.spec)
    if grid is None:
        return MapRow(point.name, point.kind, point.spec.bits, how, None, None, None)
    return MapRow(
        point.name,
        point.kind,
        point.spec.bits,
        how,
        grid.range,
        float(grid.scale.max()),
        int(grid.zero_point[0]) if grid.scale.numel() == 1 else None,
    )


def in_floating_point(model: nn.Module) -> dict[str, str]:
    """Every parameter of a simulation without a quantizer, grouped by the largest module that shares the reason."""
    simulation = simulation_of(model)
    layout: Layout = simulation.layout
    # in the model's order; modules without weights need no mention
    found = {n: why for n, why in layout.floating.items() if any(True for _ in model.get_submodule(n).parameters())}
    biases = 0
    for name, _ in model.named_parameters(remove_duplicate=False):
        module, _, own = name.rpartition(".")
        if any(module == top or module.startswith(f"{top}.") for top in found):
            continue
        site = layout.sites.get(module)
        if own == "bias" or own.endswith("_bias"):
            biases += 1
        elif site is None or own != "weight" or not site.weight:
            found[name] = "not a parameter of a quantized module"
        elif layout.excludes(f"{module}/weight"):
            found[name] = "excluded"
    for name in sorted(layout.attention):
        if layout.operations and simulation.points and f"{name}/scores" not in simulation.points:
            found.setdefault(name, "attention that does not show its scores")
    if biases:
        found["biases"] = f"{biases} of them, added to the accumulator"
    return found
