"""Side-by-side measurements: the contenders take turns, round after round, so that noise affects all of them."""

from __future__ import annotations

import ctypes
import datetime
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], object]


def times(contenders: dict[str, Work], device: str, seconds: float = 1.0, rounds: int = 24) -> dict[str, list[float]]:
    """Milliseconds per call of each contender, one entry for every round, in which all take their turn.

    A turn lasts about ``seconds / rounds`` (one call at least). The order is shuffled every round: a GPU
    runs faster after rest and slower after heavy work, and no contender should always follow the same one.
    """
    calls = {}
    for name, work in contenders.items():
        work()
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        calls[name] = max(1, int(seconds / rounds / max(time.perf_counter() - start, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    shuffle = random.Random(0)
    for _ in range(rounds):
        for name in shuffle.sample(list(contenders), len(contenders)):
            samples[name].append(_time(contenders[name], calls[name], device))
    return samples


def spread(values: list[float]) -> list[float]:
    """The quartiles around the median: half of the rounds lie between them."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return [low, high]


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other work beside a measurement: processes that each keep a core busy, as on a slow or shared host."""
    code = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(10**6))"
    beside = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def fastest(samples: dict[str, list[float]], among: str) -> str:
    """The contender with the lowest median among those whose name begins with ``among``."""
    return min((name for name in samples if name.startswith(among)), key=lambda name: statistics.median(samples[name]))


def ratio(samples: dict[str, list[float]], name: str, base: str) -> float:
    """The median over rounds of one contender's time to another's in the same round: drift affects both."""
    return statistics.median(a / b for a, b in zip(samples[name], samples[base], strict=True))


def graphs(contenders: dict[str, Work], together: int = 10) -> dict[str, Work]:
    """Each contender as the replay of a CUDA graph of several calls: the device's time without Python's."""
    captured = {}
    for name, work in contenders.items():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(together):
                work()
        captured[name] = graph.replay
    return captured


def peak_memory(work: Work, device: str) -> float:
    """The MiB that one call takes at its peak beyond what was in use before."""
    work()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    ctypes.CDLL(None).malloc_trim(
        0
    )  # returns freed blocks to the system; the next call could use them without being noticed
    Path("/proc/self/clear_refs").write_text("5")  # resets the system's peak counter
    before = _status("VmRSS")
    work()
    return (_status("VmHWM") - before) / 1024


def environment(device: str) -> dict[str, Any]:
    """What a reader of the result file needs to know about its origin."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    return {
        "date": datetime.date.today().isoformat(),
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "cudnn": torch.backends.cudnn.version() if device == "cuda" else None,
        "python": platform.python_version(),
    }


def keep(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def _time(work: Work, calls: int, device: str) -> float:
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) * 1e3 / calls


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
