"""The results kept in this repository are what their cells say."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from outeffhop.lab.paper import Settings, drawing, mil, run
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.result_file import ResultFile

RESULTS = Path(__file__).parents[3] / "results"
KEPT = [path for name in NAMES for path in sorted(RESULTS.glob(f"*/{name}.json"))]


@pytest.mark.skipif(not RESULTS.exists(), reason="the results are not in a source distribution")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_kept_result_is_what_its_cells_say(path, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "save", lambda *_: None)  # tests/docs/test_results_page.py is about figures
    for other in path.parent.glob("*.json"):  # an experiment may look at another's cells
        shutil.copy(other, tmp_path)
    experiment, kept = find(path.stem), ResultFile.load(path)
    device = "cpu" if "CPU" in kept.result.conditions["device"] else "cuda"  # nothing is measured: it need not be here
    data = tmp_path / "data"
    settings = Settings(kept.scale, kept.seeds, tmp_path, data, device=device, only=tuple(kept.cells))
    for name in ("mnist", "cifar10", "mil"):  # which there are decides which cells there are
        (data / name).mkdir(parents=True)
    for bags in mil.FILES:
        (data / "mil" / f"{bags}.npz").touch()

    def nothing_is_measured(line):
        assert re.fullmatch(rf"{path.stem}: {len(kept.cells)} of \d+ cells were measured earlier", line)

    again = run(experiment, settings, nothing_is_measured)
    assert json.loads(again.to_json()) == json.loads(kept.result.to_json())
    assert (tmp_path / path.name).read_text() == path.read_text()
    if path.stem not in ("mil", "memory-capacity", "noise-robustness"):
        run(experiment, replace(settings, data=None), nothing_is_measured)  # data is needed only to measure


def test_there_are_kept_results():
    assert len(KEPT) == 0 if not RESULTS.exists() else len(KEPT) > 10
