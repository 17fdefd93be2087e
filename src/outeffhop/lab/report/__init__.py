"""Results as pages and figures."""

from outeffhop.lab.report.experiments_page import write_report
from outeffhop.lab.report.heat_map import heat_map
from outeffhop.lab.report.html import Section, page, table
from outeffhop.lab.report.outlier_page import outlier_page

__all__ = ["Section", "heat_map", "outlier_page", "page", "table", "write_report"]
