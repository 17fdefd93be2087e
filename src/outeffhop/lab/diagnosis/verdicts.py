"""Decibels in words. This table is the only place that says what they mean."""

from __future__ import annotations

import math

__all__ = ["VERDICTS", "is_enough", "verdict"]

VERDICTS = {  # from this SQNR of the outputs on
    25.0: "as good as unchanged",
    15.0: "usable",
    8.0: "damaged",
    -math.inf: "destroyed",
}
"""SQNR of the outputs in dB → what it means.

The error's power is 0.3 % of the outputs' at 25 dB, 3 % at 15 dB and 16 % at 8 dB. Two embeddings with such an error
between them have a cosine of 0.998, 0.985 and 0.93.
"""
_ENOUGH = 15.0


def verdict(sqnr_db: float) -> str:
    """The word for an SQNR as it is shown, to a tenth; one that is not a number has the worst."""
    return next((word for least, word in VERDICTS.items() if round(sqnr_db, 1) >= least), "destroyed")


def is_enough(sqnr_db: float) -> bool:
    """Whether outputs with this SQNR, as it is shown, are usable."""
    return round(sqnr_db, 1) >= _ENOUGH
