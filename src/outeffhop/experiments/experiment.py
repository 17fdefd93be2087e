"""What every table and figure of the paper is made of: cells measured one by one, and a result drawn from all.

A cell is the smallest thing measured (one model, method and seed, say). It is written to a file of its own as soon
as it is done, so an experiment that was killed goes on where it stopped, and cells run side by side where there
is room.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from outeffhop.outliers.reading import read_as, read_json
from outeffhop.outliers.saving import from_plain, to_plain, write_whole

__all__ = ["Cell", "Experiment", "Settings", "Table", "Figure", "Verdict", "Result", "check_data", "run"]

Scale = Literal["tiny", "small", "paper"]
Values = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How an experiment is run.

    Attributes:
        scale: tiny (two CPU cores), small (one GPU) or paper.
        seeds: how many.
        out: folder; an experiment writes into one of its own name below it.
        data: folder with the public data sets (mnist/, cifar10/, ett/, ...); None where there is none.
        workers: cells measured at the same time.
        device: cpu or cuda.
        quick: cut down to seconds, to see that it runs; the numbers mean nothing.
        only: patterns of cells' keys, as ``opt-*``; the result is drawn from these and those measured before.
    """

    scale: Scale = "tiny"
    seeds: int = 3
    out: Path = Path("results")
    data: Path | None = None
    workers: int = 1
    device: str = "cpu"
    quick: bool = False
    only: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        key: names its file; letters, digits, dots, dashes and underscores.
        values: what ``Experiment.measure`` needs to know, as JSON has it.
    """

    key: str
    values: Values = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_name("key", self.key)


@dataclass(frozen=True)
class Table:
    """Rows under columns. A row's entries are text or numbers; ``better`` says which of a column's numbers is best.

    Attributes:
        better: column → "low" or "high", where best and second best are marked; within a ``group`` of rows.
        group: the column whose equal entries make rows comparable; None compares all.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    better: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    note: str = ""

    def __post_init__(self) -> None:
        unknown = {*self.better, *([] if self.group is None else [self.group])} - set(self.columns)
        if unknown:
            raise ValueError(f"table {self.title!r} has no column {sorted(unknown)[0]!r}")
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.title!r} has a row of other than {len(self.columns)} entries")
        odd = [entry for row in self.rows for entry in row if not isinstance(entry, str | int | float | None)]
        if odd:
            raise ValueError(f"table {self.title!r} has an entry that is neither text nor a number: {odd[0]!r}"[:200])


@dataclass(frozen=True)
class Figure:
    """A picture in the result's folder, as ``NAME.svg`` and ``NAME.png``."""

    name: str
    title: str
    caption: str

    def __post_init__(self) -> None:
        check_name("name", self.name)


@dataclass(frozen=True)
class Verdict:
    """What we saw of one of the paper's claims.

    Attributes:
        verdict: confirmed (at this scale), "not seen" or contradicted; "not measured" where a cell is missing.
    """

    claim: str
    verdict: Literal["confirmed", "not seen", "contradicted", "not measured"]
    numbers: str


@dataclass(frozen=True)
class Result:
    """What an experiment found; ``result.json``.

    Attributes:
        conditions: data, steps, sizes, seeds, hardware: what a reader must know of the numbers.
    """

    name: str
    of: str
    about: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    verdicts: Sequence[Verdict] = ()
    conditions: Values = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(to_plain(dataclasses.asdict(self)), indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Result:
        return read_as(cls, path, "result of an experiment")


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: of the command: table1.
        of: what it is in the paper: Table 1.
        about: one sentence.
        cells: what is to be measured under these settings.
        measure: one cell. A module-level function: it may run in another process.
        conclude: tables, figures (drawn into the folder given) and verdicts from the cells' values by key.
        needs: folders of ``Settings.data`` it cannot do without at this scale.
        partial: whether it can conclude from some of its cells.
    """

    name: str
    of: str
    about: str
    cells: Callable[[Settings], Sequence[Cell]]
    measure: Callable[[Cell, Settings], Values]
    conclude: Callable[[dict[str, Values], Settings, Path], Result]
    needs: Callable[[Settings], Sequence[str]] = lambda settings: ()
    partial: bool = False


def check_name(what: str, name: str) -> None:
    """Raises ValueError for a name that could lead to a file outside its folder, or to a hidden one."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{what}={name!r}: letters, digits, dots, dashes and underscores are needed, no dot or dash first"
        )


