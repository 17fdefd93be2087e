"""Table 2: its protocol, cells that were measured by an earlier one, and the claims about it."""

import dataclasses
import json
from pathlib import Path

import pytest

from outeffhop.lab.paper import Settings, drawing, published
from outeffhop.lab.paper.paper_settings import repeats
from outeffhop.lab.paper.registry import find
from outeffhop.lab.paper.result_file import KeptCell, ResultFile
from outeffhop.lab.paper.running import found_before
from outeffhop.lab.paper.table2 import FILES, WINDOWS, cut, cut_verdict
from outeffhop.lab.paper.training_runs import run_config

TABLE2 = find("table2")
RESULTS = Path(__file__).parents[3] / "results" / "small"


def printed():
    return {key: row._asdict() for key, row in published.TABLE2.items()}


def test_the_papers_protocol(tmp_path):
    settings = Settings(scale="paper", out=tmp_path, data=tmp_path, seeds=repeats("table2"))
    asked = TABLE2.cells(settings)
    assert len(asked) == 10 * 15 * 4  # "we repeat each experiment 10 times"
    assert {cell.values["epochs"] for cell in asked} == {100}
    assert {cell.values["data"] for cell in asked} == {"ETTh1", "ETTm1", "WTH"} < FILES.keys()
    train = run_config(settings, "stanhop", "outeffhop", 0, train={"max_steps": None, "epochs": 100}).train
    assert (train.epochs, train.max_steps, train.eval_steps, train.eval_batches) == (100, None, "epoch", None)
    assert (train.patience, train.keep_best) == (5, True)


def test_all_series_at_small_scale():
    asked = TABLE2.cells(Settings(scale="small", seeds=3))
    assert len(asked) == 3 * len(WINDOWS) * 4
    assert len({cell.values["epochs"] for cell in asked}) == 1


@pytest.mark.skipif(not RESULTS.exists(), reason="the results are not in a source distribution")
def test_kept_cells_of_the_earlier_rule_are_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(drawing, "save", lambda *_: None)
    settings = Settings(scale="small", seeds=3, out=RESULTS)
    kept = found_before(TABLE2, settings)
    old = {key: {k: v for k, v in cell.items() if k not in ("best_step", "patience")} for key, cell in kept.items()}
    result = TABLE2.conclude(old, settings, tmp_path)
    assert all(row[0].endswith(" †") for table in result.tables for row in table.rows)
    assert "earlier stopping rule" in result.tables[0].note
    # a forecast that is measured by the present rule is judged by it alone
    again = {
        key: {**cell, "best_step": 1, "patience": 5, "kurtosis": 1.0} for key, cell in old.items() if "-24-" in key
    }
    again = {key.removesuffix("0") + "1": cell for key, cell in again.items()}
    result = TABLE2.conclude({**old, **again}, settings, tmp_path)
    marked = {row[0] for row in result.tables[0].rows}
    assert {place for place in marked if "24" in place} == {"ETTh1, 24"}
    assert {row[4] for row in result.tables[0].rows if row[0] == "ETTh1, 24"} == {"1"}
    assert "patience 5 epochs" in result.conditions["stopping"]


def test_a_cell_may_have_been_asked_for_otherwise(tmp_path):
    """A kept cell counts with its earlier values, and with no others."""
    settings = Settings(scale="small", seeds=1, out=tmp_path)
    cell = TABLE2.cells(settings)[0]
    for asked, counts in ((cell.values, True), (cell.earlier, True), ({**cell.earlier, "steps": 1}, False)):
        kept = ResultFile("small", cells={cell.key: KeptCell(json.loads(json.dumps(asked)), {}, {"x": 1})})
        (tmp_path / "table2.json").write_text(kept.to_json())
        assert (cell.key in found_before(TABLE2, settings)) == counts


def test_the_papers_averages_of_its_own_table():
    """Against all three layers they are larger than claimed; against the dense ones alone they are near."""
    assert cut(printed(), "kurtosis") == pytest.approx(0.082, abs=5e-4)
    assert cut(printed(), "inf_norm") == pytest.approx(0.057, abs=5e-4)
    assert cut({}, "kurtosis") is None
    assert cut({("a", 24, "outeffhop"): {"kurtosis": 1.0}}, "kurtosis") is None


def forecasts(*own):
    """A forecast whose other layers have kurtosis 1; our own, over seeds."""
    others = {("a", 24, kind): [{"kurtosis": 1.0}] * len(own) for kind in published.FORECASTERS}
    return {**others, ("a", 24, "outeffhop"): [{"kurtosis": value} for value in own]}


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ((0.9, 0.91), "confirmed"),
        ((0.98, 0.98), "not seen"),  # less than claimed
        ((0.5, 1.2), "not seen"),  # within two standard errors
        ((1.1, 1.11), "contradicted"),
        ((0.5,), "not seen"),  # one seed
        ((), "not measured"),
    ],
)
def test_cut_verdict(own, said):
    assert cut_verdict(forecasts(*own), "kurtosis").verdict == said


def test_settings_of_a_trial_stay_short():
    assert {cell.values["steps"] for cell in TABLE2.cells(dataclasses.replace(Settings(), quick=True))} == {4}
