"""The site is built without a warning, loads nothing from elsewhere, and its reference has every public name."""

import doctest
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from blocks import ROOT

import outeffhop
from outeffhop.memory import HopfieldMemory

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

# what a browser fetches by itself: scripts, styles, pictures, frames, and what a style names
LOADED = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*?\bsrc=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|modulepreload))[^>]*?\bhref=["']?((?:https?:)?//[^"'\s>]+)"""
    r"""|(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert not built.stderr, built.stderr
    return folder


def loaded(text):
    return ["".join(groups) for groups in LOADED.findall(text)]


def test_nothing_is_loaded_from_elsewhere(site):
    files = [f for f in site.rglob("*") if f.suffix in (".html", ".css")]
    assert len(files) > 30
    assert not {f"{f.name}: {url}" for f in files for url in loaded(f.read_text())}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(("word", "found"), [("percentile", True), ("xyzzyplugh", False)])
def test_search_works_from_a_file(site, tmp_path, word, found):
    """A page opened as a file may neither fetch the index nor start a Worker."""
    page = (site / "howto" / "mend.html").as_uri() + f"?q={word}"
    quiet = ["--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", *quiet, "--disable-sync"]
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000", "--dump-dom", page]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    said = re.search(r'class="md-search-result__meta">\s*([^<]*?)\s*<', shown)
    assert said is not None
    assert bool(re.fullmatch(r"\d+ matching documents?", said[1])) == found, said[1]
    assert (said[1] == "No matching documents") != found, said[1]


def test_what_is_loaded_is_seen():
    assert loaded('<link href="https://a.b/x.css" rel="stylesheet">') == ["https://a.b/x.css"]
    assert loaded('<script defer src="//a.b/x.js"></script>') == ["//a.b/x.js"]
    assert loaded("@import url('https://a.b/font');") == ["https://a.b/font"]
    assert not loaded('<a href="https://a.b">a link</a><link rel="canonical" href="https://a.b/c">')


def test_the_reference_has_every_public_name(site):
    modules = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["MODULES"]
    pages = {path.stem: path.read_text() for path in (site / "reference").glob("*.html")}
    index = pages.pop("index")
    for module in modules:
        page = pages.pop(module.replace(".", "-"))
        for name in importlib.import_module(f"outeffhop.{module}").__all__:
            if f"{module}.{name}" in modules:  # a module, which has a page of its own
                continue
            assert re.search(rf'id="outeffhop\.[\w.]*{name}"', page), f"{module}.{name}"
            assert re.search(rf'href="[^"]+\.{name}"', index), f"{module}.{name}"
        assert "doc-symbol-module" not in page, "a module is shown where something in it has its name"
    assert not pages


def test_what_the_root_exports_is_on_the_list():
    modules = runpy.run_path(str(ROOT / "docs" / "hooks.py"))["MODULES"]
    public = {name for module in modules for name in importlib.import_module(f"outeffhop.{module}").__all__}
    assert set(outeffhop.__all__) <= public | {*modules, "lab"}


def test_pages_and_examples_use_public_names_alone():
    modules = {f"outeffhop.{m}" for m in runpy.run_path(str(ROOT / "docs" / "hooks.py"))["MODULES"]} | {"outeffhop"}
    texts = [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "examples").rglob("*.ipynb"),
    ]
    found = []
    for path in texts:
        text = path.read_text().replace('\\"', "")
        for module, names in re.findall(r"from (outeffhop[\w.]*) import ([\w, ]+)", text):
            known = set(importlib.import_module(module).__all__) if module in modules else set()
            found += [f"{path.name}: {module}.{n}" for n in map(str.strip, names.split(",")) if n not in known]
    assert not found


def test_formulas_are_mathml(site):
    for name in ("theory", "concepts"):
        page = (site / f"{name}.html").read_text()
        assert "<math" in page
        assert not re.search(r'class="arithmatex"|\\[a-z]+\{', page), name


def test_pictures_are_made_by_their_script(tmp_path):
    folder = ROOT / "docs" / "pictures"
    script = runpy.run_path(str(folder / "make.py"))
    for draw in ("no_op", "methods", "activations"):  # the examples are run by a test of their own
        script[draw](tmp_path)
    assert all((script["EXAMPLES"] / example).is_file() for example in script["FROM_EXAMPLES"].values())
    made = {p.name for p in tmp_path.iterdir()} | script["FROM_EXAMPLES"].keys()
    assert made == {p.name for p in folder.iterdir() if p.suffix in (".svg", ".png")}
    pages = [page.read_text() for page in (ROOT / "docs").rglob("*.md")]
    assert made == {name for page in pages for name in re.findall(r"pictures/([\w-]+\.\w+)", page)}


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(Path(outeffhop.__file__).parent.rglob("*.py")) if ">>>" in p.read_text()],
    ids=lambda p: p.stem,
)
def test_examples_in_docstrings(path):
    name = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
    given = {"torch": torch, "HopfieldMemory": HopfieldMemory}
    found = doctest.testmod(importlib.import_module(name), extraglobs=given)
    assert found.attempted
    assert not found.failed


def test_citation_and_changes_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == outeffhop.__version__
    assert [len(paper["authors"]) for paper in citation["references"]] == [7]
    assert outeffhop.__version__ in (ROOT / "CHANGELOG.md").read_text()
