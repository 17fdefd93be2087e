"""tools/small_results.sh, with a stand-in for Python: that the cells it asks for are those there are."""

import os
import shutil
import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from outeffhop.lab.paper import published
from outeffhop.lab.paper.experiment import Settings
from outeffhop.lab.paper.registry import find

SCRIPT = Path(__file__).parents[3] / "tools" / "small_results.sh"


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("xargs")), reason="bash and xargs are needed")
def test_every_cell_is_asked_for_by_its_name(tmp_path):
    stand_in, calls = tmp_path / "python", tmp_path / "calls"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    stand_in.chmod(0o755)
    (tmp_path / "data").mkdir()
    done = subprocess.run(
        ["bash", SCRIPT, tmp_path / "data", tmp_path / "out", "--device", "cpu"],
        env={**os.environ, "PYTHON": str(stand_in), "EVERY": "0.1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    asked: dict[str, list[str]] = {}
    for words in map(str.split, calls.read_text().splitlines()):
        if "reproduce" in words:
            asked.setdefault(words[3], []).extend(words[words.index("--only") + 1 :])
    chief = [f"{model}-{method}-*" for model in published.NAMES for method in ("vanilla", "outeffhop")]
    wanted = {
        "table1": ["*-0", *chief],
        "training-outliers": ["*-0", *chief],
        "table2": ["*"],
        "convergence": ["*-0"],
        "beyond": ["*-0"],
        "cost": ["*"],
    }
    assert asked.keys() == wanted.keys()
    for name, patterns in wanted.items():
        cells = [cell.key for cell in find(name).cells(Settings(scale="small", seeds=3))]
        for one in asked[name]:
            assert any(fnmatchcase(cell, one) for cell in cells), f"{name} has no cell {one}"
        for cell in cells:
            needed, given = (any(fnmatchcase(cell, one) for one in several) for several in (patterns, asked[name]))
            assert needed == given, f"{name} {cell} is {'not ' if needed else ''}asked for"
