"""Cells are measured once, whatever happens in between; results survive their files; ranks mark what is best."""

import dataclasses
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import outeffhop
from outeffhop.lab.paper import run
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Verdict
from outeffhop.lab.paper.ranking import mean_std, number_of, places, ranks, shown
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.result_file import KeptCell, ResultFile
from outeffhop.lab.paper.running import found_before, one_thread

# An experiment in a module of its own: worker processes import what they measure.
MODULE = """
import os, time
from pathlib import Path
from outeffhop.lab.paper.experiment import Cell, Experiment, Result

def cells(settings):
    return [Cell(f"square-{i}", {"number": i}) for i in range(4)]

def measure(cell, settings):
    with open(settings.out / "measured.txt", "a") as log:
        log.write(cell.key + "\\n")
    if (settings.out / "hang").exists() and str(cell.values["number"]) in (settings.out / "hang").read_text():
        (settings.out / f"{cell.key}.pid").write_text(str(os.getpid()))
        time.sleep(600)
    if cell.values["number"] == 0 and (settings.out / "fail").exists():
        raise ValueError("number 0 cannot be measured")
    return {"square": cell.values["number"] ** 2}

def conclude(found, settings, folder):
    assert list(found) == [cell.key for cell in cells(settings)][: len(found)]
    return Result("squares", "none", "squares", conditions={"sum": sum(v["square"] for v in found.values())})

EXPERIMENT = Experiment("squares", "none", "squares", cells, measure, conclude)
"""


@pytest.fixture
def squares(tmp_path, monkeypatch):
    (tmp_path / "squares_experiment.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.delitem(sys.modules, "squares_experiment", raising=False)
    import squares_experiment

    return squares_experiment.EXPERIMENT


def measured(out):
    log = out / "measured.txt"
    return log.read_text().split() if log.exists() else []


def quiet(line):
    pass


def test_a_finished_cell_is_not_measured_again(squares, tmp_path):
    settings = Settings(out=tmp_path)
    first = run(squares, settings, quiet)
    assert measured(tmp_path) == [f"square-{i}" for i in range(4)]
    lines = []
    second = run(squares, settings, lines.append)
    assert len(measured(tmp_path)) == 4
    assert lines == ["squares: 4 of 4 cells were measured earlier"]
    assert first.conditions["sum"] == second.conditions["sum"] == 14


def test_a_result_says_where_its_cells_were_measured(squares, tmp_path):
    here = run(squares, Settings(out=tmp_path), quiet).conditions
    assert here["device"].endswith(f"CPU cores ({platform.machine()})")
    assert here["torch"] == torch.__version__
    kept = ResultFile.load(tmp_path / "squares.json")
    kept.cells["square-1"].machine.update(device="another", date="2001-02-03")
    (tmp_path / "squares.json").write_text(kept.to_json())
    both = run(squares, Settings(out=tmp_path), quiet).conditions
    assert len(measured(tmp_path)) == 4
    assert sorted(both["device"].split("; ")) == sorted(["another", here["device"]])
    assert both["torch"] == here["torch"]
    assert both["date"] == f"2001-02-03 to {here['date']}"


def test_what_was_found_before_is_read_and_nothing_measured(squares, tmp_path):
    assert found_before(squares, Settings(out=tmp_path)) == {}
    run(squares, Settings(out=tmp_path), quiet)
    assert found_before(squares, Settings(out=tmp_path))["square-3"] == {"square": 9}
    assert found_before(squares, Settings(out=tmp_path, scale="small")) == {}
    assert len(measured(tmp_path)) == 4


@pytest.mark.parametrize("torn", ["", '{"scale": "tiny", "ce', "[]", '{"scale": "tiny", "cells": {"square-1": {}}}'])
def test_a_damaged_file_is_not_written_over(squares, tmp_path, torn):
    """It may hold hours of measurements."""
    file = tmp_path / "squares.json"
    file.write_text(torn)
    with pytest.raises(ValueError, match=re.escape(str(file))):
        run(squares, Settings(out=tmp_path), quiet)
    assert file.read_text() == torn
    assert measured(tmp_path) == []


def test_a_changed_number_is_not_taken_for_a_measured_one(squares, tmp_path):
    run(squares, Settings(out=tmp_path), quiet)
    file = tmp_path / "squares.json"
    kept = json.loads(file.read_text())
    assert kept["result"]["cells"] == list(kept["cells"]) == [f"square-{i}" for i in range(4)]
    file.write_text(file.read_text().replace('"square": 9', '"square": 8'))
    with pytest.raises(ValueError, match=r"squares\.json has changed since it was written"):
        run(squares, Settings(out=tmp_path), quiet)


def test_a_question_asked_otherwise_is_measured_anew(squares, tmp_path):
    run(squares, Settings(out=tmp_path), quiet)
    changed = dataclasses.replace(
        squares, cells=lambda settings: [Cell("square-0", {"number": 0}), Cell("square-1", {"number": 10})]
    )
    assert run(changed, Settings(out=tmp_path), quiet).conditions["sum"] == 100
    assert measured(tmp_path)[4:] == ["square-1"]


@pytest.mark.parametrize("other", [{"quick": True}, {"scale": "small"}])
def test_cells_are_not_written_over_by_another_scale_or_a_trial(squares, tmp_path, other):
    before = run(squares, Settings(out=tmp_path), quiet)
    with pytest.raises(ValueError, match=r"out='.*' holds cells of squares with scale='tiny': those .* another out"):
        run(squares, Settings(out=tmp_path, **other), quiet)
    assert run(squares, Settings(out=tmp_path), quiet) == before
    assert len(measured(tmp_path)) == 4


def test_a_trial_gives_way(squares, tmp_path):
    run(squares, Settings(out=tmp_path, quick=True), quiet)
    assert "cut down" not in run(squares, Settings(out=tmp_path), quiet).conditions["scale"]
    assert len(measured(tmp_path)) == 8


def hanging(out, numbers, workers=1):
    """A process that measures until it hangs at these numbers, and the processes that hang."""
    (out / "hang").write_text(numbers)
    code = (
        "from pathlib import Path; from squares_experiment import EXPERIMENT; "
        "from outeffhop.lab.paper import Settings, run; "
        f"run(EXPERIMENT, Settings(out=Path({str(out)!r}), workers={workers}))"
    )
    begun = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, start_new_session=True)
    marks = [out / f"square-{number}.pid" for number in numbers]
    wait_for(lambda: begun.poll() is not None or all(mark.exists() and mark.read_text() for mark in marks))
    assert begun.poll() is None
    return begun, [int(mark.read_text()) for mark in marks]


