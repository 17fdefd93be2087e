"""What every table and figure of the paper is made of: cells measured one by one, and a result drawn from all.

A cell is the smallest thing measured: one model, method and seed, say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from outeffhop._dataclass_io import JsonReport

__all__ = [
    "Cell",
    "Experiment",
    "Settings",
    "Table",
    "Figure",
    "Verdict",
    "Result",
    "check_data",
    "check_only",
    "chosen",
]

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
class Result(JsonReport):
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
        alone: whether its cells are measured one at a time, whatever the workers: what runs beside them shows.
    """

    name: str
    of: str
    about: str
    cells: Callable[[Settings], Sequence[Cell]]
    measure: Callable[[Cell, Settings], Values]
    conclude: Callable[[dict[str, Values], Settings, Path], Result]
    needs: Callable[[Settings], Sequence[str]] = lambda settings: ()
    partial: bool = False
    alone: bool = False


def check_name(what: str, name: str) -> None:
    """Raises ValueError for a name that could lead to a file outside its folder, or to a hidden one."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{what}={name!r}: letters, digits, dots, dashes and underscores are needed, no dot or dash first"
        )


def chosen(cells: Sequence[Cell], settings: Settings) -> list[Cell]:
    """Those that are asked for by ``only``."""
    return [cell for cell in cells if any(fnmatchcase(cell.key, pattern) for pattern in settings.only)]


def check_only(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError for a pattern that no cell has: a slip in one of several would leave its cells unmeasured."""
    keys = [cell.key for cell in experiment.cells(settings)]
    for pattern in settings.only:
        if not any(fnmatchcase(key, pattern) for key in keys):
            some = ", ".join(keys) if len(keys) <= 6 else f"{', '.join(keys[:3])}, ..., {keys[-1]}"
            raise ValueError(f"only={pattern!r}: {experiment.name} has no such cell; there are {some}")


def check_data(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError where a data set is missing."""
    for name in experiment.needs(settings):
        if settings.data is None or not (settings.data / name).is_dir():
            raise ValueError(
                f"{experiment.name} at scale={settings.scale!r} needs the folder {name!r} of the data sets: "
                f"say where they are with --data FOLDER (data={str(settings.data)!r})"
            )
