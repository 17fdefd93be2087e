"""The notebooks run from top to bottom, cut down to seconds, and print what is kept in them, numbers aside."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
# what depends on the steps: numbers, and which tensor is the worst
CHANGING = re.compile(r"model\.decoder[\w./]*|[+-]?\d[\d,]*\.?\d*(e[+-]?\d+)?")
FEWER = {"STEPS": 3, "BATCHES": 1}


def printed(notebook):
    """Of each code cell: its lines, with # for what changes and one space between words."""
    text = [
        "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    return [[" ".join(CHANGING.sub("#", line).split()) for line in cell.splitlines()] for cell in text]


def pictures(notebook):
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return sum("image/png" in o.get("data", {}) for o in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_does_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "tokens"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    for cell in fresh.cells:
        if "parameters" in cell.metadata.get("tags", []):
            for name, value in FEWER.items():
                cell.source, found = re.subn(rf"^{name} = \d+", f"{name} = {value}", cell.source, flags=re.M)
                assert found == 1
    # the first picture costs a look through all fonts
    NotebookClient(fresh, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert printed(fresh) == printed(kept)
    assert pictures(fresh) == pictures(kept) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_kept_is_small_and_clean(path):
    assert path.stat().st_size < 60_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", []):
            assert cell.execution_count
            assert not [o for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_there_are_two():
    assert [p.stem for p in NOTEBOOKS] == ["memory", "outliers_and_quantization"]
