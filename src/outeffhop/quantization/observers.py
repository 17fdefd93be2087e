"""Range estimators: the range of a quantizer, from the tensors seen in calibration. Only the range is kept.

Each batch gives a range: its minimum and maximum, two percentiles, or the range with the smallest squared error.
"minmax" joins them to the widest, so it does not matter how the data are split into batches. The others start with
the first batch's range and follow with a momentum, range ← m·range + (1 − m)·batch. A module that runs several times
on one batch, as ALBERT's layer does, has the range of all its runs there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outeffhop._naming import known
from outeffhop.quantization.quantizers import Uniform

__all__ = ["RANGES", "Observer", "Seen", "check_finite", "percentile_range", "mse_range"]

RANGES = ("minmax", "running", "percentile", "mse")

# How much of [min, max] the search keeps: 60 steps of 7 % down to 1/64.
_SHARES = tuple(math.exp(-i * math.log(64.0) / 59) for i in range(60))


@dataclass(frozen=True)
class Seen:
    """What an observer saw of one tensor.

    Attributes:
        low, high: its range, float32 [grids].
        least, most: its smallest and largest numbers, which are not finite if any of them is not; float32 [grids].
    """

    low: Tensor
    high: Tensor
    least: Tensor
    most: Tensor


class Observer:
    """The range of a tensor, estimated batch by batch.

    Args:
        spec: the quantizer that needs the range.
        how: one of ``RANGES``.
        momentum: for all except "minmax".
        percentile: for "percentile": the range is from the (100 − percentile)-th to the percentile-th percentile.

    Attributes:
        low, high: float32 [grids], None before the first batch.
    """

    def __init__(self, spec: Uniform, how: str = "minmax", momentum: float = 0.9, percentile: float = 99.999) -> None:
        known("range", how, RANGES)
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum={momentum}: must be in [0, 1)")
        if not 50.0 < percentile <= 100.0:
            raise ValueError(f"percentile={percentile}: must be in (50, 100]")
        if spec.granularity == "token":
            raise ValueError(
                "granularity='token' computes each token's range when it runs: there is nothing to observe"
            )
        self.spec, self.how, self.momentum, self.percentile = spec, how, momentum, percentile
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self._before: tuple[Tensor, Tensor] | None = None  # the range before the last batch
        self._batch: tuple[Tensor, Tensor] | None = None  # that of the last batch alone

    def observe(self, x: Tensor, name: str = "the tensor", again: bool = False) -> None:
        """Updates the range with one batch, or with more of the last one.

        Args:
            x: a tensor of the batch.
            name: what an error calls it.
            again: whether it belongs to the same batch as the tensor before.

        Raises:
            ValueError: the tensor holds NaN or inf; the message calls it ``name``.
        """
        seen = self.look(x)
        if seen is not None:
            check_finite([(name, seen)])
            self.take(seen, again)

    @torch.no_grad()
    def look(self, x: Tensor) -> Seen | None:
        """The first half of ``observe``, which waits for no GPU; None if x is empty."""
        if not x.numel():
            return None
        least, most = low, high = self.spec.minmax(x)
        if self.how == "percentile":
            low, high = percentile_range(x, self.spec, self.percentile)
        elif self.how == "mse":
            low, high = mse_range(x, self.spec)
        return Seen(low, high, least, most)

    @torch.no_grad()
    def take(self, seen: Seen, again: bool = False) -> None:
        """The second half: updates the range with that of a tensor whose numbers are finite."""
        low, high = seen.low, seen.high
        if again and self._batch is not None:
            low, high = _joined(self._batch, (low, high))
        elif self.low is not None and self.high is not None:
            self._before = self.low, self.high
        self._batch = low, high
        if self._before is None:
            self.low, self.high = low, high
        elif self.how == "minmax":
            self.low, self.high = _joined(self._before, (low, high))
        else:
            old_low, old_high = self._before
            self.low = self.momentum * old_low + (1.0 - self.momentum) * low
            self.high = self.momentum * old_high + (1.0 - self.momentum) * high


def check_finite(found: Sequence[tuple[str, Seen]]) -> None:
    """Raises a ValueError that names the first tensor with NaN or inf. It reads each device once."""
    ends: dict[torch.device, list[Tensor]] = {}
    for _, seen in found:
        ends.setdefault(seen.least.device, []).extend((seen.least, seen.most))
    if all(bool(torch.cat(parts).isfinite().all()) for parts in ends.values()):
        return
    name = next(name for name, seen in found if not bool(torch.cat((seen.least, seen.most)).isfinite().all()))
    raise ValueError(
        f"{name} holds NaN or inf, so it has no range: look for the first such tensor in the model's weights and inputs"
    )


def _joined(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])


def percentile_range(x: Tensor, spec: Uniform, percentile: float) -> tuple[Tensor, Tensor]:
    """The (100 − percentile)-th and the percentile-th percentile of each grid's elements, linear between ranks."""
    rows = spec.rows(x).float()
    last = rows.shape[1] - 1
    above = (1.0 - percentile / 100.0) * last  # how far from the end, in ranks
    count = min(int(above) + 2, last + 1)
    share = above - int(above)
    ends = []
    for largest in (False, True):
        found = rows.topk(count, dim=1, largest=largest).values  # the outermost first
        ends.append(torch.lerp(found[:, min(int(above), count - 1)], found[:, count - 1], share))
    return ends[0], ends[1]


def mse_range(x: Tensor, spec: Uniform) -> tuple[Tensor, Tensor]:
    """The part of [min, max], both ends shrunk by one factor, whose grid has the smallest squared error on x."""
    low, high = spec.minmax(x)
    values = x.float()
    best = torch.full_like(low, torch.inf)
    best_low, best_high = low.clone(), high.clone()
    for share in _SHARES:
        error = (
            spec.rows((spec.grid(low * share, high * share).fake(values) - values).square()).double().mean(1).float()
        )
        better = error < best
        best = torch.where(better, error, best)
        best_low = torch.where(better, low * share, best_low)
        best_high = torch.where(better, high * share, best_high)
    return best_low, best_high
