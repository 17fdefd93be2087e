"""The page of results says what the kept results say."""

import importlib.util
from pathlib import Path

import pytest

from outeffhop.lab.paper import Figure, Result, Table, Verdict
from outeffhop.lab.report.markdown import markdown_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.page()


@pytest.mark.skipif(not (DOCS.parent / "results").exists(), reason="the results are not in a source distribution")
def test_the_page_is_made_from_the_results(made):
    text, copies = made
    assert (DOCS / "results.md").read_text(encoding="utf-8") == text, "run python docs/make_results.py"
    assert copies
    for copy, original in copies.items():
        assert copy.read_bytes() == original.read_bytes(), "run python docs/make_results.py"


def test_a_result_as_markdown():
    result = Result(
        "x",
        "Table 9",
        "a|b",
        [Table("T", ["method", "error"], [["a_b", 1.0], ["<script>", 3.0], ["c", 2.0]], {"error": "low"}, note="n")],
        [Figure("f", "F", "seen")],
        [Verdict("it is so", "not seen", "1 against 2")],
        {"scale": "tiny"},
    )
    text = markdown_of(result, "pictures")
    assert text.startswith("## Table 9\n\na\\|b\n\nscale: tiny.\n\n- **not seen**: it is so")
    assert "![F](pictures/f.png)" in text
    assert "| a\\_b | **1** |\n| &lt;script&gt; | 3 |\n| c | <u>2</u> |" in text
