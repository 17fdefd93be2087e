"""The metric of each task that says which evaluation was best, and when training no longer improves it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CHIEF_METRICS", "ChiefMetric"]


@dataclass(frozen=True)
class ChiefMetric:
    """A metric of the validation set.

    Attributes:
        name: its key in a line of Trainer's log history.
        greater_is_better: an accuracy, not a loss.
    """

    name: str
    greater_is_better: bool

    def best_step(self, history: Sequence[Mapping[str, Any]], since: int = 0) -> int | None:
        """The step of the best evaluation in a log history, the first of equal ones; None if there is none.

        Args:
            since: evaluations of earlier steps do not count.
        """
        sign = -1.0 if self.greater_is_better else 1.0
        found = [
            (sign * line[self.name], int(line["step"]))
            for line in history
            if self.name in line and line["step"] >= since and math.isfinite(line[self.name])
        ]
        return min(found)[1] if found else None

    def stagnant(self, history: Sequence[Mapping[str, Any]], patience: int) -> bool:
        """Whether none of the last ``patience`` evaluations is better than all before them."""
        values = [line[self.name] for line in history if self.name in line]
        if len(values) <= patience:
            return False
        best = max if self.greater_is_better else min
        before, after = best(values[:-patience]), best(values[-patience:])
        return (after <= before) if self.greater_is_better else (after >= before)


CHIEF_METRICS = dict.fromkeys(("mlm", "clm", "seq2seq"), ChiefMetric("eval_loss", False)) | {
    "classification": ChiefMetric("eval_accuracy", True),
    "forecasting": ChiefMetric("eval_mse", False),
    "embedding": ChiefMetric("eval_cosine", True),
}
