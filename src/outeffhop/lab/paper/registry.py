"""The experiments by name."""

from __future__ import annotations

from importlib import import_module

from outeffhop._naming import known
from outeffhop.lab.paper.experiment import Experiment

__all__ = ["NAMES", "find"]

NAMES = (
    "table1",
    "table2",
    "training-outliers",
    "energy",
    "memory-capacity",
    "noise-robustness",
    "convergence",
    "mil",
    "cost",
    "theory",
    "beyond",
)
"""The names of the experiments, for ``find`` and ``outeffhop reproduce``."""


# Experiments whose module has a longer name; the others have the same name (memory_capacity.py).
_MODULES = {"energy": "energy_landscape", "theory": "theory_bounds"}


def find(name: str) -> Experiment:
    """The experiment with this name: EXPERIMENT in its module."""
    module = _MODULES.get(known("name", name, NAMES), name.replace("-", "_"))
    found: Experiment = import_module(f"outeffhop.lab.paper.{module}").EXPERIMENT
    return found
