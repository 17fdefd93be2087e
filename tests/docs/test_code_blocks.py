"""README and docs keep their word: every block runs as a reader would run it, or is parsed and says why not."""

import re
import shlex

import pytest
from blocks import FENCE, PAGES, ROOT, Reader, blocks, parse_arguments

from outeffhop.cli.main import _COMMANDS
from outeffhop.methods import METHODS

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
WITH_CODE = [name for name in NAMES if blocks((ROOT / name).read_text(), name)]


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """One in an empty folder; what a page registers is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / ".cache"))
    known = dict(METHODS)
    yield Reader()
    METHODS.clear()
    METHODS.update(known)


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_page_keeps_its_word(name, reader):
    reader.follow((ROOT / name).read_text(), name)


@pytest.mark.parametrize("name", NAMES)
def test_its_commands_between_the_lines_are_right(name):
    prose = FENCE.sub("", (ROOT / name).read_text())
    for command in re.findall(r"`outeffhop ([a-z][^`…]*)`", prose):
        words = shlex.split(command)
        assert words[0] in _COMMANDS
        if len(words) > 1:  # else the command is only spoken of
            parse_arguments(words)
    for file in re.findall(r"`python (\S+\.py)[^`]*`", prose):
        assert (ROOT / file).is_file(), file


@pytest.mark.parametrize("name", NAMES)
def test_its_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", FENCE.sub("", page.read_text())):
        assert (page.parent / target).exists(), target


def test_no_code_escapes():
    """Code stands in fences: what is indented four spaces would be shown as code and never run."""
    for name in NAMES:
        prose = FENCE.sub("", (ROOT / name).read_text())
        assert "```" not in prose, f"{name}: a fence that is not closed, or does not begin its line"
        assert not re.search(r"\n\n {4}(?![-*\d])\S", prose), f"{name}: an indented block of code"


def test_the_quickstart_runs_a_walk_and_names_every_command():
    page = (ROOT / "docs" / "quickstart.md").read_text()
    run = [block.text for block in blocks(page) if block.language == "sh" and "not run" not in block.notes]
    assert all(any(f"outeffhop {name}" in text for text in run) for name in ("train", "resume", "diagnose", "quantize"))
    assert not [name for name in _COMMANDS if f"outeffhop {name}" not in page]


@pytest.mark.parametrize(
    ("page", "what"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "prints"),
        ("```python\nprint(1)\n```\n", "prints"),
        ("```sh\nouteffhop methods\n```\n\n```text\nnever said\n```\n", "never said"),
        ("```sh\nouteffhop methods none\n```\n\n```text\n…\n```\n", "ends with 2"),
        ("<!-- exit: 2 -->\n```sh\nouteffhop methods\n```\n\n```text\n…\n```\n", "ends with 0"),
        ("```sh\nouteffhop methods\n```\n", "no output is shown"),
        ("<!-- not run: reason -->\n```sh\nrm x\n```\n", "cannot tell"),
        ("<!-- not run: reason -->\n```sh\nmake nothing\n```\n", "no target"),
        ("<!-- leaves: x -->\n```python\npass\n```\n", "did not leave"),
        ("<!-- skip: x -->\n```python\npass\n```\n", "a note is one of"),
        ("```java\n```\n", "language"),
    ],
)
def test_a_broken_page_is_seen(page, what, reader):
    with pytest.raises(AssertionError, match=what):
        reader.follow(page)


def test_a_wrong_command_line_is_seen(reader):
    page = "<!-- not run: reason -->\n```sh\nouteffhop train --out x --nonsense 3\n```\n"
    with pytest.raises(ValueError, match="unknown option: --nonsense"):
        reader.follow(page)


def test_the_tests_behind_the_promises_are_there():
    page = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"`([\w/*]+\.py)`", page)
    assert len(named) > 20
    assert not [name for name in named if not list((ROOT / "tests").glob(name))]
    promises = [row for row in re.findall(r"^\| .*\|$", page, re.M) if row.endswith(".` |") or ". |" in row]
    assert promises
    assert not [row for row in promises if ".py`" not in row]
