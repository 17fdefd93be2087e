"""Results as pages: an outlier report, the paper's experiments, and the parts that pages are made of."""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.report.experiments_page import write_report
    from outeffhop.lab.report.html import Section, page, picture, table
    from outeffhop.lab.report.outliers_page import outlier_page

__all__ = ["Section", "outlier_page", "page", "picture", "table", "write_report"]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "experiments_page": ["write_report"],
        "html": ["Section", "page", "picture", "table"],
        "outliers_page": ["outlier_page"],
    },
)
