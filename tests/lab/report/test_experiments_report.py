"""The report of experiments: marks, escapes, empty cells; and a browser that opens it."""

import base64
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from outeffhop.lab.paper import drawing, run
from outeffhop.lab.paper.experiment import Figure, Result, Settings, Table, Verdict
from outeffhop.lab.paper.ranking import entry_text, ranks
from outeffhop.lab.paper.registry import find
from outeffhop.lab.paper.result_file import ResultFile, read_all
from outeffhop.lab.report import write_report
from outeffhop.lab.report.markdown import markdown_of

RESULTS = Path(__file__).parents[3] / "results"
EVIL = "<script>alert('1 & 2')</script>"


def make(out, name="table1", *, title="A table", verdict="confirmed", word="plain", scale="tiny"):
    """A made-up result with a table, a figure and a claim."""
    folder = out / name
    figure, axis = drawing.new()
    axis.plot([1, 2], [3, 4], color=drawing.colour("outeffhop"))
    drawing.save(figure, folder, "curve")
    rows = [
        ["x", "vanilla", 3.0, 1.0, None],
        ["x", word, "2 ± 0.5", 2.0, 7.0],
        ["x", "c", 4.0, 3.0, 8.0],
        ["y", "d", 9.0, 1, 2],
    ]
    columns = ["model", "method", "loss", "accuracy", "paper: loss"]
    better = {"loss": "low", "accuracy": "high", "paper: loss": "low"}
    result = Result(
        name,
        f"Table {word}",
        word,
        [Table(title, columns, rows, better, "model", word)],
        [Figure("curve", word, word)],
        [Verdict(word, verdict, word)],
        {"scale": scale, word: word},
    )
    (out / f"{name}.json").write_text(ResultFile("tiny", result=result).to_json())
    return result