def wait_for(what):
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_experiment_goes_on_where_it_stopped(squares, tmp_path):
    process, _ = hanging(tmp_path, "2")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    kept = ResultFile.load(tmp_path / "squares.json")
    assert kept.result is None
    assert list(kept.cells) == ["square-0", "square-1"]
    (tmp_path / "hang").unlink()
    assert run(squares, Settings(out=tmp_path), quiet).conditions["sum"] == 14
    assert measured(tmp_path) == ["square-0", "square-1", "square-2", "square-2", "square-3"]


def test_workers_end_with_the_process_that_started_them(squares, tmp_path):
    process, workers = hanging(tmp_path, "01", workers=2)
    assert process.pid not in workers
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))


def test_after_an_interruption_no_other_cell_begins(squares, tmp_path):
    process, _ = hanging(tmp_path, "01", workers=2)
    os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C sends
    assert process.wait(120) != 0
    assert sorted(measured(tmp_path)) == ["square-0", "square-1"]


def test_two_workers_find_what_one_finds(squares, tmp_path):
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    run(squares, Settings(out=tmp_path / "one"), quiet)
    run(squares, Settings(out=tmp_path / "two", workers=2), quiet)
    assert sorted(measured(tmp_path / "two")) == measured(tmp_path / "one")
    assert (tmp_path / "two" / "squares.json").read_text() == (tmp_path / "one" / "squares.json").read_text()


