"""A run that kills itself, SIGKILL, at chosen moments, and is begun again each time.

    python -c "import killing; killing.main()" CONFIG.yaml '[["step", 5], ["rename", 1]]'

Each attempt is a process of its own, forked before torch has any threads; the last one runs to the end.
"""

import json
import os
import signal
import sys
import traceback

import torch

from outeffhop.lab.training import RunFolder, rundir, train, training_state
from outeffhop.lab.training.config import from_yaml
from outeffhop.lab.training.trainer import RunTrainer


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def nth(count, function, otherwise=lambda *_: None):
    """The function, that kills at its n-th call, after ``otherwise``."""
    calls = iter(range(1, count + 1))

    def called(*args, **kwargs):
        if next(calls) == count:
            otherwise(*args)
            die()
        return function(*args, **kwargs)

    return called


def half_a_line(folder, line):
    with open(folder.metrics_file, "a") as file:
        file.write(json.dumps(rundir.to_plain(line))[:9])


def arm(moment, count):
    """Sets the trap. Counts are of this attempt alone."""
    match moment:
        case "step":  # before its forward
            RunTrainer.training_step = nth(count, RunTrainer.training_step)
        case "update":  # after backward, before its update is noted
            RunTrainer.create_scheduler = _watched(RunTrainer.create_scheduler, count)
        case "writing":  # weights are in the side folder, the optimizer is not
            training_state.save_optimizer = nth(count, training_state.save_optimizer)
        case "rename":  # all is in the side folder
            RunFolder.accept = nth(count, RunFolder.accept)
        case "rotate":  # the new checkpoint is there, the oldest half removed
            rundir.shutil.rmtree = _halfway(rundir.shutil.rmtree, count)
        case "line":  # half of it written
            RunFolder.append = nth(count, RunFolder.append, half_a_line)
        case "json":  # 1: env.json, before any step; 2: result.json, after the last
            RunFolder.write_json = nth(count, RunFolder.write_json)


def _halfway(remove, count):
    trap = nth(count, remove, lambda path, **_: (path / "manifest.json").unlink())
    return lambda path, **kwargs: (trap if path.name.startswith(".checkpoint-") else remove)(path, **kwargs)


def _watched(create, count):
    def created(trainer, *args, **kwargs):
        schedule = create(trainer, *args, **kwargs)
        kind = type(schedule)  # an attribute of the schedule itself would be saved with it
        kind.step = nth(count, kind.step)
        return schedule

    return created


def attempt(config, trap):
    """The exit code of one: −9 where it was killed."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            if trap is not None:
                arm(*trap)
            train(config, resume=True, quiet=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main():
    config, traps = from_yaml(sys.argv[1]), json.loads(sys.argv[2])
    for trap in traps:
        code = attempt(config, trap)
        last = RunFolder(config.out).last_checkpoint()
        print(trap, code, last and last.name, flush=True)
        if code != -signal.SIGKILL:
            sys.exit(f"{trap} did not kill")
    sys.exit(attempt(config, None))
