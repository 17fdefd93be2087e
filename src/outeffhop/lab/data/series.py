"""Multivariate time series, scaled by their training rows and cut into windows of past and future."""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from outeffhop.lab.data import builtin, hub
from outeffhop.lab.data.files import files_under, lines
from outeffhop.lab.data.samples import SPLITS, Prepared, Sample, check_size, stack
from outeffhop.lab.data.specs import Spec, kind_of_file

if TYPE_CHECKING:
    from datasets import Dataset as Rows  # type: ignore[import-untyped]

__all__ = ["Series", "Windows", "load_series", "prepare_series", "read_csv"]

_MONTH = 30 * 24  # hours, as the benchmarks count them
_KNOWN = {  # training, validation and test rows of the benchmarks; rows after them are not used
    "etth": (12 * _MONTH, 4 * _MONTH, 4 * _MONTH),
    "ettm": (48 * _MONTH, 16 * _MONTH, 16 * _MONTH),
    "wth": (28 * _MONTH, 10 * _MONTH, 10 * _MONTH),
}
_SHARES = (0.7, 0.1, 0.2)
_TIME = re.compile(r"date|time|\b(ds|t|index|row|step|year|month|week|day|hour|minute|second)s?\b", re.IGNORECASE)


@dataclass(frozen=True)
class Series:
    """Values over time [rows, D], and the number of rows of each split, in order of time."""

    source: str
    digest: str
    dates: list[str]
    names: list[str]
    values: NDArray[np.float64]
    rows: tuple[int, int, int]


class Windows(Dataset[Sample]):
    """All windows of in_len + out_len rows: past_values [in_len, D] and future_values [out_len, D]."""

    def __init__(self, values: Tensor, in_len: int, out_len: int) -> None:
        self.values, self.in_len, self.out_len = values, in_len, out_len

    def __len__(self) -> int:
        return max(0, len(self.values) - self.in_len - self.out_len + 1)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index % len(self)
        now = start + self.in_len
        return {"past_values": self.values[start:now], "future_values": self.values[now : now + self.out_len]}


def load_series(spec: Spec) -> Series:
    """Loads the series of a spec; ETTh, ETTm and WTH have their usual splits, others 70/10/20 % of the rows."""
    if spec.where == "builtin":
        dates, values = builtin.synthetic_series()
        names = [f"series{i}" for i in range(values.shape[1])]
        name = spec.name
    elif spec.where == "hub":
        dates, names, values = _of_hub(spec, hub.load(spec))
        name = spec.name.replace("/", "")
    else:
        file = _one_csv(spec)
        dates, names, values = read_csv(file)
        name = file.name
    _check_dates(spec, dates)
    digest = hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()
    return Series(spec.text, digest, dates, names, values, _rows(spec, name, len(values)))


def _one_csv(spec: Spec) -> Path:
    files = [file for file in files_under(spec.path) if kind_of_file(file) == "series"]
    if len(files) != 1:
        raise ValueError(f"data spec {spec.text!r} contains {len(files)} csv files: give one, such as {files[0]}")
    return files[0]


def _rows(spec: Spec, name: str, rows: int) -> tuple[int, int, int]:
    for benchmark, known in _KNOWN.items():
        if name.lower().startswith(benchmark):
            if rows < sum(known):
                raise ValueError(
                    f"data spec {spec.text!r} has {rows} rows, but the usual splits of {benchmark.upper()} need "
                    f"{sum(known)}: give the whole file, or rename it to have it split 70/10/20"
                )
            return known
    train, test = int(_SHARES[0] * rows), int(_SHARES[2] * rows)
    return train, rows - train - test, test


def _check_dates(spec: Spec, dates: list[str]) -> None:
    """Raises a ValueError if the first column is not a time, or rows go back in time, which would test on the past."""
    numbers = list(takewhile(math.isfinite, map(_as_number, dates)))
    if len(numbers) == len(dates) and (np.diff(numbers) < 0).any():
        raise ValueError(
            f"data spec {spec.text!r}: the numbers in the first column do not increase, so they are not dates: put "
            "dates or row numbers into the first column, and sort the rows by time"
        )
    first, last = _as_time(dates[0]), _as_time(dates[-1])
    if first is not None and last is not None and last < first:
        raise ValueError(
            f"data spec {spec.text!r} goes back in time, from {dates[0]} to {dates[-1]}: sort the rows by time"
        )


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except (ValueError, TypeError):  # a datetime of the hub
        return float("nan")


