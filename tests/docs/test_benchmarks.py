"""benchmarks/all.py: what it runs, keeps and reports. The benchmarks themselves are replaced by small scripts."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPT = """
import argparse, datetime, json, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--device"), parser.add_argument("--out", type=Path)
arguments, _ = parser.parse_known_args()
arguments.out.write_text(json.dumps({"date": datetime.date.today().isoformat(), "rows": [arguments.device]}))
"""


@pytest.fixture
def folder(tmp_path):
    """The script beside benchmarks that take no time."""
    (tmp_path / "all.py").write_text((BENCHMARKS / "all.py").read_text())
    for name in ("attention", "calls", "layer"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
    return tmp_path


def run(folder, *arguments):
    command = [sys.executable, folder / "all.py", "--only", "attention", "calls", "layer", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def dated(path, date):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"date": date, "rows": ["old"]}))


def test_every_result_is_kept_and_none_measured_twice(folder):
    results = folder / "results"
    dated(results / "calls-cuda.json", "2020-01-01")
    dated(results / "layer-cuda.json", datetime.date.today().isoformat())
    code, out = run(folder, "--device", "cuda")
    assert code == 0, out
    rows = {
        name: json.loads((results / f"{name}-cuda.json").read_text())["rows"]
        for name in ("attention", "calls", "layer")
    }
    assert rows == {"attention": ["cuda"], "calls": ["cuda"], "layer": ["old"]}
    assert "layer: " in out
    assert "kept" in out
    dated(results / "calls-cuda.json", "2020-01-01")
    code, _ = run(folder, "--device", "cuda", "--since", "2019-12-31")
    assert json.loads((results / "calls-cuda.json").read_text())["rows"] == ["old"]


def test_a_failure_keeps_the_old_result_and_the_others_run(folder):
    results = folder / "results"
    dated(results / "attention-cpu.json", "2020-01-01")
    (folder / "attention.py").write_text(SCRIPT + "raise SystemExit(3)\n")  # after it has written
    (folder / "calls.py").write_text("import time\ntime.sleep(60)\n")
    code, out = run(folder, "--limit", "0.08")
    assert code == 1
    assert "attention: failed with exit status 3" in out
    assert "calls: stopped after 0.08 minutes" in out
    assert "2 of 3 without a result: attention, calls" in out
    assert json.loads((results / "attention-cpu.json").read_text())["rows"] == ["old"]
    assert json.loads((results / "layer-cpu.json").read_text())["rows"] == ["cpu"]
    assert sorted(p.name for p in results.iterdir()) == ["attention-cpu.json", "layer-cpu.json"]


def test_quick_figures_do_not_become_results(folder):
    code, out = run(folder, "--quick")
    assert code == 2
    assert "--out" in out


def test_every_benchmark_is_a_script():
    names = subprocess.run(
        [sys.executable, BENCHMARKS / "all.py", "--only", "none"], capture_output=True, text=True
    ).stderr
    listed = names.partition("choose from")[2].replace("'", "").strip(" )\n").split(", ")
    assert "attention" in listed
    for name in listed:
        assert (BENCHMARKS / f"{name.replace('-', '_')}.py").is_file(), name
