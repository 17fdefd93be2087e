"""The outliers of a model: where they are, how large, and which heads make them.

report = measure(model, batches)
print(report.avg_kurtosis, report.max_inf_norm)
"""

from outeffhop.outliers.collector import measure
from outeffhop.outliers.outlier_report import Channel, HeadStats, OutlierReport, Position, TensorStats, compare

__all__ = ["measure", "compare", "OutlierReport", "TensorStats", "HeadStats", "Position", "Channel"]