def _as_time(text: str) -> datetime | None:
    """A date in ISO 8601; None for other formats."""
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def read_csv(file: Path) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """Reads dates, names of the series and values [rows, D] from a csv file with a header.

    The first column holds the dates. Without one, that is, where it holds numbers under the name of a series, it is a
    series like the others, and the dates are the numbers of the rows.
    """
    rows = _csv_rows(file)
    _, header = next(rows, (0, []))
    if not header or any(";" in name or "\t" in name for name in header):
        raise ValueError(
            f"{file} needs a header with the names of its columns, with commas; its first line is {header}"
        )
    if header[0][:1].isdigit() and all(math.isfinite(_as_number(name)) for name in header[1:]):
        raise ValueError(f"{file} has no header: its first line is {header}; add the names of the columns")
    found = [(number, row) for number, row in rows if row]
    for number, row in found:
        if len(row) != len(header):
            raise ValueError(f"{file}, row {number}: {len(row)} values, but the header has {len(header)}")
    if not found:
        raise ValueError(f"{file} has a header but no rows")
    dated = _holds_dates(header[0], [row[0] for _, row in found])
    if dated and len(header) < 2:
        raise ValueError(f"{file} needs at least one series beside its dates; its first line is {header}")
    dates = [row[0] for _, row in found] if dated else [str(i) for i in range(len(found))]
    names = header[1:] if dated else header
    values = [
        [_number(file, number, name, text) for name, text in zip(names, row[dated:], strict=True)]
        for number, row in found
    ]
    return dates, names, np.array(values)


def _holds_dates(name: str, column: Sequence[Any]) -> bool:
    """Whether a first column holds dates: by its name, or because it does not begin with a number, or counts rows."""
    if not name.strip() or _TIME.search(name):
        return True
    numbers = [_as_number(value) for value in column]
    return not math.isfinite(numbers[0]) or set(np.diff(numbers).tolist()) == {1.0}


def _csv_rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(lines(file))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:  # mostly an unmatched quote
        raise ValueError(f"{file}, row {reader.line_num}: {error}") from error


def _number(file: Path, row: int, column: str, text: str) -> float:
    value = _as_number(text)
    if not np.isfinite(value):
        raise ValueError(f"{file}, row {row}, column {column!r}: {text!r} is not a finite number; fill or drop the row")
    return value


def _of_hub(spec: Spec, found: dict[str, Rows]) -> tuple[list[str], list[str], NDArray[np.float64]]:
    """The rows of all splits in order of time; they are split again by rows."""
    dates: list[str] = []
    parts: list[NDArray[np.float64]] = []
    names: list[str] = []
    for rows in (found[split] for split in SPLITS if split in found):
        first, *names = rows.features
        dated = _holds_dates(first, rows[first])
        names = names if dated else [first, *names]
        dates += [str(date) for date in (rows[first] if dated else range(len(dates), len(dates) + len(rows)))]
        parts.append(np.column_stack([_column(spec, rows, name) for name in names]))
    if not parts:
        raise ValueError(f"data spec {spec.text!r} has splits {', '.join(found)}: it needs one of {', '.join(SPLITS)}")
    values = np.concatenate(parts)
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row, column = bad[0]
        raise ValueError(f"data spec {spec.text!r}, row {row}, column {names[column]!r}: not a finite number")
    return dates, names, values


def _column(spec: Spec, rows: Rows, name: str) -> NDArray[np.float64]:
    try:
        return np.asarray(rows[name], np.float64)
    except (ValueError, TypeError) as error:
        raise ValueError(f"data spec {spec.text!r}: column {name!r} does not hold numbers ({error})") from error


def prepare_series(series: Series, *, in_len: int, out_len: int) -> Prepared:
    """Prepares series for a forecaster.

    Only training rows are used for scaling. Validation and test windows begin in_len rows before their split, so that
    every row of the split is forecast.
    """
    check_size("in_len", in_len)
    check_size("out_len", out_len)
    train_rows = series.values[: series.rows[0]]
    if not len(train_rows):
        raise ValueError(f"data spec {series.source!r} has {len(series.values)} rows, none for training: give more")
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = train_rows.mean(0), train_rows.std(0)
        # rounding may give a series that is constant in the training rows a deviation of 1e-16
        deviation = np.where(train_rows.max(0) > train_rows.min(0), deviation, 1.0)
        scaled = torch.from_numpy((series.values - mean) / deviation).float()
    fine = np.isfinite(deviation) & torch.isfinite(scaled).all(0).numpy()
    if not fine.all():
        raise ValueError(
            f"data spec {series.source!r}: {series.names[int(np.argmin(fine))]!r} has values too large to scale: "
            "correct or drop them"
        )
    sets = {}
    for split, begin, end in _bounds(series.rows):
        sets[split] = Windows(scaled[max(0, begin - in_len) : end], in_len, out_len)
        if not len(sets[split]):
            raise ValueError(
                f"data spec {series.source!r} has {end - begin} rows in {split}, too few for one window of "
                f"in_len={in_len} and out_len={out_len}: give more rows or shorter windows"
            )
    return Prepared(
        "forecasting",
        train=sets["train"],
        validation=sets["validation"],
        test=sets["test"],
        collate=stack,
        eval_collate=stack,
        changes={"num_series": series.values.shape[1], "in_len": in_len, "out_len": out_len},
        about={
            "source": series.source,
            "kind": "series",
            "content": series.digest,
            "splits": {
                split: {"samples": len(part), "rows": rows}
                for (split, part), rows in zip(sets.items(), series.rows, strict=True)
            },
            "series": series.names,
            "preprocessing": {"mean": mean.tolist(), "std": deviation.tolist(), "in_len": in_len, "out_len": out_len},
        },
    )


def _bounds(rows: tuple[int, int, int]) -> Iterator[tuple[str, int, int]]:
    begin = 0
    for split, count in zip(SPLITS, rows, strict=True):
        yield split, begin, begin + count
        begin += count
