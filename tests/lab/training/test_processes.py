"""Two processes equal one: copies (DDP) and shards (FSDP), also where a run goes on with another number of them."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
from runs import NO_DROPOUT, config, environment, furthest, metrics, result, weights

from outeffhop.lab.training import RunFolder, resume, train
from outeffhop.lab.training.config import to_dict

# Trains or goes on with one run after the other, in the processes of torchrun; how one ended is printed
TOGETHER = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
from outeffhop.lab.training import resume, train
from outeffhop.lab.training.config import from_dict
from outeffhop.lab.training.trainer import RunTrainer

original = RunTrainer.training_step

def send(kind, rank, count):
    # to one process, at a step
    calls = []
    def step(*args):
        calls.append(1)
        if len(calls) == count and os.environ["RANK"] == rank:
            os.kill(os.getpid(), kind)
        return original(*args)
    RunTrainer.training_step = step

for kind, given, *more in json.loads(sys.argv[1]):
    RunTrainer.training_step = original
    if more:
        send(*more)
    try:
        resume(given, quiet=True) if kind == "resume" else train(from_dict(given), quiet=True)
    except (ValueError, KeyboardInterrupt) as error:
        print(type(error).__name__, error, flush=True)
torch.distributed.destroy_process_group()
"""


def torchrun(tmp_path, *work):
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
            json.dumps(work),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def near(first, second):
    assert furthest(weights(first), weights(second)) < 1e-5
    assert result(second)["metrics"] == pytest.approx(result(first)["metrics"], rel=1e-5)
    for name in ("max_inf_norm", "avg_kurtosis"):
        assert result(second)[name] == pytest.approx(result(first)[name], rel=1e-4)
    ours, theirs = metrics(first), metrics(second)
    assert [line.keys() for line in ours] == [line.keys() for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        # the penalty in the log is that of the first process's last part of the step
        a, b = ({k: v for k, v in line.items() if k not in ("tensors", "outlier_penalty")} for line in (a, b))
        assert a == pytest.approx(b, rel=1e-4)


def cut_short(run, out):
    """The same run as it was at its last checkpoint but one."""
    shutil.copytree(run, out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints" / "checkpoint-12")
    assert RunFolder(out).last_checkpoint().name == "checkpoint-8"
    return out


def test_two_processes_equal_one(cache, tmp_path):
    one = config("bert", tmp_path / "one", cache, method="gated-outeffhop", changes=NO_DROPOUT["bert"])
    train(one, quiet=True)

    def like(name, **changed):
        return dataclasses.replace(one, out=str(tmp_path / name), train=dataclasses.replace(one.train, **changed))

    sharded = cut_short(tmp_path / "one", tmp_path / "goes-on-sharded")
    (sharded / "config.yaml").write_text(  # as a run that was begun with fewer processes
        (sharded / "config.yaml").read_text().replace("fsdp: false", "fsdp: true")
    )
    copies = cut_short(tmp_path / "one", tmp_path / "goes-on-copied")
    ended = torchrun(
        tmp_path,
        ["train", to_dict(like("copied", accumulate=2))],
        ["train", to_dict(like("sharded", fsdp=True))],
        ["resume", str(copies)],
        ["resume", str(sharded)],
        ["train", to_dict(like("odd", batch_size=9))],
        ["train", to_dict(like("signal", fsdp=True)), signal.SIGINT, "0", 5],
        ["train", to_dict(like("late-signal", fsdp=True, log_steps=5)), signal.SIGTERM, "1", 11],
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    for name in ("copied", "sharded", "goes-on-copied", "goes-on-sharded"):
        near(tmp_path / "one", tmp_path / name)
    assert ended.stdout.count("ValueError train.batch_size=9 is not divisible by 2 processes") == 2
    assert not RunFolder(tmp_path / "odd").exists

    # All of them end at one step, though one alone was told to
    assert ended.stdout.count("KeyboardInterrupt") == 4
    assert RunFolder(tmp_path / "signal").last_checkpoint().name == "checkpoint-6"
    assert RunFolder(tmp_path / "late-signal").last_checkpoint().name == "checkpoint-12"
    assert not RunFolder(tmp_path / "late-signal").finished

    # And back to one process
    alone = cut_short(tmp_path / "copied", tmp_path / "alone")
    resume(alone, quiet=True)
    near(tmp_path / "one", alone)
    whole = cut_short(tmp_path / "sharded", tmp_path / "whole-again")
    (whole / "config.yaml").write_text((whole / "config.yaml").read_text().replace("fsdp: true", "fsdp: false"))
    resume(whole, quiet=True)
    near(tmp_path / "one", whole)


def test_a_lost_process_ends_the_other(cache, tmp_path):
    run = config("opt", tmp_path / "lost", cache)
    ended = torchrun(tmp_path, ["train", to_dict(run), signal.SIGKILL, "1", 6])
    assert ended.returncode != 0
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9", ended.stderr)  # torchrun says which
    assert RunFolder(run.out).last_checkpoint().name == "checkpoint-4"
    train(dataclasses.replace(run, out=str(tmp_path / "one")), quiet=True)
    resume(run.out, quiet=True)
    near(tmp_path / "one", tmp_path / "lost")


@pytest.mark.slow
def test_two_processes_with_a_penalty_equal_one(cache, tmp_path):
    one = config("opt", tmp_path / "one", cache, penalty=0.5, changes=NO_DROPOUT["opt"])
    train(one, quiet=True)
    kinds = {"copied": dict(accumulate=2), "sharded": dict(fsdp=True)}
    work = [
        dataclasses.replace(one, out=str(tmp_path / name), train=dataclasses.replace(one.train, **changed))
        for name, changed in kinds.items()
    ]
    ended = torchrun(tmp_path, *(["train", to_dict(run)] for run in work))
    assert ended.returncode == 0, ended.stderr[-5000:]
    for name in kinds:
        near(tmp_path / "one", tmp_path / name)
    assert any("outlier_penalty" in line for line in metrics(tmp_path / "one"))
