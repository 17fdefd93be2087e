"""Results as pages: an outlier report, and the paper's experiments."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outeffhop.lab.report.experiments_page import write_report
    from outeffhop.lab.report.outliers_page import outlier_page

__all__ = ["outlier_page", "write_report"]

_MODULES = {"outlier_page": "outliers_page", "write_report": "experiments_page"}


def __getattr__(name: str) -> Any:
    """Imported when it is asked for: one page does not need what the other is made of."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
