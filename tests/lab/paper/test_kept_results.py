"""The results kept in this repository are what their cells say."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from outeffhop.lab.paper import Result, Settings, drawing, mil, run
from outeffhop.lab.paper.registry import find

RESULTS = Path(__file__).parents[3] / "results"


@pytest.mark.skipif(not RESULTS.exists(), reason="the results are not in a source distribution")
@pytest.mark.parametrize("kept", sorted(RESULTS.glob("*/*/result.json")), ids=lambda file: "-".join(file.parts[-3:-1]))
def test_a_kept_result_is_what_its_cells_say(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "save", lambda *_: None)  # versions of matplotlib draw a letter otherwise
    experiment, scale = find(kept.parent.name), kept.parents[1].name.split("-")[0]  # small-all-prose is small, too
    result = Result.load(kept)
    for cells in kept.parents[1].glob("*/cells"):  # an experiment may look at another's
        shutil.copytree(cells, tmp_path / cells.parent.name / "cells")
    seeds = max(map(int, re.findall(r"\d+", str(result.conditions.get("seeds", 1)))))
    device = "cpu" if "CPU" in result.conditions["device"] else "cuda"  # nothing is measured: it need not be here
    settings = Settings(scale, seeds, tmp_path, tmp_path / "data", device=device)
    for name in experiment.needs(settings):
        (tmp_path / "data" / name).mkdir(parents=True)
        for bags in mil.FILES if name == "mil" else ():  # which there are decides what is asked
            (tmp_path / "data" / name / f"{bags}.npz").touch()
    keys = {file.stem for file in (kept.parent / "cells").glob("*.json")}
    assert keys <= {cell.key for cell in experiment.cells(settings)}

    def nothing_is_measured(line):
        assert "are there already" in line

    again = run(experiment, replace(settings, only=tuple(keys)), nothing_is_measured)
    assert json.loads(again.to_json()) == json.loads(kept.read_text())
    for figure in result.figures:
        assert (kept.parent / f"{figure.name}.svg").is_file()
        assert (kept.parent / f"{figure.name}.png").is_file()
