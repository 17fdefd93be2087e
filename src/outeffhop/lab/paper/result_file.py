"""The file of an experiment, ``OUT/NAME.json``: its cells as they were measured, and the result drawn from them.

The file is replaced as a whole whenever a cell is finished, so a killed experiment keeps every finished cell. A lock
lets several processes add cells to the same file.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outeffhop._dataclass_io import JsonReport
from outeffhop._io import from_plain, read_json, to_plain, write_whole
from outeffhop.lab.paper.experiment import Result, Scale, Settings, Values

__all__ = ["KeptCell", "ResultFile", "add_cell", "kept_cells", "path_of", "read_all", "write_result"]


@dataclass(frozen=True)
class KeptCell:
    """A measured cell.

    Attributes:
        asked: the cell's values, as JSON has them.
        machine: where it was measured: device, version of torch, date.
        found: what ``Experiment.measure`` returned.
    """

    asked: Values
    machine: Values
    found: Values


@dataclass(frozen=True)
class ResultFile(JsonReport):
    """What the file holds. The settings are the same for all of its cells.

    Attributes:
        result: drawn from the cells that ``result.cells`` names; None until the experiment has finished once.
        sha256: of everything else in the file, so that a damaged number is not taken for a measured one.
    """

    scale: Scale
    quick: bool = False
    seeds: int = 3
    result: Result | None = None
    cells: Mapping[str, KeptCell] = field(default_factory=dict)
    sha256: str = ""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ResultFile:
        """Raises ValueError for a damaged file."""
        kept = super().load(path)
        # of what is written, not of the fields: a file from before a field was added is not damaged
        written = {name: value for name, value in read_json(Path(path)).items() if name != "sha256"}
        if kept.sha256 != _digest(written):
            raise ValueError(f"{path} has changed since it was written: its sha256 differs; restore it, or remove it")
        cells = {key: dataclasses.replace(cell, found=from_plain(cell.found)) for key, cell in kept.cells.items()}
        return dataclasses.replace(kept, cells=cells)

    def is_of(self, settings: Settings) -> bool:
        """Whether its cells were measured at this scale, as a trial or in full."""
        return (self.scale, self.quick) == (settings.scale, settings.quick)

    def to_json(self) -> str:
        """A line for each cell: changes of some of them are easy to compare."""
        plain = self._plain()
        digest = _digest(plain)
        plain["cells"] = _Lines(plain["cells"])
        plain["result"] = plain["result"] and _Lines(plain["result"])
        return f"{_Lines({**plain, 'sha256': digest})}\n"

    def _plain(self) -> Values:
        plain: Values = to_plain(dataclasses.asdict(self))
        del plain["sha256"]
        return plain


def _digest(plain: Values) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class _Lines(dict[str, Any]):
    """A mapping whose JSON has a line for each of its entries."""

    def __str__(self) -> str:
        entries = (f"{json.dumps(name, ensure_ascii=False)}: {_json(value)}" for name, value in self.items())
        return "{\n" + ",\n".join(entries) + "\n}" if self else "{}"


def _json(value: Any) -> str:
    return str(value) if isinstance(value, _Lines) else json.dumps(value, ensure_ascii=False)


def path_of(name: str, settings: Settings) -> Path:
    return settings.out / f"{name}.json"


def kept_cells(name: str, settings: Settings) -> dict[str, KeptCell]:
    """The cells of an experiment that were measured at this scale, by key."""
    return dict(_kept(path_of(name, settings), settings).cells)


def read_all(out: Path) -> dict[Path, ResultFile]:
    """Every file of results in a folder; other JSON files are skipped."""
    contents = {path: read_json(path) for path in sorted(out.glob("*.json"))}
    return {
        path: ResultFile.load(path) for path, kept in contents.items() if isinstance(kept, dict) and "cells" in kept
    }


def add_cell(name: str, settings: Settings, key: str, cell: KeptCell) -> None:
    path = path_of(name, settings)
    with _locked(path):
        kept = _kept(path, settings)
        write_whole(path, dataclasses.replace(kept, cells={**kept.cells, key: cell}).to_json())


def write_result(name: str, settings: Settings, result: Result) -> None:
    path = path_of(name, settings)
    with _locked(path):
        kept = _kept(path, settings)
        # in the result's order, whichever was measured first
        cells = {key: kept.cells[key] for key in result.cells} | dict(kept.cells)
        write_whole(path, dataclasses.replace(kept, seeds=settings.seeds, result=result, cells=cells).to_json())


def _kept(path: Path, settings: Settings) -> ResultFile:
    """What the file holds; a trial, and cells of another scale, are left out."""
    kept = ResultFile.load(path) if path.exists() else None
    return kept if kept is not None and kept.is_of(settings) else ResultFile(settings.scale, settings.quick)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for other processes that are writing this file."""
    folder = path.parent / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "cells.lock", "w") as handle:  # closing it, or the end of the process, releases the lock
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
