"""A process of torchrun that hangs: the others wait for ``train.timeout``, then end and say which it is.

One that dies is noticed by torchrun itself: tests/lab/training/test_processes.py.
"""

import os
import re
import subprocess
import sys

import pytest

from outeffhop.lab.training import RunConfig, RunFolder, TrainConfig, resume
from outeffhop.lab.training.config import to_yaml

# One of the processes stops at a step, as a machine that is lost would; the one that notices ends it for good
HANGING = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from outeffhop.cli.main import main
from outeffhop.lab.training.trainer import RunTrainer

_, config, rank, pid = sys.argv
original, calls = RunTrainer.training_step, []

def step(*args):
    calls.append(1)
    if len(calls) == 4 and os.environ["RANK"] == rank:
        Path(pid).write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(*args)

RunTrainer.training_step = step
code = main(["train", "--config", config, "--json"])
os.kill(int(Path(pid).read_text()), signal.SIGKILL)
os._exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_hangs_is_named(rank, tmp_path):
    out = tmp_path / "run"
    settings = dict(max_steps=6, batch_size=4, eval_batches=1, log_steps=1, save_steps=2, outlier_batches=1)
    config = RunConfig(
        "stanhop",
        data="builtin:series",
        out=str(out),
        changes=dict(e_layers=1, d_model=16, d_ff=32, num_heads=2),
        train=TrainConfig(device="cpu", timeout=5, **settings),
    )
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "hanging.py").write_text(HANGING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [*torchrun, tmp_path / "hanging.py", tmp_path / "config.yaml", str(rank), tmp_path / "pid"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1
    pid = (tmp_path / "pid").read_text()
    said = re.search(r"^outeffhop: of 2 processes, no answer from: (.*)$", ended.stderr, re.MULTILINE)
    assert said, ended.stderr[-3000:]
    assert re.fullmatch(
        rf"{rank} \(.*, process id {pid}\); the others waited up to train\.timeout=5 seconds; "
        rf"the last checkpoint is {re.escape(str(out))}/checkpoints/checkpoint-2",
        said[1],
    )
    assert resume(out, quiet=True).steps == 6
    assert RunFolder(out).finished
