"""What we replace of transformers' Trainer, and what depends on how it works inside."""

import multiprocessing
import traceback

import pytest
import torch
from runs import config, finish, start
from transformers import Trainer

from outeffhop.lab.training import resume, train, training_state
from outeffhop.lab.training.config import to_yaml
from outeffhop.lab.training.nonfinite import LossWatch
from outeffhop.lab.training.trainer import RunTrainer
from outeffhop.lab.training.trainer_arguments import RunArguments


def test_only_one_private_method_is_replaced():
    ours = {name for name in vars(RunTrainer) if name.startswith("_") and not name.startswith("__")}
    assert {name for name in ours if hasattr(Trainer, name)} == {"_load_from_checkpoint"}
    assert not [name for name in vars(RunArguments) if name.startswith("_") and not name.startswith("__")]


def test_trainer_loads_weights_by_our_method(whole_run, cache, tmp_path, monkeypatch):
    """If Trainer no longer called it, weights would be loaded by Trainer's own, which knows nothing of shards."""
    seen = []
    original = training_state.load_model_state
    monkeypatch.setattr(training_state, "load_model_state", lambda *args: (seen.append(args[1].name), original(*args)))
    monkeypatch.setattr(Trainer, "_load_from_checkpoint", lambda *args: pytest.fail("Trainer's own was called"))
    run = config("opt", tmp_path / "a", cache, max_steps=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", failing(RunTrainer.training_step, 6))
        with pytest.raises(Lost):
            train(run, quiet=True)
    resume(run.out, quiet=True)
    assert seen == ["checkpoint-4"]


class Lost(Exception):
    pass


def failing(step, count):
    calls = []

    def failing_step(*args):
        calls.append(1)
        if len(calls) == count:
            raise Lost
        return step(*args)

    return failing_step


def test_workers_end_with_a_failed_run(cache, tmp_path, monkeypatch):
    """Though they ignore signals, and though the error's traceback is kept."""
    monkeypatch.setattr(RunTrainer, "training_step", failing(RunTrainer.training_step, 3))
    with pytest.raises(Lost) as caught:
        train(config("opt", tmp_path / "a", cache, workers=2), quiet=True)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "failing_step"
    assert multiprocessing.active_children() == []


UNCAUGHT = """
import sys
from outeffhop.lab.training import train
from outeffhop.lab.training.config import from_yaml
from outeffhop.lab.training.trainer import RunTrainer
from test_trainer import failing

RunTrainer.training_step = failing(RunTrainer.training_step, 3)
train(from_yaml(sys.argv[1]), quiet=True)
"""


def test_a_script_that_fails_ends(cache, tmp_path):
    """Python waits for the children it has at its end, so a worker that outlived the run would keep it for ever."""
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config("opt", tmp_path / "a", cache, workers=1)))
    process = start(UNCAUGHT, file)
    try:
        said = finish(process, code=1)
    finally:
        process.kill()
    assert "Lost" in said
    assert "DataLoader worker" not in said


def test_one_gpu_a_process():
    arguments = RunArguments(use_cpu=True)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 4
    assert arguments.n_gpu == 1


def test_a_loss_watch_keeps_the_first_bad_step():
    watch = LossWatch(torch.device("cpu"))
    for step, loss in enumerate([1.0, float("inf"), 2.0, float("nan")], start=1):
        watch.see(torch.tensor(loss), step)
        assert watch.bad_step() == (None if step == 1 else 2)
