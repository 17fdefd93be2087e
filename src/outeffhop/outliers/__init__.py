"""The outliers of a model: where they are, how large they are, and which heads make them.

report = measure(model, batches)
print(report.avg_kurtosis, report.max_inf_norm)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outeffhop.outliers.collector import measure
    from outeffhop.outliers.outlier_report import Channel, HeadStats, OutlierReport, Position, TensorStats, compare

__all__ = ["Channel", "HeadStats", "OutlierReport", "Position", "TensorStats", "compare", "measure"]


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when they are needed: a report can be read without them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "collector" if name == "measure" else "outlier_report"
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__
