"""What the package is for, seen on any machine within five minutes.

    python examples/demo --out demo

Three small language models learn the same task: one with softmax, one with softmax1, one with softmax1 and gates. Their
outliers are watched as they grow, the models are quantized to 8 bits, and the one with softmax is mended. Then a memory
of digits is asked for things it has never seen. What came out is printed, and written with pictures to OUT/report.html
and as numbers to OUT/numbers.json.

Two models are trained at a time, and as many as three seeds of each: another seed begins only if it fits into the time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue

import report
from recall import Recall, recall
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from training import METHODS, Found, Settings, Told, run

SEEDS = 3
RESERVE = 15  # seconds for the page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder for what comes out (default %(default)s)"
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="within which seeds are added (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; numbers mean nothing")
    given = parser.parse_args()
    settings = Settings(steps=6, mending_steps=4, batch=4) if given.quick else Settings()
    began = time.monotonic()
    found = train_all(settings, 1 if given.quick else SEEDS, 60 * given.minutes - RESERVE)
    answers = recall()
    seconds = time.monotonic() - began
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "numbers.json").write_text(report.numbers(found, settings))
    page = given.out / "report.html"
    page.write_text(report.html(found, answers, settings, seconds, quick=given.quick))
    show(found, answers)
    print(f"\n{seconds / 60:.1f} minutes. With pictures: {page}")


def train_all(settings: Settings, seeds: int, limit: float) -> list[Found]:
    """Trains the models of one seed, and of as many more as will be done within ``limit`` seconds."""
    began = time.monotonic()
    workers = min(2, os.cpu_count() or 1)
    spawn = multiprocessing.get_context("spawn")
    waiting, begun = deque(METHODS), 1
    running: set[Future[list[Found]]] = set()
    found: list[Found] = []
    with spawn.Manager() as manager, ProcessPoolExecutor(workers, spawn) as pool, Bars(settings) as bars:
        told = manager.Queue()
        while True:
            while len(running) < workers:
                pace = (time.monotonic() - began) / max(bars.done, 1)  # seconds a step, all workers together
                if not waiting and begun < seeds and pace * (begun + 1) * settings.total <= limit:
                    waiting.extend(METHODS)
                    begun += 1
                if not waiting:
                    break
                running.add(pool.submit(run, waiting.popleft(), begun - 1, settings, told.put))
            bars.show(told, begun)
            for job in [job for job in running if job.done()]:
                running.remove(job)
                found += job.result()
            if not running and not waiting:
                return found


class Bars:
    """Live progress: a bar for everything, and one for each model that is training. Lines if not on a terminal."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.steps: dict[str, int] = {}  # of each training that has begun
        console = Console(stderr=True)
        self.live = console.is_terminal
        columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn())
        self.bars = Progress(*columns, console=console, transient=True, disable=not self.live)
        self.tasks = {"": self.bars.add_task("all models", total=settings.total)}

    @property
    def done(self) -> int:
        return sum(self.steps.values())

    def show(self, told: Queue[Told], seeds: int) -> None:
        """Reads what the workers have told in the last moments."""
        time.sleep(0.2)
        with suppress(Empty):
            while True:
                self._show(told.get_nowait())
        self.bars.update(self.tasks[""], completed=self.done, total=seeds * self.settings.total)

    def _show(self, told: Told) -> None:
        name, step, total, largest = told
        self.steps[name] = step
        text = f"{name}: largest |x| {largest:.1f}"
        if name not in self.tasks:
            self.tasks[name] = self.bars.add_task(text, total=total)
        self.bars.update(self.tasks[name], description=text, completed=step, visible=step < total)
        if step == total and not self.live:
            print(f"{text} after {step} steps", file=sys.stderr)

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()


def show(found: list[Found], answers: Recall) -> None:
    """The table and what it says, in the terminal."""
    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in report.COLUMNS:
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in report.rows(found):
        table.add_row(*row)
    console.print(table)
    for claim in report.claims(found, answers):
        console.print(f"\n{claim.verdict.upper()}: {claim.text}\n  {claim.numbers}", highlight=False, markup=False)


if __name__ == "__main__":
    main()
