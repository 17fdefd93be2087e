"""Figures of one value per layer, with a line for each model."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from outeffhop.lab.paper.drawing import logarithmic, new, png
from outeffhop.lab.report.html import picture
from outeffhop.outliers import OutlierReport

__all__ = ["COLOURS", "FIRST_TOKEN", "by_layer", "first_token_by_layer", "largest_by_layer"]

COLOURS = ("#D55E00", "#0072B2", "#E69F00")  # of Okabe and Ito's palette, as in other figures
FIRST_TOKEN = "attention on the first token"


def largest_by_layer(report: OutlierReport, field: str) -> list[float]:
    """The largest value of the tensors of each layer, in the order of the layers."""
    layers: dict[tuple[str, int], float] = {}
    for tensor in report.tensors:
        stack, layer, _ = tensor.place
        value = getattr(tensor, field)
        if layer is not None and value is not None:
            layers[stack, layer] = max(layers.get((stack, layer), 0.0), value)
    return list(layers.values())


def first_token_by_layer(report: OutlierReport) -> list[float]:
    """The mean over the heads of each attention module."""
    return [fmean(heads.first_token) for heads in report.attention]


def by_layer(title: str, lines: Mapping[str, tuple[list[float], str]], *, is_share: bool = False) -> str:
    """A PNG inside the page, with a line for each name → (values, colour); nothing if there are no values.

    Args:
        is_share: the axis goes from 0 to 1; else it is logarithmic.
    """
    if not any(values for values, _ in lines.values()):
        return ""
    figure, axis = new(8.0, 3.0)
    for name, (values, colour) in lines.items():
        axis.plot(range(len(values)), values, color=colour, label=name, marker="o", markersize=3)
    axis.set_xlabel("layer")
    axis.set_ylabel(title)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if is_share:
        axis.set_ylim(0.0, 1.0)
    else:
        logarithmic(axis, "y")
    axis.legend(frameon=False)
    return picture(png(figure), f"{title} by layer")
