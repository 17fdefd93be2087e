"""An experiment run: cells measured, kept and read again, and the result drawn from all there are.

A cell is written to a file of its own as soon as it is done, with the machine it was measured on. So an experiment that
was killed goes on where it stopped, cells run side by side where there is room, and a result drawn from them another
day says where its numbers come from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outeffhop._io import from_plain, read_json, to_plain, write_whole
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

__all__ = ["check", "found_before", "one_thread", "run"]


@dataclass(frozen=True)
class _Kept:
    """What was found in a cell, and the machine it was measured on: device, version of torch, date."""

    found: Values
    machine: Values


def run(experiment: Experiment, settings: Settings, tell: Callable[[str], None] = print) -> Result:
    """Measures the cells that are not measured yet, and writes ``result.json`` with its figures."""
    check(experiment, settings)
    folder = settings.out / experiment.name
    cells = list(experiment.cells(settings))
    done = _all_kept(experiment, settings)
    asked = chosen(cells, settings)
    if not experiment.partial and {cell.key for cell in cells} - {cell.key for cell in asked} - done.keys():
        raise ValueError(f"only={settings.only}: {experiment.name} needs all of its {len(cells)} cells; leave it out")
    missing = [cell for cell in asked if cell.key not in done]
    if done:
        tell(f"{experiment.name}: {len(done)} of {len(cells)} cells are there already")
    for cell, values in _measured(experiment, missing, settings):
        done[cell.key] = _Kept(values, _machine(settings))
        _write(folder, cell, settings, done[cell.key])
        tell(f"{experiment.name}: {cell.key} ({len(done)} of {len(cells)})")
    done = {**_all_kept(experiment, settings), **done}  # another process may have measured some of them meanwhile
    # in the order asked for, whichever was there before or came first from another process
    result = experiment.conclude({c.key: done[c.key].found for c in cells if c.key in done}, settings, folder)
    trial = ", cut down to see that it runs: these numbers mean nothing" if settings.quick else ""
    machines = _machines_said([kept.machine for kept in done.values()])
    conditions = {"scale": settings.scale + trial, **machines, **result.conditions}
    if len(done) < len(cells):
        conditions["cells"] = f"{len(done)} of {len(cells)} are measured"
    result = dataclasses.replace(result, conditions=conditions)
    result.save(folder / "result.json")
    return result


def check(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError for what would stop it, or be lost by it, once it runs."""
    check_data(experiment, settings)
    check_only(experiment, settings)
    _check_out(experiment, settings)


def found_before(experiment: Experiment, settings: Settings) -> dict[str, Values]:
    """What is kept of an experiment's cells, by key; nothing is measured."""
    return {key: kept.found for key, kept in _all_kept(experiment, settings).items()}


def _machine(settings: Settings) -> Values:
    on_gpu = settings.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _machines_said(machines: Collection[Values]) -> Values:
    """All that cells were measured on; of dates the first and the last."""
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
    # spawn: a forked process has no use of CUDA, nor of torch's threads
    context = multiprocessing.get_context("spawn")
    workers = min(settings.workers, len(cells))
    cores = max(1, (os.cpu_count() or 1) // workers)  # each its share: threads that wait for a core cost most
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (cores,)) as pool:
        running = {pool.submit(experiment.measure, cell, settings): cell for cell in cells}
        failed: BaseException | None = None
        for future in as_completed(running):
            error = None if future.cancelled() else future.exception()
            if error is not None and failed is None:
                failed = error
                for other in running:  # those that run already are kept, the others not begun
                    other.cancel()
            if error is None and not future.cancelled():
                yield running[future], future.result()
        if failed is not None:
            raise failed


def _file(folder: Path, cell: Cell) -> Path:
    return folder / "cells" / f"{cell.key}.json"


def _write(folder: Path, cell: Cell, settings: Settings, kept: _Kept) -> None:
    content = {"asked": cell.values, "scale": settings.scale, "quick": settings.quick}
    plain = to_plain({**content, "machine": kept.machine, "found": kept.found})
    write_whole(_file(folder, cell), json.dumps({**plain, "sha256": _digest(plain["found"])}, indent=1) + "\n")


def _all_kept(experiment: Experiment, settings: Settings) -> dict[str, _Kept]:
    folder = settings.out / experiment.name
    read = {cell.key: _read(folder, cell, settings) for cell in experiment.cells(settings)}
    return {key: kept for key, kept in read.items() if kept is not None}


def _read(folder: Path, cell: Cell, settings: Settings) -> _Kept | None:
    """What was found before for the same question; a question asked otherwise, or a damaged file, is measured anew."""
    try:
        kept = read_json(_file(folder, cell))
        same = (kept["asked"], kept["scale"], kept["quick"]) == (to_plain(cell.values), settings.scale, settings.quick)
        whole = all(isinstance(kept[name], dict) for name in ("found", "machine"))
        if not (same and whole and kept["sha256"] == _digest(kept["found"])):
            return None
        return _Kept(from_plain(kept["found"]), kept["machine"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_out(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError where cells of another scale lie, or a trial would replace them; a trial itself may go."""
    folder = settings.out / experiment.name
    for cell in experiment.cells(settings):
        try:
            kept = read_json(_file(folder, cell))
            there = (kept["scale"], kept["quick"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if not there[1] and there != (settings.scale, settings.quick):
            raise ValueError(
                f"out={str(settings.out)!r} holds cells of {experiment.name} with scale={there[0]!r}: those of "
                f"scale={settings.scale!r}{', quick' if settings.quick else ''} would replace them; give another out, "
                f"or remove {folder}"
            )


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch uses one thread; sums are then the same however many cells run side by side."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
