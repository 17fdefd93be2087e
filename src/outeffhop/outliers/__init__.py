"""The outliers of a model: where they are, how large they are, and which heads make them.

report = measure(model, batches)
print(report.avg_kurtosis, report.max_inf_norm)
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.outliers.collector import measure
    from outeffhop.outliers.outlier_report import OutlierReport, compare
    from outeffhop.outliers.penalty import OutlierPenalty

__all__ = ["measure", "compare", "OutlierReport", "OutlierPenalty"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "collector": ["measure"],
        "outlier_report": ["OutlierReport", "compare"],
        "penalty": ["OutlierPenalty"],
    },
)
