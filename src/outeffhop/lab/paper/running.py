"""Runs an experiment: measures its cells, keeps each of them, and draws the result from all.

A cell is kept as soon as it is measured, with the machine it was measured on. A killed experiment continues where it
stopped, several processes can measure cells of one experiment, and a result says where its numbers come from. The
processes of torchrun train a cell together, measure it alike, and the first one writes.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from outeffhop._io import to_plain
from outeffhop.lab.paper.experiment import (
    Cell,
    Experiment,
    Result,
    Settings,
    Values,
    check_data,
    check_only,
    chosen,
)
from outeffhop.lab.paper.result_file import KeptCell, ResultFile, add_cell, kept_cells, path_of, write_result

__all__ = ["check", "found_before", "is_first", "one_thread", "redraw", "run"]

_MOMENT = 0.2  # seconds between two looks for an interruption


def run(experiment: Experiment, settings: Settings, tell: Callable[[str], None] = print) -> Result:
    """Measures the cells that are not measured yet, draws the figures, and writes the result into ``OUT/NAME.json``."""
    check(experiment, settings)
    cells = list(experiment.cells(settings))
    done = _measured_before(experiment, settings)
    asked = chosen(cells, settings)
    if not experiment.partial and {cell.key for cell in cells} - {cell.key for cell in asked} - done.keys():
        raise ValueError(f"only={settings.only}: {experiment.name} needs all of its {len(cells)} cells; leave out only")
    if done:
        tell(f"{experiment.name}: {len(done)} of {len(cells)} cells were measured earlier")
    for cell, values in _measured(experiment, [cell for cell in asked if cell.key not in done], settings):
        done[cell.key] = KeptCell(cell.values, _machine(settings), values)
        if is_first():
            add_cell(experiment.name, settings, cell.key, done[cell.key])
        tell(f"{experiment.name}: {cell.key} ({len(done)} of {len(cells)})")
    done = {**_measured_before(experiment, settings), **done}  # other processes may have measured some meanwhile
    # in the order of the cells, whichever was measured first
    found = {cell.key: done[cell.key].found for cell in cells if cell.key in done}
    with _folder(experiment, settings) as folder:
        result = experiment.conclude(found, settings, folder)
    trial = ", cut down to see that it runs: these numbers mean nothing" if settings.quick else ""
    machines = _machines_said([kept.machine for kept in done.values()])
    conditions = {"scale": settings.scale + trial, **machines, **result.conditions}
    if len(done) < len(cells):
        conditions["cells"] = f"{len(done)} of {len(cells)} are measured"
    result = dataclasses.replace(result, conditions=conditions, cells=tuple(found))
    if is_first():
        write_result(experiment.name, settings, result)
    return result


def is_first() -> bool:
    """Whether this is the process of torchrun that writes, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _folder(experiment: Experiment, settings: Settings) -> Iterator[Path]:
    """Where figures are drawn; those of other processes than the first are thrown away."""
    if is_first():
        yield settings.out / experiment.name
        return
    with TemporaryDirectory() as folder:
        yield Path(folder)


def redraw(experiment: Experiment, path: Path, folder: Path) -> None:
    """Draws the figures of a kept result again, from its cells."""
    kept = ResultFile.load(path)
    keys = kept.result.cells if kept.result is not None else ()
    settings = Settings(kept.scale, kept.seeds, path.parent, quick=kept.quick)
    experiment.conclude({key: kept.cells[key].found for key in keys}, settings, folder)


def check(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError if the experiment could not run to its end, or would overwrite other results."""
    check_only(experiment, settings)
    _check_out(experiment, settings)
    if {cell.key for cell in chosen(experiment.cells(settings), settings)} - found_before(experiment, settings).keys():
        check_data(experiment, settings)


def found_before(experiment: Experiment, settings: Settings) -> dict[str, Values]:
    """What was found in the cells measured earlier, by key; nothing is measured."""
    return {key: kept.found for key, kept in _measured_before(experiment, settings).items()}


def _machine(settings: Settings) -> Values:
    import torch

    on_gpu = settings.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _machines_said(machines: Collection[Values]) -> Values:
    """The machines the cells were measured on; of the dates, the first and the last."""
    said: Values = {}
    for name in ("device", "torch", "date"):
        values = sorted({str(machine[name]) for machine in machines if name in machine})
        if name == "date" and len(values) > 1:
            said[name] = f"{values[0]} to {values[-1]}"
        elif values:
            said[name] = "; ".join(values)
    return said


def _measured(experiment: Experiment, cells: list[Cell], settings: Settings) -> Iterator[tuple[Cell, Values]]:
    if settings.workers <= 1 or len(cells) <= 1 or experiment.alone:
        for cell in cells:
            yield cell, experiment.measure(cell, settings)
        return
    # spawn: a forked process cannot use CUDA or torch's threads
    context = multiprocessing.get_context("spawn")
    workers = min(settings.workers, len(cells))
    cores = max(1, (os.cpu_count() or 1) // workers)  # more threads than cores are slower
    with _interruption_noted() as noted, ProcessPoolExecutor(workers, context, _begin_worker, (cores,)) as pool:
        # no more at once than are measured, so that none begins after an error or an interruption
        waiting = iter(cells)
        running = {pool.submit(experiment.measure, cell, settings): cell for cell in islice(waiting, workers)}
        failed: BaseException | None = None
        while running:
            finished = wait(running, _MOMENT, return_when=FIRST_COMPLETED).done
            if noted:
                raise KeyboardInterrupt
            for future in finished:
                cell = running.pop(future)
                error = future.exception()
                failed = failed or error
                if error is None:
                    yield cell, future.result()
                following = next(waiting, None) if failed is None else None
                if following is not None:
                    running[pool.submit(experiment.measure, following, settings)] = following
        if failed is not None:
            raise failed


def _measured_before(experiment: Experiment, settings: Settings) -> dict[str, KeptCell]:
    """Cells whose values have changed since they were measured are left out, unless these are their earlier ones."""
    kept = kept_cells(experiment.name, settings)
    asked = {cell.key: to_plain([cell.values, cell.earlier]) for cell in experiment.cells(settings)}
    return {key: kept[key] for key, values in asked.items() if key in kept and kept[key].asked in values}


def _check_out(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError if cells of another scale, or those of a full run, would be replaced; a trial may be."""
    path = path_of(experiment.name, settings)
    kept = ResultFile.load(path) if path.exists() else None
    if kept is not None and not kept.quick and not kept.is_of(settings):
        raise ValueError(
            f"out={str(settings.out)!r} holds cells of {experiment.name} with scale={kept.scale!r}: those of "
            f"scale={settings.scale!r}{', quick' if settings.quick else ''} would replace them; give another out, "
            f"or remove {path}"
        )


@contextmanager
def _interruption_noted() -> Iterator[list[int]]:
    """Ctrl-C is noted in the list it gives. As an exception in the middle of the pool's work it could leave a lock of
    the pool taken, and the pool would wait for it forever."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield noted
        return
    before = signal.signal(signal.SIGINT, lambda kind, _: noted.append(kind))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def _begin_worker(threads: int) -> None:
    """A worker ends with the process that started it: whoever continues the experiment finds no one in its folders."""
    import torch

    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch uses one thread inside, so that sums do not depend on how many cells are measured in parallel."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
