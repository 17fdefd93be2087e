"""Results as pages: an outlier report, and the paper's experiments."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.report.experiments_page import write_report
    from outeffhop.lab.report.outliers_page import outlier_page

__all__ = ["outlier_page", "write_report"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={"experiments_page": ["write_report"], "outliers_page": ["outlier_page"]},
)