class Cells(HTMLParser):
    """Text and class of each td, the tags seen, and that all are closed."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.tags, self.open = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "td":
            self.cells.append(["", dict(attrs).get("class", "")])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1][0] += data


def test_best_and_second_are_marked_within_a_group_and_missing_cells_are_empty(tmp_path):
    make(tmp_path)
    cells = Cells(write_report(tmp_path).read_text()).cells
    rows = [cells[i : i + 5] for i in range(5, len(cells), 5)]  # the first five are the table of claims
    assert [row[2] for row in rows] == [["3", "second"], ["2 ± 0.5", "best"], ["4", ""], ["9", ""]]
    assert [row[3] for row in rows] == [["1", ""], ["2", "second"], ["3", "best"], ["1", ""]]
    assert [row[4] for row in rows] == [["", "paper"], ["7", "best paper"], ["8", "second paper"], ["2", "paper"]]


def test_everything_is_escaped_and_nothing_is_fetched(tmp_path):
    make(tmp_path, word=EVIL, title=EVIL, scale=EVIL)
    text = write_report(tmp_path).read_text()
    assert "<script" not in text
    assert text.count("&lt;script&gt;") > 10
    for tag, attributes in Cells(text).tags:
        assert attributes.get("src", "data:").startswith("data:image/png;base64,") or tag != "img"
        assert attributes.get("href", "#").startswith("#")
        assert "onload" not in attributes
        assert "srcset" not in attributes


def test_links_lead_to_sections_in_the_papers_order_and_verdicts_are_counted(tmp_path):
    make(tmp_path, "cost", verdict="contradicted")
    make(tmp_path, "table1")
    make(tmp_path, "energy")
    tags = Cells(text := write_report(tmp_path).read_text()).tags
    links = [a["href"][1:] for tag, a in tags if tag == "a"]
    assert links == ["of-table1", "of-cost", "of-energy"]  # the theory comes after what it does for a user
    assert [a["id"] for _, a in tags if "id" in a] == ["of-table1", "of-energy", "of-cost"]
    assert text.count("<dt>confirmed</dt><dd>1</dd>") == 2  # one in each part
    assert "<dt>contradicted</dt><dd>1</dd>" in text
    assert '<span class="contradicted">contradicted</span>' in text


def test_a_formula_that_is_not_as_printed_does_not_look_like_a_failure(tmp_path):
    make(tmp_path, "theory", verdict="not as printed")
    text = write_report(tmp_path).read_text()
    assert '<span class="printed">not as printed</span>' in text
    assert 'class="contradicted"' not in text


def test_numbers_that_look_equal_are_not_ranked():
    """4.4868 and 4.4871 are both shown as 4.487."""
    rows = [["a", 4.4868], ["b", 4.4871]]
    assert ranks(Table("t", ["method", "kurtosis"], rows, {"kurtosis": "low"})) == {}
    rows.append(["c", 9.0])
    assert ranks(Table("t", ["method", "kurtosis"], rows, {"kurtosis": "low"})) == {(0, 1): 1, (1, 1): 1}


def test_figures_are_within_the_page_and_a_lost_one_is_named(tmp_path):
    make(tmp_path, "demo")
    picture = (tmp_path / "demo" / "curve.png").read_bytes()
    assert base64.b64encode(picture).decode() in write_report(tmp_path).read_text()
    (tmp_path / "demo" / "curve.png").unlink()
    text = write_report(tmp_path).read_text()
    assert "curve.png is missing" in text
    assert "<img" not in text


def test_a_trial_run_is_called_one(tmp_path):
    make(tmp_path, scale="tiny, cut down to see that it runs: these numbers mean nothing")
    assert 'class="warning"' in write_report(tmp_path).read_text()
    make(tmp_path)
    assert 'class="warning"' not in write_report(tmp_path).read_text()


def test_no_result_and_a_broken_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no result yet"):
        write_report(tmp_path)
    make(tmp_path)
    for broken in ('{"cells": {}, "result": {}}', '{"cells": '):
        (tmp_path / "table1.json").write_text(broken)
        with pytest.raises(ValueError, match=r"table1\.json"):
            write_report(tmp_path)


def test_other_files_and_unfinished_experiments_are_skipped(tmp_path):
    make(tmp_path)
    (tmp_path / "quantization.json").write_text('{"model": "opt"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "energy.json").write_text(ResultFile("tiny").to_json())
    text = write_report(tmp_path).read_text()
    assert "of-table1" in text
    assert "of-energy" not in text


def test_missing_figures_are_drawn_again(tmp_path):
    settings = Settings(out=tmp_path, quick=True)
    run(find("energy"), settings, lambda line: None)
    page = write_report(tmp_path).read_text()
    shutil.rmtree(tmp_path / "energy")
    assert write_report(tmp_path).read_text() == page


@pytest.mark.parametrize(
    ("entry", "text"),
    [(None, ""), (23341.5, "23342"), (0.12345, "0.1235"), (1.5e30, "1.5e+30"), (float("inf"), "inf"), (7, "7")],
)
def test_an_entry_is_as_long_as_can_be_read(entry, text):
    assert entry_text(entry) == text


def test_markdown_names_a_command_that_there_is(tmp_path):
    said = {name: markdown_of(make(tmp_path, name), "pictures") for name in ("table1", "demo")}
    assert "`outeffhop reproduce table1`; scale: tiny" in said["table1"]
    assert "reproduce" not in said["demo"]


SEEN = """<script>
const pictures = [...document.images];
const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
const shown = pictures.filter(p => p.complete && p.naturalWidth > 0).length;
document.title = `${shown} of ${pictures.length} pictures, ${wide ? "too wide" : "fits"}`;
</script>"""


needs_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not on PATH")


def seen_by_a_browser(text, folder, width):
    """How many pictures it shows, and whether the page is as wide as its window at most; no word on its console."""
    page = folder / "seen.html"
    # a script at its end says what the browser made of it
    page.write_text(text.replace("</body>", f"{SEEN}</body>"))
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    command += [f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    return re.search(r"<title>(.*)</title>", done.stdout)[1]


@needs_browser
@pytest.mark.parametrize("width", [400, pytest.param(1300, marks=pytest.mark.slow)])
def test_a_browser_shows_it_whole(tmp_path, width):
    for name in ("table1", "cost"):
        make(tmp_path, name, word="a long name of a method")
    assert seen_by_a_browser(write_report(tmp_path).read_text(), tmp_path, width) == "2 of 2 pictures, fits"


@needs_browser
@pytest.mark.skipif(not RESULTS.exists(), reason="the results are not in a source distribution")
@pytest.mark.parametrize("width", [400, 1300])
def test_a_browser_shows_the_kept_results_whole(tmp_path, width):
    for scale in RESULTS.iterdir():
        out = shutil.copytree(scale, tmp_path / scale.name)
        figures = [figure for kept in read_all(out).values() for figure in kept.result.figures]
        assert figures
        said = f"{len(figures)} of {len(figures)} pictures, fits"
        assert seen_by_a_browser(write_report(out).read_text(), tmp_path, width) == said, scale
