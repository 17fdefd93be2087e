"""The page of costs shows what the benchmarks' files contain."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_drawn_from_the_files():
    drawn = runpy.run_path(str(DOCS / "make_performance.py"))["page"]()
    assert (DOCS / "performance.md").read_text() == drawn, "run: python docs/make_performance.py"