def check_data(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError where a data set is missing."""
    for name in experiment.needs(settings):
        if settings.data is None or not (settings.data / name).is_dir():
            raise ValueError(
                f"{experiment.name} at scale={settings.scale!r} needs the folder {name!r} of the data sets: "
                f"say where they are with --data FOLDER (data={str(settings.data)!r})"
            )


def run(experiment: Experiment, settings: Settings, tell: Callable[[str], None] = print) -> Result:
    """Measures the cells that are not measured yet, and writes ``result.json`` with its figures."""
    check_data(experiment, settings)
    folder = settings.out / experiment.name
    cells = list(experiment.cells(settings))
    done = {cell.key: found for cell in cells if (found := _read(folder, cell, settings)) is not None}
    asked = [cell for cell in cells if any(fnmatchcase(cell.key, pattern) for pattern in settings.only)]
    if not asked:
        raise ValueError(f"only={settings.only}: {experiment.name} has no such cell; there are {_some_keys(cells)}")
    if not experiment.partial and {cell.key for cell in cells} - {cell.key for cell in asked} - done.keys():
        raise ValueError(f"only={settings.only}: {experiment.name} needs all of its {len(cells)} cells; leave it out")
    missing = [cell for cell in asked if cell.key not in done]
    if done:
        tell(f"{experiment.name}: {len(done)} of {len(cells)} cells are there already")
    for cell, values in _measured(experiment, missing, settings):
        done[cell.key] = values
        _write(folder, cell, settings, values)
        tell(f"{experiment.name}: {cell.key} ({len(done)} of {len(cells)})")
    # in the order asked for, whichever was there before or came first from another process
    result = experiment.conclude({c.key: done[c.key] for c in cells if c.key in done}, settings, folder)
    conditions = {**hardware(settings), **result.conditions}
    if len(done) < len(cells):
        conditions["cells"] = f"{len(done)} of {len(cells)} are measured"
    result = dataclasses.replace(result, conditions=conditions)
    write_whole(folder / "result.json", result.to_json())
    return result


def _some_keys(cells: Sequence[Cell]) -> str:
    keys = [cell.key for cell in cells]
    return ", ".join(keys) if len(keys) <= 6 else f"{', '.join(keys[:3])}, ..., {keys[-1]}"


def hardware(settings: Settings) -> Values:
    on_gpu = settings.device.startswith("cuda")
    return {
        "scale": settings.scale
        + (", cut down to see that it runs: these numbers mean nothing" if settings.quick else ""),
        "device": torch.cuda.get_device_name() if on_gpu else f"{os.cpu_count()} CPU cores ({platform.machine()})",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _measured(experiment: Experiment, cells: list[Cell], settings: Settings) -> Any:
    if settings.workers <= 1 or len(cells) <= 1:
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


def _write(folder: Path, cell: Cell, settings: Settings, values: Values) -> None:
    kept = to_plain({"asked": cell.values, "scale": settings.scale, "quick": settings.quick, "found": values})
    write_whole(_file(folder, cell), json.dumps({**kept, "sha256": _digest(kept["found"])}, indent=1) + "\n")


def _read(folder: Path, cell: Cell, settings: Settings) -> Values | None:
    """What was found before for the same question; a question asked otherwise, or a damaged file, is measured anew."""
    try:
        kept = read_json(_file(folder, cell))
        same = (kept["asked"], kept["scale"], kept["quick"]) == (to_plain(cell.values), settings.scale, settings.quick)
        whole = isinstance(kept["found"], dict) and kept.get("sha256", _digest(kept["found"])) == _digest(kept["found"])
        return from_plain(kept["found"]) if same and whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(found: Any) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
