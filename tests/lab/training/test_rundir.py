"""A run's folder: nobody overwrites, nothing torn is read."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
from runs import config, environment, metrics

from outeffhop.lab.training import RunConfig, RunFolder, resume, rundir, train

HOLD = """
import sys
from outeffhop.lab.training import RunFolder
with RunFolder(sys.argv[1]).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def checkpoint(folder, step, keep=9, best=None, **files):
    """A made-up one, accepted as a true one is."""
    side = folder.side_folder(step)
    for name, content in (files or {"weights": f"weights of step {step}", "inner/state": "state"}).items():
        (side / name).parent.mkdir(exist_ok=True)
        (side / name).write_text(content)
    return folder.accept(side, step, keep, best)


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.create(RunConfig(data="builtin:text", out=str(tmp_path / "run")))
    return made


def steps(folder):
    return sorted(int(p.name.split("-")[1]) for p in folder.checkpoints.glob("checkpoint-*"))


def test_a_second_run_never_overwrites(whole_run, cache):
    out = whole_run("opt")
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match=r"already contains a run.*outeffhop resume"):
        train(config("opt", out, cache), quiet=True)
    with pytest.raises(ValueError, match="already contains a run"):
        RunFolder(out).create(RunConfig())
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before


def test_a_folder_of_other_files_is_left_alone(tmp_path, cache):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="contains other files"):
        train(config("opt", tmp_path, cache), quiet=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_mistake_does_not_use_the_folder_up(tmp_path, cache):
    """What was asked for cannot be: nothing has begun, and the same folder serves once it is mended."""
    with pytest.raises(ValueError, match=r"train\.batch_size=1000000"):
        train(config("vit", tmp_path / "a" / "b", cache, batch_size=1_000_000), quiet=True)
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"train\.batch_size=1000000"):
        train(config("vit", tmp_path / "a", cache, batch_size=1_000_000), quiet=True)
    assert not list((tmp_path / "a").iterdir())
    assert train(config("vit", tmp_path / "a", cache, max_steps=1), quiet=True).steps == 1


def test_two_processes_on_one_folder(tmp_path, cache):
    out = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], env=environment(), stdin=-1, stdout=-1, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another process is training in"):
            train(config("opt", out, cache), quiet=True)
        assert not RunFolder(out).exists
    finally:
        holder.kill()  # which gives the lock back
        holder.communicate()
    with RunFolder(out).locked():
        pass


def test_the_lock_ends_with_an_error(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RuntimeError, match="within"), folder.locked():
        raise RuntimeError("within")
    with folder.locked(), pytest.raises(ValueError, match="another process"), folder.locked():
        pass


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path, monkeypatch):
    """As that of a run that was refused between another one's opening and locking it."""
    take = rundir.fcntl.flock

    def taken(handle, how):
        (tmp_path / "run.lock").unlink()
        take(handle, how)

    monkeypatch.setattr(rundir.fcntl, "flock", taken)
    with pytest.raises(ValueError, match="another process"), RunFolder(tmp_path).locked():
        pass


def cut(path):
    path.write_bytes(path.read_bytes()[:-3])


