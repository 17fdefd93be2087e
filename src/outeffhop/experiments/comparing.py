"""Whether two lists of numbers, over seeds, differ by more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, variance

__all__ = ["surplus"]


def surplus(first: Sequence[float], second: Sequence[float]) -> float:
    """By how much the first mean is above the second; 0 where that is within two standard errors.

    One number has no error that could be known: of two single numbers the plain difference is given.
    """
    difference = mean(first) - mean(second)
    errors = [variance(values) / len(values) for values in (first, second) if len(values) > 1]
    return difference if abs(difference) > 2 * math.sqrt(sum(errors)) else 0.0
