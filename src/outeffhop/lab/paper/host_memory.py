"""Main memory of a process that trains, over time: what the paper's Table 4 and Figure 8 show."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from outeffhop.lab.paper.experiment import Settings, Values
from outeffhop.lab.paper.training_step import training_step

__all__ = ["host_memory", "resident_gb"]

_STATUS = Path("/proc/self/status")
_EVERY = 0.02  # seconds between two looks; a step that allocates and frees is seen in between
_POINTS = 100  # of the curve that is kept


def host_memory(model: str, method: str, settings: Settings, steps: int) -> Values | None:
    """Main memory in GB of a new process that builds the model and trains it for some steps.

    The process is a new one, so that nothing of another method is counted. Returns the time of each look since the
    process began to build the model, the resident memory at each, their mean over the training steps, and the peak;
    None where the system does not tell (it is read from ``/proc``).
    """
    if resident_gb() is None:
        return None
    # spawn: a forked process would begin with the memory of this one
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_trained, model, method, settings, steps, torch.get_num_threads()).result()


def resident_gb(field: str = "VmRSS") -> float | None:
    """Resident memory of this process in GB, now (VmRSS) or at its peak (VmHWM); None outside Linux."""
    if not _STATUS.exists():
        return None
    lines = (line.split() for line in _STATUS.read_text().splitlines())
    return next((int(words[1]) * 1024 / 1e9 for words in lines if words[0] == f"{field}:"), None)


def _trained(model: str, method: str, settings: Settings, steps: int, threads: int) -> Values:
    torch.set_num_threads(threads)
    begun, ended = time.perf_counter(), threading.Event()
    looks: list[tuple[float, float]] = []  # seconds, GB

    def look() -> None:
        looks.append((time.perf_counter() - begun, resident_gb() or 0.0))

    def watch() -> None:
        while not ended.wait(_EVERY):
            look()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        step = training_step(model, method, settings)
        built = time.perf_counter() - begun
        for _ in range(steps):
            step()
    finally:
        ended.set()
        watcher.join()
    look()
    training = [gb for seconds, gb in looks if seconds >= built]
    some = looks[:: -(-len(looks) // _POINTS)]
    return {
        "seconds": [round(seconds, 3) for seconds, _ in some],
        "gb": [round(gb, 4) for _, gb in some],
        "mean_gb": sum(training) / len(training),
        "peak_gb": resident_gb("VmHWM"),
    }
