"""Every table and figure of the paper, one file each, and one experiment beyond it."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.paper.experiment import Experiment, Result, Settings
    from outeffhop.lab.paper.registry import NAMES, find
    from outeffhop.lab.paper.running import run

__all__ = ["NAMES", "find", "run", "Settings", "Experiment", "Result"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "experiment": ["Experiment", "Result", "Settings"],
        "registry": ["NAMES", "find"],
        "running": ["run"],
    },
)