def test_processes_add_cells_to_one_file(tmp_path):
    """Each of them replaces the whole file; none loses a cell of another."""
    code = (
        "import sys; from pathlib import Path; from outeffhop.lab.paper.experiment import Settings; "
        "from outeffhop.lab.paper.result_file import KeptCell, add_cell; "
        f"settings = Settings(out=Path({str(tmp_path)!r})); "
        "[add_cell('squares', settings, f'{sys.argv[1]}-{i}', KeptCell({}, {}, {'i': i})) for i in range(40)]"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    kept = ResultFile.load(tmp_path / "squares.json").cells
    assert {key: cell.found["i"] for key, cell in kept.items()} == {f"{n}-{i}": i for n in "abc" for i in range(40)}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cell_that_fails_is_said_and_loses_no_other(squares, tmp_path, workers):
    (tmp_path / "fail").touch()
    with pytest.raises(ValueError, match="number 0 cannot be measured"):
        run(squares, Settings(out=tmp_path, workers=workers), quiet)
    begun = set(measured(tmp_path)) - {"square-0"}
    kept = tmp_path / "squares.json"
    assert set(ResultFile.load(kept).cells if kept.exists() else ()) == begun
    (tmp_path / "fail").unlink()
    assert run(squares, Settings(out=tmp_path), quiet).conditions["sum"] == 14
    assert len(measured(tmp_path)) == 5


def test_some_cells_alone(squares, tmp_path):
    partial = dataclasses.replace(squares, partial=True)
    only = Settings(out=tmp_path, only=("square-[01]",))
    assert run(partial, only, quiet).conditions["cells"] == "2 of 4 are measured"
    assert measured(tmp_path) == ["square-0", "square-1"]
    with pytest.raises(ValueError, match="squares needs all of its 4 cells"):
        run(squares, only, quiet)
    with pytest.raises(ValueError, match=r"only='opt-\*': matches no cell of squares; choose from square-0, square-1"):
        run(partial, dataclasses.replace(only, only=("square-*", "opt-*")), quiet)  # one that fits excuses no other
    rest = run(squares, dataclasses.replace(only, only=("square-2", "square-3")), quiet)  # with those measured earlier
    assert rest.conditions["sum"] == 14
    assert "cells" not in rest.conditions


def test_what_another_process_measured_meanwhile_is_in_the_result(squares, tmp_path):
    partial = dataclasses.replace(squares, partial=True)

    def measure(cell, settings):
        run(partial, Settings(out=tmp_path, only=("square-0",)), quiet)
        return squares.measure(cell, settings)

    both = run(dataclasses.replace(partial, measure=measure), Settings(out=tmp_path, only=("square-1",)), quiet)
    assert both.conditions["cells"] == "2 of 4 are measured"
    assert both.conditions["sum"] == 1


def test_cells_of_time_are_measured_one_at_a_time(squares, tmp_path):
    here = []
    alone = dataclasses.replace(squares, alone=True, measure=lambda cell, _: here.append(cell) or {"square": 1})
    run(alone, Settings(out=tmp_path, workers=2), quiet)
    assert len(here) == 4  # in this process
    assert find("cost").alone


def test_missing_data_is_said_before_anything_is_measured(squares, tmp_path):
    needy = dataclasses.replace(squares, needs=lambda settings: ("mnist",))
    for data in (None, tmp_path):
        with pytest.raises(ValueError, match=r"squares at scale='tiny' needs the folder 'mnist'.*--data FOLDER"):
            run(needy, Settings(out=tmp_path, data=data), quiet)
    assert measured(tmp_path) == []
    (tmp_path / "mnist").mkdir()
    assert run(needy, Settings(out=tmp_path, data=tmp_path), quiet).conditions["sum"] == 14


def test_a_result_is_read_as_it_was_written(tmp_path):
    table = Table("t", ["a", "b"], [["x", 1.5], ["y", "2 ± 1"]], {"b": "low"}, None, "n")
    result = Result("n", "of", "about", [table], [Figure("f", "t", "c")], [Verdict("c", "not seen", "1")], {"k": 1})
    cells = {"c": KeptCell({"seed": 0}, {"date": "today"}, {"loss": math.inf, "curve": [1.5, -math.inf]})}
    (tmp_path / "n.json").write_text(ResultFile("small", False, 3, result, cells).to_json())
    again = ResultFile.load(tmp_path / "n.json")
    assert again.result.to_json() == result.to_json()
    assert (again.scale, again.quick, again.seeds, again.cells) == ("small", False, 3, cells)
    assert again.to_json() == (tmp_path / "n.json").read_text()


def test_a_table_holds_text_and_numbers():
    with pytest.raises(ValueError, match=r"table 't' has an entry that is neither text nor a number: \[1\]"):
        Table("t", ["a", "b"], [["x", 1.5], [[1], None]], {"b": "low"}, "a")


def test_a_field_that_does_not_belong_is_named_on_one_line(tmp_path):
    (tmp_path / "n.json").write_text('{"scale": "tiny", "\\n": null}')
    with pytest.raises(ValueError, match=r"'.n' is unknown\. Available: scale"):
        ResultFile.load(tmp_path / "n.json")


def test_every_name_has_its_experiment():
    for name in NAMES:
        experiment = find(name)
        assert isinstance(experiment, Experiment)
        assert experiment.name == name
        assert experiment.of
        assert experiment.about
        assert len({cell.key for cell in experiment.cells(Settings(quick=True))}) > 0
    with pytest.raises(ValueError, match="name='enrgy' is unknown; did you mean 'energy'"):
        find("enrgy")


def test_numbers_that_look_equal_share_a_place():
    assert places(["4.487 ± 0.1", "4.487", "−3", "5"]) == [2, 2, 1, 4]


def test_ranks_within_groups():
    rows = [["a", "p", "1.5 ± 0.2", 3], ["a", "q", "2 ± 0.1", 3], ["a", "r", "2.0", 3], ["a", "s", "9", "none"]]
    rows += [["b", "p", -1.0, 7], ["b", "q", "no number", 8]]
    table = Table("t", ["g", "m", "low", "high"], rows, {"low": "low", "high": "high"}, "g")
    # equal numbers share a rank; a group of equal numbers, or of one, has no best
    assert ranks(table) == {(0, 2): 1, (1, 2): 2, (2, 2): 2, (5, 3): 1, (4, 3): 2}
    # after two that are best none is second, as in the paper's tables; nor is what is not finite
    for rows, marked in (
        ([[0.36], ["0.36 ± 0.1"], [0.376]], {(0, 0): 1, (1, 0): 1}),
        ([[2.0], [math.inf], [1.0], [math.nan]], {(2, 0): 1, (0, 0): 2}),
        # within the larger of their deviations two numbers are a tie
        ([["1 ± 0.1"], ["1.2 ± 0.3"], ["1.4 ± 0.3"]], {(0, 0): 1, (1, 0): 1}),
        ([["1 ± 0.1"], ["1.2 ± 0.1"], ["1.25 ± 0.1"]], {(0, 0): 1, (1, 0): 2, (2, 0): 2}),
        ([["1 ± 0.5"], ["1.2 ± 0.1"]], {}),
        ([[1.0], [math.inf]], {}),
    ):
        assert ranks(Table("t", ["low"], rows, {"low": "low"})) == marked


def test_numbers_of_entries():
    assert [number_of(e) for e in (3, 2.5, "1e-3 ± 1", ".5", "-2", "W8A8", "", True)] == [
        *(3.0, 2.5, 0.001, 0.5, -2.0),
        *(None, None, None),
    ]
    assert mean_std([1.0, 3.0]) == "2 ± 1.4"
    assert mean_std([0.25]) == "0.25"
    assert mean_std([-1.0, -3.0]) == "−2 ± 1.4"
    assert mean_std([math.inf, 3.0]) == "inf"  # a perplexity beyond all bounds, in one seed of several
    assert mean_std([math.nan, 3.0]) == "nan"
    assert number_of(mean_std([-1.0, -3.0])) == -2.0


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "120"), (-0.00532, "−0.0053"), (99.5, "100"), (0.5, "0.5"), (2.5e7, "2.5e+07"), (1e-9, "1e−09")],
)
def test_a_number_is_shown_as_people_write_it(value, text):
    assert shown(value, 2) == text
    assert number_of(text) == pytest.approx(value, rel=0.05)


def test_one_thread_gives_the_threads_back():
    before = torch.get_num_threads()
    seen = []

    @one_thread()
    def fails():
        seen.append(torch.get_num_threads())
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert seen == [1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("module", ["registry", "experiment", "ranking", "result_file", "running", "drawing"])
def test_what_the_command_line_reads_imports_nothing_heavy(module):
    """``outeffhop`` itself is replaced by a bare package: what it imports is tested in tests/test_imports.py."""
    code = (
        "import importlib, sys, types; package = types.ModuleType('outeffhop'); "
        f"package.__path__ = [{str(Path(outeffhop.__file__).parent)!r}]; sys.modules['outeffhop'] = package; "
        f"importlib.import_module('outeffhop.lab.paper.{module}'); import outeffhop.lab.report; "
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'numpy') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
