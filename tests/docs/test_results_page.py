"""The page of results says what the kept results say."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from outeffhop.lab.paper.experiment import Figure, Result, Table, Verdict
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.report.markdown import markdown_of

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS.parent / "results"
REMEDY = "run python docs/make_results.py"
spec = importlib.util.spec_from_file_location("make_results", DOCS / "make_results.py")
make_results = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_results)
KEPT = sorted(RESULTS.glob("*/*.json"))

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="the results are not in a source distribution")


def test_the_page_is_made_from_the_results():
    text, shown = make_results.page()
    assert (DOCS / "results.md").read_text(encoding="utf-8") == text, REMEDY
    assert sorted(shown) == [path for path in KEPT if path.name != "tried.json"]
    named = {f"{p.parent.name}/{p.stem}/{f.name}.png" for p in shown for f in ResultFile.load(p).result.figures}
    there = {str(p.relative_to(make_results.PICTURES)) for p in make_results.PICTURES.rglob("*") if p.is_file()}
    assert there == named, REMEDY


def test_every_claim_that_can_be_judged_is_in_a_table_with_its_numbers_and_seeds():
    text, shown = make_results.page()
    table = text.partition("## All claims")[2].partition("\n## ")[0]
    rows = {
        r[0].replace("\\", "")[1:].rpartition("](")[0]: r
        for line in table.splitlines()
        if (r := line.strip("| ").split(" | ")) and len(r) == 4
    }
    claims = {}
    for path in shown:
        for v in ResultFile.load(path).result.verdicts:
            claims.setdefault(v.claim, []).append(v)
    for claim, several in claims.items():
        judged = [v for v in several if v.verdict != "not measured" and v.seeds != 1]
        assert (claim in rows) == bool(judged), claim
        if judged:
            assert rows[claim][1] in {v.verdict for v in judged}
            assert rows[claim][3] in {str(v.seeds) if v.seeds is not None else "none" for v in judged}


@pytest.mark.parametrize("path", make_results.page()[1], ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_its_figures_are_drawn_from_the_results(path, tmp_path):
    for name in make_results.draw(path, tmp_path):
        with Image.open(tmp_path / name) as drawn, Image.open(make_results.PICTURES / name) as kept:
            assert drawn.size == kept.size, REMEDY
            if drawn.text != kept.text:
                pytest.skip(f"drawn by {kept.text['Software']}: another version draws letters differently")
            ours, theirs = (np.asarray(image.convert("RGB"), dtype=int) for image in (drawn, kept))
        # another processor may round a contour's height to the other side
        assert (abs(ours - theirs).max(-1) > 8).mean() < 1e-4, REMEDY


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
    assert text.startswith("## Table 9\n\na\\|b\n\n<details markdown>")
    assert "![F](pictures/f.png)" in text
    assert "scale: tiny." in text
    assert "| a\\_b | **1** |\n| &lt;script&gt; | 3 |\n| c | <u>2</u> |" in text


def test_a_row_without_numbers_of_ours_is_not_shown():
    rows = [["a", 1.0, 5.0], ["b", None, 4.0]]
    text = markdown_of(Result("x", "Y", "z", [Table("T", ["method", "error", "paper: error"], rows)]), "pictures")
    assert "| a | 1 | 5 |" in text
    assert "| b |" not in text


def test_a_claim_links_to_the_section_that_judges_it():
    text, _ = make_results.page()
    headings = re.findall(r"^### (.+)$", text, re.M)
    anchors = {re.sub(r"[^\w\s-]", "", heading).lower().replace(" ", "-") for heading in headings}
    linked = set(re.findall(r"^\| \[.*?\]\(#([\w-]+)\) \|", text, re.M))
    assert linked
    assert linked <= anchors
    assert len(anchors) == len(headings)
