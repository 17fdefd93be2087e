"""A clock that goes back: nothing here is ordered by it, so nothing changes."""

import io
import os
import re
import shutil
import time

import pytest
from rich.console import Console

from outeffhop.cli import console
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.paper import run
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, callbacks, resume, train

SIZES = dict(e_layers=1, d_model=16, d_ff=32, num_heads=2)


def config(out):
    often = dict(max_steps=6, batch_size=4, eval_steps=3, eval_batches=1, log_steps=1, save_steps=2, outlier_batches=1)
    settings = TrainConfig(device="cpu", keep=5, **often)
    return RunConfig(
        "stanhop", data="builtin:series", out=str(out), changes=SIZES, train=settings, samples=DataConfig()
    )


@pytest.fixture
def backwards(monkeypatch):
    """Every look at the clock finds it an hour earlier."""
    now = [time.time()]

    def earlier():
        now[0] -= 3600.0
        return now[0]

    monkeypatch.setattr(time, "time", earlier)
    monkeypatch.setattr(time, "time_ns", lambda: int(earlier() * 1e9))


def terminal(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    return screen


def content(out):
    lines = [{k: v for k, v in line.items() if not k.endswith("_per_second")} for line in RunFolder(out).metrics()]
    return (out / "model" / "model.safetensors").read_bytes(), lines, (out / "result.json").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("clock") / "run"
    train(config(out), quiet=True)
    return out


def test_a_run_with_its_bar(whole, backwards, monkeypatch, tmp_path):
    """On a terminal, where the bar tells the time that remains."""
    screen = terminal(monkeypatch)
    monkeypatch.setattr(callbacks.sys, "stdout", screen)
    monkeypatch.setattr("rich.get_console", lambda: Console(file=screen, force_terminal=True, width=120))
    train(config(tmp_path / "run"))
    assert content(tmp_path / "run") == content(whole)
    assert "6/6" in screen.getvalue()
    assert not re.search(r"(?<!e)-\d", screen.getvalue())  # no negative time, nor speed
    speeds = [v for line in RunFolder(tmp_path / "run").metrics() for k, v in line.items() if k.endswith("_per_second")]
    assert speeds
    assert all(0 < speed < 1e6 for speed in speeds)  # by a clock that stood still it would be any number


def test_the_last_checkpoint_is_the_one_of_most_steps(whole, backwards, tmp_path):
    """Though its files are the oldest; and a run goes on from it."""
    shutil.copytree(whole, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    (folder.path / "result.json").unlink()
    for step in (2, 4, 6):
        for path in (folder.checkpoints / f"checkpoint-{step}").rglob("*"):
            os.utime(path, (1e9 - step * 1e6,) * 2)
        os.utime(folder.checkpoints / f"checkpoint-{step}", (1e9 - step * 1e6,) * 2)
    assert folder.last_checkpoint().name == "checkpoint-6"
    resume(folder.path, quiet=True)
    assert content(folder.path) == content(whole)


def test_locks(backwards, tmp_path):
    """They are the system's, and have no age; a lock file of the future is no lock."""
    folder = RunFolder(tmp_path)
    (tmp_path / "run.lock").touch()
    os.utime(tmp_path / "run.lock", (4e9, 4e9))
    with folder.locked(), pytest.raises(ValueError, match="another process"), folder.locked():
        pass
    with folder.locked():
        pass


def test_the_bar_of_measuring(backwards, monkeypatch):
    screen = terminal(monkeypatch)
    monkeypatch.setattr(console.sys, "stderr", screen)
    with console.progress(3) as tell:
        for done in range(4):
            tell(f"batch {done}", done)
    assert "batch 3" in screen.getvalue()
    assert "-1 day" not in screen.getvalue()


def test_what_a_kill_left_in_the_cache_is_swept_by_age_and_never_too_early(backwards, tmp_path):
    """Files of the future stay; so does a build that lasts for days, as long as it writes."""
    for name, folder_age, file_age in (("future", -1e8, -1e8), ("lasting", 3e6, 0.0), ("left", 3e6, 3e6)):
        folder = tmp_path / f".tokens-{name}.1a2b3c4d.tmp"
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"half")
        begun = os.stat(tmp_path).st_mtime
        os.utime(folder / "tokens.bin", (begun - file_age,) * 2)
        os.utime(folder, (begun - folder_age,) * 2)

    def build(folder):
        (folder / "tokens.bin").write_bytes(b"whole")
        return {}

    entry, _ = DiskCache(tmp_path).get("tokens", {}, build)
    assert (entry / "tokens.bin").read_bytes() == b"whole"
    kept = {p.name.split("-")[1].split(".")[0] for p in tmp_path.glob(".*")}
    assert kept == {"future", "lasting"}


def test_cells_of_an_experiment_have_no_age(backwards, tmp_path):
    experiment = Experiment(
        "squares",
        "none",
        "squares",
        cells=lambda settings: [Cell("two", {"number": 2})],
        measure=lambda cell, settings: {"square": cell.values["number"] ** 2},
        conclude=lambda found, settings, folder: Result("squares", "none", "squares", conditions=found),
    )
    lines = []
    for _ in range(2):
        assert run(experiment, Settings(out=tmp_path), lines.append).conditions["two"] == {"square": 4}
        os.utime(tmp_path / "squares.json", (4e9, 4e9))
    assert lines == ["squares: two (1 of 1)", "squares: 1 of 1 cells were measured earlier"]
