"""The parts of every experiment: cells that are measured one by one, and a result drawn from all of them.

A cell is the smallest thing that is measured, such as one model, method and seed.
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
    "group_by",
]

Scale = Literal["tiny", "small", "paper"]
Values = dict[str, Any]
VerdictWord = Literal["confirmed", "not seen", "contradicted", "not as printed", "not measured"]


@dataclass(frozen=True)
class Settings:
    """How an experiment is run.

    Attributes:
        scale: tiny (two CPU cores), small (one GPU) or paper.
        seeds: number of seeds.
        out: folder; an experiment writes ``NAME.json`` and a folder with its own name into it.
        data: folder with the public data sets (mnist/, cifar10/, ett/, ...), if there is one.
        workers: cells measured at the same time.
        device: cpu or cuda.
        quick: cut down to seconds, to see that it runs; the numbers mean nothing.
        only: patterns of cell keys, such as ``opt-*``: only these cells are measured. The result is drawn from them
            and from cells measured earlier.
        text: data spec of the text that BERT and OPT are trained on, instead of the folder in ``data``.
        tokenizer: folder or ``hub:NAME`` of a tokenizer, or a folder with one for each model (bert/, opt/); "trained"
            trains one on the text. By default that of the paper's model at its scale, and a trained one otherwise.
    """

    scale: Scale = "tiny"
    seeds: int = 3
    out: Path = Path("results")
    data: Path | None = None
    workers: int = 1
    device: str = "cpu"
    quick: bool = False
    only: tuple[str, ...] = ("*",)
    text: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        key: its name; letters, digits, dots, dashes and underscores.
        values: what ``Experiment.measure`` needs to know, as JSON values.
        earlier: values that it had before; a kept cell that was measured with these still counts.
    """

    key: str
    values: Values = field(default_factory=dict)
    earlier: Values | None = None

    def __post_init__(self) -> None:
        check_name("key", self.key)


@dataclass(frozen=True)
class Table:
    """Rows under columns. The entries are text or numbers; None leaves an entry empty.

    Attributes:
        better: column → "low" or "high", for columns whose best and second-best numbers are marked.
        group: only rows with the same entry in this column are compared; None compares all rows.
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
            raise ValueError(f"table {self.title!r} has {len(self.columns)} columns: every row needs as many entries")
        odd = [entry for row in self.rows for entry in row if not isinstance(entry, str | int | float | None)]
        if odd:
            raise ValueError(f"table {self.title!r} has an entry that is neither text nor a number: {odd[0]!r}"[:200])


@dataclass(frozen=True)
class Figure:
    """A figure, drawn as ``NAME.png`` into the folder of the experiment."""

    name: str
    title: str
    caption: str

    def __post_init__(self) -> None:
        check_name("name", self.name)


@dataclass(frozen=True)
class Verdict:
    """What our numbers say about a claim of the paper.

    Attributes:
        verdict: confirmed (at this scale), "not seen" or contradicted; "not as printed" for a theorem whose formula
            needs a correction, which ``numbers`` states; "not measured" where a cell is missing.
        seeds: how many seeds (trained models, where each is compared with itself) stand behind it, of what was
            measured with the fewest; None where they are not what is compared. One neither confirms nor contradicts.
    """

    claim: str
    verdict: VerdictWord
    numbers: str
    seeds: int | None = None

    def __post_init__(self) -> None:
        if self.seeds == 1 and self.verdict in ("confirmed", "contradicted"):
            raise ValueError(f"verdict={self.verdict!r} on {self.claim!r}: one seed can only be 'not seen'")

    @property
    def seeds_said(self) -> str:
        """ "3 seeds", or nothing."""
        return "" if self.seeds is None else f"{self.seeds} seed{'' if self.seeds == 1 else 's'}"


@dataclass(frozen=True)
class Result(JsonReport):
    """What an experiment found.

    Attributes:
        conditions: data, steps, sizes, seeds, hardware: what a reader must know about the numbers.
        cells: keys of the cells it was drawn from; ``run`` fills them in.
    """

    name: str
    of: str
    about: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    verdicts: Sequence[Verdict] = ()
    conditions: Values = field(default_factory=dict)
    cells: Sequence[str] = ()


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: as the command takes it, such as table1.
        of: the place in the paper, such as Table 1.
        about: one sentence.
        cells: the cells to measure under the settings.
        measure: one cell. A module-level function: it may run in another process.
        conclude: tables, figures (drawn into the given folder) and verdicts from what was found, by key.
        needs: folders of ``Settings.data`` that are required at this scale.
        partial: whether a result can be drawn from some of the cells.
        alone: whether cells are measured one at a time, for any number of workers, because others would disturb them.
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

    def result(
        self, tables: Sequence[Table], figures: Sequence[Figure], verdicts: Sequence[Verdict], conditions: Values
    ) -> Result:
        return Result(self.name, self.of, self.about, tables, figures, verdicts, conditions)


def check_name(what: str, name: str) -> None:
    """Raises ValueError for a name that could lead to a file in another folder, or to a hidden file."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{what}={name!r}: must consist of letters, digits, dots, dashes and underscores, "
            "and must not start with a dot or a dash"
        )


def group_by(cells: Sequence[Cell], found: Mapping[str, Values], *names: str) -> dict[Any, list[Values]]:
    """What was found in the cells, grouped by the named ones of their values; each group is a list over seeds."""
    groups: dict[Any, list[Values]] = {}
    for cell in cells:
        if cell.key in found:
            asked = tuple(cell.values[name] for name in names)
            groups.setdefault(asked if len(names) > 1 else asked[0], []).append(found[cell.key])
    return groups


def chosen(cells: Sequence[Cell], settings: Settings) -> list[Cell]:
    """The cells that ``only`` selects."""
    return [cell for cell in cells if any(fnmatchcase(cell.key, pattern) for pattern in settings.only)]


def check_only(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError for a pattern that matches no cell: a typo in one of several would leave cells unmeasured."""
    keys = [cell.key for cell in experiment.cells(settings)]
    for pattern in settings.only:
        if not any(fnmatchcase(key, pattern) for key in keys):
            some = ", ".join(keys) if len(keys) <= 6 else f"{', '.join(keys[:3])}, ..., {keys[-1]}"
            raise ValueError(f"only={pattern!r}: matches no cell of {experiment.name}; choose from {some}")


def check_data(experiment: Experiment, settings: Settings) -> None:
    """Raises ValueError if a data set is missing."""
    for name in experiment.needs(settings):
        if settings.data is None or not (settings.data / name).is_dir():
            raise ValueError(
                f"{experiment.name} at scale={settings.scale!r} needs the folder {name!r}: "
                f"pass the folder that contains it with --data FOLDER (data={str(settings.data)!r})"
            )
