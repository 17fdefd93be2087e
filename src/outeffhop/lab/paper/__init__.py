"""Every table and figure of the paper, one file each, and one experiment beyond it."""

from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Verdict
from outeffhop.lab.paper.running import run

__all__ = ["Experiment", "Settings", "Cell", "Result", "Table", "Figure", "Verdict", "run"]
