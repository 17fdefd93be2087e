"""Every table and figure of the paper, one file each, and one experiment beyond it."""

from typing import TYPE_CHECKING, Any

from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Verdict

if TYPE_CHECKING:
    from outeffhop.lab.paper.running import run

__all__ = ["Experiment", "Settings", "Cell", "Result", "Table", "Figure", "Verdict", "run"]


def __getattr__(name: str) -> Any:
    """``run`` when it is asked for: the names of the experiments are needed without what runs them."""
    if name == "run":
        from outeffhop.lab.paper.running import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
