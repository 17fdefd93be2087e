"""The experiments by name."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

from outeffhop.experiments.experiment import Experiment

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
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"name={name!r} is unknown{hint} There are: {', '.join(NAMES)}")
    found: Experiment = import_module(f"outeffhop.experiments.{name.replace('-', '_')}").EXPERIMENT
    return found