def flip(path):
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda p: cut(p / "weights"), "weights has .* bytes, not"),
        (lambda p: flip(p / "weights"), "the content of weights has changed"),
        (lambda p: flip(p / "inner" / "state"), "the content of inner/state has changed"),
        (lambda p: (p / "weights").unlink(), "weights is missing"),
        (lambda p: shutil.rmtree(p / "inner"), "inner/state is missing"),
        (lambda p: (p / "manifest.json").unlink(), "its manifest.json cannot be read"),
        (lambda p: cut(p / "manifest.json"), "its manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_text("[1]"), "its manifest.json cannot be read"),
        (lambda p: (p / "manifest.json").write_bytes(b"\xff\x00"), "its manifest.json cannot be read"),
    ],
)
def test_a_torn_checkpoint_is_passed_over(folder, harm, why):
    checkpoint(folder, 9)
    whole, torn = checkpoint(folder, 10), checkpoint(folder, 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert folder.last_checkpoint() == torn
    harm(torn)
    with pytest.warns(UserWarning, match=f"checkpoint-100 is skipped: {why}"):
        assert folder.last_checkpoint() == whole


def test_a_folder_without_checkpoints(folder, tmp_path):
    assert folder.last_checkpoint() is None
    assert RunFolder(tmp_path / "nowhere").last_checkpoint() is None
    (folder.checkpoints / "checkpoint-best").mkdir()
    (folder.checkpoints / "checkpoint-3").write_text("a file")
    assert folder.last_checkpoint() is None


def test_the_oldest_go_first(folder):
    for step in (5, 10, 100, 1000):
        checkpoint(folder, step, keep=2)
    assert steps(folder) == [100, 1000]


def test_the_best_stays_as_long_as_it_is_the_best(folder):
    for step, best in ((5, 5), (10, 5), (100, 5)):
        checkpoint(folder, step, keep=1, best=best)
    assert steps(folder) == [5, 100]
    checkpoint(folder, 1000, keep=1, best=1000)
    assert steps(folder) == [1000]


def test_a_checkpoint_needs_the_best_of_its_time(folder):
    for step in (4, 6, 8):
        checkpoint(folder, step)
    bests = {4: 4, 6: 6, 8: 6}
    assert folder.last_checkpoint(lambda path: bests[int(path.name.split("-")[1])]).name == "checkpoint-8"
    flip(folder.checkpoints / "checkpoint-6" / "weights")
    with pytest.warns() as said:
        assert folder.last_checkpoint(lambda path: bests[int(path.name.split("-")[1])]).name == "checkpoint-4"
    assert "checkpoint-8 is skipped: checkpoint-6, the best at that step" in str(said[0].message)
    assert "checkpoint-6 is skipped" in str(said[1].message)


def test_a_damaged_checkpoint_does_not_push_whole_ones_out(folder):
    for step in (4, 6, 8):
        checkpoint(folder, step)
    flip(folder.checkpoints / "checkpoint-8" / "weights")
    flip(folder.checkpoints / "checkpoint-6" / "weights")
    checkpoint(folder, 6, keep=1)  # gone on from 4
    assert steps(folder) == [6]
    assert folder.last_checkpoint() == folder.checkpoints / "checkpoint-6"


def test_what_was_half_written_is_removed(folder):
    kept = checkpoint(folder, 4)
    (folder.side_folder(8) / "weights").write_text("half")
    (folder.path / ".tmp-model").mkdir()
    (folder.path / ".result.json.1234.tmp").write_text("{")
    assert folder.last_checkpoint() == kept
    folder.clean()
    assert [p.name for p in folder.checkpoints.iterdir()] == ["checkpoint-4"]
    assert sorted(p.name for p in folder.path.iterdir()) == ["checkpoints", "config.yaml"]
    assert folder.last_checkpoint() == kept


def test_a_side_folder_begins_empty(folder):
    (folder.side_folder(4) / "old").write_text("")
    assert list(folder.side_folder(4).iterdir()) == []


def test_metrics_with_a_cut_last_line(folder):
    assert folder.metrics() == []
    for step in (1, 2, 3):
        folder.append({"step": step, "loss": float("nan") if step == 2 else 0.5})
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3]
    assert folder.metrics()[1]["loss"] == "nan"  # JSON has none of its own
    cut(folder.metrics_file)
    assert [line["step"] for line in folder.metrics()] == [1, 2]
    folder.forget_after(2)
    folder.append({"step": 3})
    assert [line["step"] for line in folder.metrics()] == [1, 2, 3]
    folder.forget_after(1)
    assert [json.loads(line)["step"] for line in folder.metrics_file.read_text().splitlines()] == [1]


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind this user")
def test_a_folder_that_cannot_be_written_to(tmp_path, cache):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(ValueError, match="cannot be written to"):
            train(config("opt", tmp_path / "run", cache), quiet=True)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_at_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder("~/runs/a").path == tmp_path / "runs" / "a"


def test_a_file_in_the_folders_place(tmp_path, cache):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        train(config("opt", tmp_path / "run", cache), quiet=True)


def test_what_is_no_run(tmp_path):
    with pytest.raises(ValueError, match=r"is not a run: it has no config\.yaml"):
        resume(tmp_path)
    with pytest.raises(ValueError, match="out is missing"):
        train(RunConfig(data="builtin:text"))


def test_the_config_reads_back(whole_run):
    folder = RunFolder(whole_run("opt"))
    text = folder.config_file.read_text()
    assert text.startswith("# outeffhop train --config")
    assert folder.config().train.max_steps == 12
    assert metrics(folder.path)[-1]["step"] == 12


def test_a_run_of_an_earlier_version_is_not_continued(whole_run, tmp_path):
    shutil.copytree(whole_run("opt"), tmp_path / "a")
    env = json.loads((tmp_path / "a" / "env.json").read_text())
    env["packages"]["outeffhop"] = "0.1.0"
    (tmp_path / "a" / "env.json").write_text(json.dumps(env))
    with pytest.raises(RuntimeError, match=r"started by outeffhop 0\.1\.0.*continue it with that version"):
        resume(tmp_path / "a", quiet=True)
