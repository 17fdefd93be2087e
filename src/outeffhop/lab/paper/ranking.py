"""Comparing numbers: means over seeds as text, the best and second best of a column, and verdicts on differences."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from statistics import mean, stdev, variance
from typing import Any

from outeffhop.lab.paper.experiment import Table, VerdictWord

__all__ = ["entry_text", "judged", "mean_std", "number_of", "places", "ranks", "shown", "surplus"]

_NUMBER = re.compile(r"[-−+]?(\d+\.?\d*|\.\d+)(e[-−+]?\d+)?")


def shown(value: float, digits: int = 4) -> str:
    """The number with this many significant digits and a true minus sign; 120, not 1.2e+02."""
    text = f"{value:.{digits}g}"
    return (f"{float(text):.0f}" if "e+" in text and abs(value) < 1e6 else text).replace("-", "−")


def mean_std(values: Sequence[float], digits: int = 4) -> str:
    """ "0.1234 ± 0.0056"; only the mean for a single value, and if a value is not finite."""
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return shown(mean(values), digits)
    return f"{shown(mean(values), digits)} ± {shown(stdev(values), 2)}"


def entry_text(entry: Any) -> str:
    """An entry of a table as reports show it: four significant digits, no exponent below a million, "" for None."""
    if entry is None:
        return ""
    if isinstance(entry, float) and math.isfinite(entry):
        return f"{entry:.0f}" if 1000 <= abs(entry) < 1e6 else f"{entry:.4g}"
    return str(entry)


def number_of(entry: Any) -> float | None:
    """The number in an entry, or the mean of "mean ± std"; None for other text."""
    if isinstance(entry, bool):
        return None
    if isinstance(entry, int | float):
        return float(entry)
    found = _NUMBER.fullmatch(str(entry).split("±")[0].strip())
    return float(found[0].replace("−", "-")) if found else None


def _spread_of(entry: Any) -> float:
    """The std in an entry "mean ± std", else 0."""
    return number_of(str(entry).partition("±")[2]) or 0.0


def ranks(table: Table) -> dict[tuple[int, int], int]:
    """(row, column) → 1 for the best and 2 for the second best, among the rows of a group.

    Numbers are compared as reports show them. Two that look equal, or differ by no more than the larger of their
    standard deviations, are a tie and share a rank: if two are best, none is second. If all numbers of a group are a
    tie, none is best.
    """
    columns = list(table.columns)
    group_at = None if table.group is None else columns.index(table.group)
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(table.rows):
        groups.setdefault(None if group_at is None else row[group_at], []).append(i)
    found = {}
    for name, better in table.better.items():
        at = columns.index(name)
        for rows in groups.values():
            texts = {i: entry_text(table.rows[i][at]) for i in rows if not isinstance(table.rows[i][at], bool)}
            numbers = {i: n for i, text in texts.items() if (n := number_of(text)) is not None and math.isfinite(n)}
            sign = 1 if better == "high" else -1
            spread = {i: _spread_of(texts[i]) for i in numbers}
            place = {
                i: 1 + sum(sign * (other - n) > max(spread[i], spread[j]) for j, other in numbers.items())
                for i, n in numbers.items()
            }
            last = 2 if list(place.values()).count(1) == 1 else 1
            if len(set(place.values())) > 1:
                found.update({(i, at): p for i, p in place.items() if p <= last})
    return found


def places(texts: Sequence[str]) -> list[int]:
    """The place of each number from the lowest, 1, by what reports show: those that look equal share one."""
    numbers = [number for text in texts if (number := number_of(text)) is not None]
    return [1 + sum(other < number for other in numbers) for number in numbers]


def surplus(first: Sequence[float], second: Sequence[float]) -> float:
    """By how much the first mean is above the second; 0 if the difference is within two standard errors.

    The error of a single number is unknown: for two single numbers this is their difference.
    """
    difference = mean(first) - mean(second)
    errors = [variance(values) / len(values) for values in (first, second) if len(values) > 1]
    return difference if abs(difference) > 2 * math.sqrt(sum(errors)) else 0.0


def judged(gain: float, margin: float = 0.0, seeds: int | None = None) -> VerdictWord:
    """The verdict on a claimed gain; a gain or loss within the margin does not count, nor does that of one seed."""
    if seeds == 1:
        return "not seen"
    return "confirmed" if gain > margin else "contradicted" if gain < -margin else "not seen"
