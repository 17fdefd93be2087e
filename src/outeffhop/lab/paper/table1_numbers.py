"""The numbers of Table 1 from what its cells hold: the metric in floating point and in W8A8, and changes in pairs."""

from __future__ import annotations

from math import nan
from statistics import mean

from outeffhop.lab.paper import published
from outeffhop.lab.paper.experiment import Values
from outeffhop.lab.paper.trained_models import CHIEF

__all__ = [
    "FIELDS",
    "Found",
    "change",
    "cut",
    "full",
    "loss",
    "losses",
    "models_of",
    "percent",
    "seed_losses",
    "split_of",
    "w8a8",
]

Found = dict[tuple[str, str], list[Values]]  # (model, method) → a value of each seed

FIELDS = {"kurtosis": "average kurtosis", "inf_norm": "maximum infinity norm"}
# of cells that do not record their split
_SPLIT_BEFORE = {"vit": "test"}


def models_of(runs: Found) -> list[str]:
    """The models that are measured, in the paper's order."""
    return [model for model in published.NAMES if any(m == model for m, _ in runs)]


def split_of(model: str, values: Values) -> str:
    """The split that the metric and the outliers were measured on."""
    return str(values.get("split", _SPLIT_BEFORE.get(model, "validation")))


def _unit(model: str) -> int:
    """Accuracies are given in percent."""
    return 100 if model == "vit" else 1


def full(model: str, values: Values) -> float:
    """The chief metric in floating point."""
    return float(values["metrics"][CHIEF[model][0]]) * _unit(model)


def w8a8(model: str, values: Values, scheme: str = "w8a8") -> float:
    """The chief metric in 8 bits, over calibration draws; ``scheme`` may be "fp8" where a cell has it."""
    return mean(map(float, values[scheme][CHIEF[model][0]])) * _unit(model)


def loss(model: str, before: float, after: float) -> float:
    """By how much the metric is worse after than before."""
    return before - after if CHIEF[model][2] == "high" else after - before


def seed_losses(model: str, values: list[Values]) -> list[float]:
    """What W8A8 costs each seed."""
    return [loss(model, full(model, v), w8a8(model, v)) for v in values]


def losses(model: str, values: list[Values]) -> list[float]:
    """What W8A8 costs, over seeds; over calibration draws if there is only one seed."""
    if len(values) != 1:
        return seed_losses(model, values)
    draws = values[0]["w8a8"][CHIEF[model][0]]
    return [loss(model, full(model, values[0]), float(draw) * _unit(model)) for draw in draws]


def cut(old: list[Values], new: list[Values], field: str) -> float:
    """The share by which a number is lower in the new runs."""
    return 1 - mean(float(v[field]) for v in new) / mean(float(v[field]) for v in old)


def change(model: str, old: list[Values], new: list[Values]) -> float:
    """The share by which the metric in floating point is higher in the new runs; nan if it was 0."""
    before, after = (mean(full(model, v) for v in side) for side in (old, new))
    return after / before - 1 if before else nan


def percent(cut: float) -> str:
    return f"{-100 * cut:+.1f} %".replace("-", "−")
