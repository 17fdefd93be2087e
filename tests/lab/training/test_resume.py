"""Killed at any moment, a run goes on from its last whole checkpoint to the numbers it would have had."""

import dataclasses
import json
import random
import shutil

import pytest
import torch
from runs import config, finish, metrics, result, start, weight_bytes

from outeffhop.lab.training import RunFolder, resume, train
from outeffhop.lab.training.config import to_yaml

KILLING = "import killing; killing.main()"


@pytest.fixture(autouse=True)
def one_thread():
    """As the processes that are killed have: the order of a sum depends on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(first, second):
    assert weight_bytes(first) == weight_bytes(second)
    assert metrics(first) == metrics(second)
    assert result(first) == result(second)
    leftovers = [p.name for p in (*second.glob(".*"), *(second / "checkpoints").glob(".*"))]
    assert leftovers == []


def killed(run, tmp_path, *traps):
    """The folder of a run that died in each of the traps."""
    out = tmp_path / "killed"
    file = tmp_path / "killed.yaml"
    file.write_text(to_yaml(dataclasses.replace(run, out=str(out))))
    finish(start(KILLING, file, json.dumps(traps)))
    return out


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_killed_at_random_steps(seed, whole_run, cache, tmp_path):
    draw, begin, traps = random.Random(seed), 0, []
    for _ in range(4):  # steps are counted from where an attempt begins: the last checkpoint, one at every fourth
        traps.append([draw.choice(["step", "update"]), draw.randint(1, 12 - begin)])
        begin += (traps[-1][1] - 1) // 4 * 4
    same(whole_run("opt"), killed(config("opt", "", cache), tmp_path, *traps))


def test_killed_while_files_are_written(whole_run, cache, tmp_path):
    out = killed(
        config("opt", "", cache),
        tmp_path,
        ["json", 1],  # the config is there and nothing else
        ["line", 1],
        ["writing", 1],
        ["rename", 1],
        ["writing", 2],
        ["rename", 2],
        ["line", 3],
        ["json", 2],
    )
    same(whole_run("opt"), out)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bert", "stanhop"])
def test_with_dropout(model, whole_run, cache, tmp_path):
    """Its random numbers are the ones that would have come."""
    same(whole_run(model), killed(config(model, "", cache), tmp_path, ["step", 7], ["rename", 1]))


def test_at_the_end_of_an_epoch(cache, tmp_path):
    """Five steps an epoch, checkpoints there: killed in the step before one, and in the one after."""
    run = config("vit", tmp_path / "whole", cache, batch_size=240, max_steps=11, save_steps=5, eval_steps=5)
    train(run, quiet=True)
    assert {line["epoch"] for line in metrics(run.out) if "epoch" in line} >= {1.0, 2.0}
    out = killed(run, tmp_path, ["step", 6], ["step", 5], ["step", 6])
    same(tmp_path / "whole", out)


@pytest.mark.slow
def test_with_accumulation_and_few_checkpoints_kept(cache, tmp_path):
    run = config("bert", tmp_path / "whole", cache, accumulate=2, keep=1, save_steps=3, log_steps=2)
    train(run, quiet=True)
    out = killed(run, tmp_path, ["step", 9], ["rotate", 1], ["step", 8])
    same(tmp_path / "whole", out)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["checkpoint-12"]


def copied(run, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(run, out)
    return out


@pytest.mark.parametrize("model", ["vit", "stanhop"])
def test_killed_between_the_last_checkpoint_and_the_result(model, whole_run, tmp_path):
    """Schedules that do not end at 0: one step too many would show in the weights."""
    out = copied(whole_run(model), tmp_path)
    (out / "result.json").unlink()
    shutil.rmtree(out / "model")
    assert resume(out, quiet=True).steps == 12
    same(whole_run(model), out)


def test_a_torn_checkpoint_costs_its_steps_alone(whole_run, tmp_path):
    out = copied(whole_run("opt"), tmp_path)
    (out / "result.json").unlink()
    torn = out / "checkpoints" / "checkpoint-12" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"checkpoint-12 is skipped: model\.safetensors has"):
        resume(out, quiet=True)
    same(whole_run("opt"), out)


def test_without_any_whole_checkpoint_it_begins_again(whole_run, tmp_path):
    out = copied(whole_run("opt"), tmp_path)
    (out / "result.json").unlink()
    for checkpoint in (out / "checkpoints").iterdir():
        (checkpoint / "manifest.json").unlink()
    with pytest.warns(UserWarning, match="is skipped"):
        resume(out, quiet=True)
    same(whole_run("opt"), out)


def test_a_finished_run_is_not_trained_again(whole_run, cache):
    out = whole_run("opt")
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    found = train(config("opt", out, cache), resume=True, quiet=True)
    assert dataclasses.asdict(found) == result(out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before


def test_a_run_goes_on_as_it_began(whole_run, cache):
    out = whole_run("opt")
    for changed, message in (
        (config("opt", out, cache, lr=1e-5), r"train\.lr=0\.004, not 1e-05"),
        (config("opt", out, cache, method="vanilla"), "method='outeffhop', not 'vanilla'"),
        (config("opt", out, cache, changes={"dropout": 0.5}), r"changes\.dropout=None, not 0\.5"),
        (dataclasses.replace(config("opt", out, cache), changes={}), r"changes\.\w+=2, not None"),
    ):
        with pytest.raises(ValueError, match=message):
            train(changed, resume=True, quiet=True)
    train(config("opt", out, cache, save_steps=2, log_steps=1, keep=5), resume=True, quiet=True)


def test_how_often_it_looks_and_saves_may_change(whole_run, tmp_path):
    out = copied(whole_run("opt"), tmp_path)
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / "checkpoint-12")
    old = RunFolder(out).config()
    often = dataclasses.replace(old.train, save_steps=1, log_steps=2, eval_steps=1, keep=3)
    train(dataclasses.replace(old, out=str(out), train=often), resume=True, quiet=True)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == [f"checkpoint-{i}" for i in (10, 11, 12)]
    lines = metrics(out)
    assert [line["step"] for line in lines if "loss" in line] == [3, 6, 10, 12]
    assert [line["step"] for line in lines if "eval_loss" in line] == [6, 9, 10, 11, 12]
    assert weight_bytes(out) == weight_bytes(whole_run("opt"))


def test_the_hour_of_its_beginning_stays(whole_run, tmp_path):
    out = copied(whole_run("opt"), tmp_path)
    (out / "result.json").unlink()
    env = json.loads((out / "env.json").read_text())
    (out / "env.json").write_text(json.dumps(env | {"began": "long ago", "threads": -1}))
    resume(out, quiet=True)
    after = json.loads((out / "env.json").read_text())
    assert (after["began"], after["threads"]) == ("long ago", 1)


def test_a_finished_run_needs_no_checkpoints(whole_run, tmp_path):
    """They may have been removed to make room: it must not begin again."""
    out = copied(whole_run("opt"), tmp_path)
    shutil.rmtree(out / "checkpoints")
    before = metrics(out)
    assert dataclasses.asdict(resume(out, quiet=True)) == result(out)
    assert metrics(out) == before


def test_auto_begins_where_there_is_no_run(cache, tmp_path):
    assert train(config("vit", tmp_path / "new", cache, max_steps=1), resume=True, quiet=True).steps == 1
    assert RunFolder(tmp_path / "new").finished


def test_patience_that_ended_stays_ended(cache, tmp_path):
    """Nothing is learned at rate 0: the second evaluation without gain ends it, and so it does after a kill."""
    settings = dict(lr=0.0, patience=1, eval_steps=2, save_steps=5, max_steps=10)
    run = config("stanhop", tmp_path / "whole", cache, **settings)
    found = train(run, quiet=True)
    assert (found.steps, found.stopped_early) == (4, True)
    kept = sorted(p.name for p in (tmp_path / "whole" / "checkpoints").iterdir())
    assert kept == ["checkpoint-2", "checkpoint-4"]  # the best and the last step
    out = copied(tmp_path / "whole", tmp_path)
    (out / "result.json").unlink()
    assert resume(out, quiet=True) == found
    same(tmp_path / "whole", out)


SPOILED = {"opt": 3.0, "vit": 0.3, "stanhop": 0.3}  # learning rates that undo what the first steps have learned


def spoiled(model, out, cache, **train):
    """Evaluated at every second step, best long before the end; only the newest checkpoint is kept beside the best."""
    often = dict(eval_steps=2, save_steps=3, log_steps=2, outlier_steps=4, keep=1, keep_best=True, eval_batches=None)
    return config(model, out, cache, **(dict(lr=SPOILED[model], warmup_steps=6, patience=0) | often | train))


@pytest.mark.parametrize("model", ["opt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vit", "stanhop"))])
def test_the_best_step_survives_every_kill(model, cache, tmp_path):
    run = spoiled(model, tmp_path / "whole", cache)
    found = train(run, quiet=True)
    assert found.best_step < 12 - run.train.save_steps  # it had to survive the removal of older checkpoints
    assert found.steps == 12
    # the last one is at result.json, after the best step has been restored
    out = killed(run, tmp_path, ["step", 4], ["rename", 2], ["rotate", 1], ["json", 2])
    same(tmp_path / "whole", out)
    kept = {p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()}
    assert kept == {f"checkpoint-{found.best_step}", "checkpoint-12"}
    assert {p.name for p in (out / "checkpoints").iterdir()} >= kept


def test_a_damaged_best_checkpoint_is_made_again(cache, tmp_path):
    run = spoiled("stanhop", tmp_path / "whole", cache, keep=9)
    best = train(run, quiet=True).best_step
    out = copied(tmp_path / "whole", tmp_path)
    (out / "result.json").unlink()
    (out / "checkpoints" / f"checkpoint-{best}" / "model.safetensors").unlink()
    with pytest.warns() as said:
        resume(out, quiet=True)
    assert f"checkpoint-12 is skipped: checkpoint-{best}, the best at that step, is" in str(said[0].message)
    same(tmp_path / "whole", out)
