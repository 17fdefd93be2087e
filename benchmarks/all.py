"""Runs the benchmarks one after another, each in a process of its own with a time limit, and keeps every result.

    python benchmarks/all.py [--device cuda] [--quick] [--only NAME …] [--since 2026-11-01] [--out FOLDER]

NAME.json results go to FOLDER/NAME-DEVICE.json as they finish, by default to benchmarks/results, from which
docs/make_performance.py makes its page. Interrupted, it goes on where it stopped: a result whose date is not before
--since (default: today) is not measured again. A benchmark that fails or takes too long leaves the old result as it
was, and the others run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A script, the arguments by which it takes seconds, and its time limit in minutes."""

    quick: tuple[str, ...]
    minutes: int = 10


BENCHMARKS = {
    "attention": Benchmark(("--quick", "--seconds", "0.1"), minutes=30),
    "calls": Benchmark(("--seconds", "0.02", "--shapes", "small", "one query")),
    "layer": Benchmark(("--seconds", "0.1", "--rounds", "2")),
    "memory": Benchmark(("--quick",), minutes=30),
    "windows": Benchmark(("--seconds", "0.05", "--rounds", "2", "--lengths", "256")),
    "penalty": Benchmark(("--seconds", "0.1", "--rounds", "2", "--models", "opt", "--batch", "1"), minutes=20),
    "outliers": Benchmark(("--seconds", "0.1", "--rounds", "2"), minutes=20),
    "training-step": Benchmark(
        (
            "--size",
            "tiny",
            "--seconds",
            "0.1",
            "--models",
            "bert",
            "--methods",
            "outeffhop",
            "--no-compile",
            "--batch",
            "1",
        ),
        minutes=30,
    ),
    "training-loop": Benchmark(("--preset", "tiny", "--rounds", "1"), minutes=20),
    "generation": Benchmark(
        (
            *(
                "--size",
                "tiny",
                "--models",
                "opt",
                "--methods",
                "outeffhop",
                "--modes",
                "eager-dynamic",
                "eager-static",
            ),
            *("--batches", "1", "--prompt", "8", "--new", "4", "--rounds", "2"),
        ),
        minutes=30,
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), choices=list(BENCHMARKS), metavar="NAME")
    parser.add_argument(
        "--since", type=datetime.date.fromisoformat, default=datetime.date.today(), help="default today"
    )
    parser.add_argument("--limit", type=float, help="minutes for each, instead of its own limit")
    parser.add_argument("--quick", action="store_true", help="seconds each, to see that they run; needs --out")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder; default benchmarks/results")
    arguments = parser.parse_args()
    if arguments.quick and arguments.out == HERE / "results":
        parser.error("--quick measures next to nothing: give another folder with --out")
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in arguments.only:
        benchmark, result = BENCHMARKS[name], arguments.out / f"{name}-{arguments.device}.json"
        if is_new(result, arguments.since):
            print(f"{name}: {result} is from {measured(result)}, kept", flush=True)
            continue
        options = benchmark.quick if arguments.quick else ()
        minutes = benchmark.minutes if arguments.limit is None else arguments.limit
        start, why = time.monotonic(), run(name, arguments.device, options, result, minutes)
        print(f"{name}: {why or f'written to {result}'} ({time.monotonic() - start:.0f} s)", flush=True)
        failed += [name] if why else []
    if failed:
        print(f"\n{len(failed)} of {len(arguments.only)} without a result: {', '.join(failed)}")
    return 1 if failed else 0


def run(name: str, device: str, options: tuple[str, ...], result: Path, minutes: float) -> str | None:
    """Runs one benchmark; why it left no result, or None. Scripts may write row by row: only a whole file counts."""
    with tempfile.TemporaryDirectory(dir=result.parent) as folder:
        written = Path(folder) / result.name
        script = HERE / f"{name.replace('-', '_')}.py"
        command = [sys.executable, str(script), "--device", device, *options, "--out", str(written)]
        try:
            done = subprocess.run(command, timeout=60 * minutes, cwd=HERE.parent)
        except subprocess.TimeoutExpired:
            return f"stopped after {minutes:g} minutes"
        if done.returncode:
            return f"failed with exit status {done.returncode}"
        if measured(written) is None:
            return "wrote no result"
        os.replace(written, result)
    return None


def measured(result: Path) -> datetime.date | None:
    """The date in a result file; None if there is none."""
    try:
        return datetime.date.fromisoformat(json.loads(result.read_text())["date"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_new(result: Path, since: datetime.date) -> bool:
    date = measured(result)
    return date is not None and date >= since


if __name__ == "__main__":
    sys.exit(main())
