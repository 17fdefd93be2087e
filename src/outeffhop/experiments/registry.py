"""The experiments by name."""

from __future__ import annotations

from importlib import import_module

from outeffhop.experiments.experiment import Experiment
from outeffhop.naming import known

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


def find(name: str) -> Experiment:
    """The experiment of a name; its module, ``memory_capacity.py`` of "memory-capacity", has it as EXPERIMENT."""
    module = known("name", name, NAMES).replace("-", "_")
    found: Experiment = import_module(f"outeffhop.experiments.{module}").EXPERIMENT
    return found
