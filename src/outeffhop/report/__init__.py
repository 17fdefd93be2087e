"""Results as pages and figures."""

from outeffhop.report.experiments import write_report
from outeffhop.report.figures import heat_map
from outeffhop.report.html import Section, page, table
from outeffhop.report.outliers import outlier_page

__all__ = ["Section", "heat_map", "outlier_page", "page", "table", "write_report"]
