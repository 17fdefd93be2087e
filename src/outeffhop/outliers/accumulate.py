"""Running sums of one tensor's statistics, over batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from outeffhop.outliers.moments import Array, BatchStats
from outeffhop.outliers.outlier_report import Channel, Position, TensorStats

__all__ = ["Mean", "TensorSums"]


@dataclass
class Mean:
    """A running mean."""

    total: float = 0.0
    count: int = 0

    def add(self, values: Array) -> None:
        self.total += float(values.sum())
        self.count += values.size

    def merge(self, other: Mean) -> None:
        self.total += other.total
        self.count += other.count

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class TensorSums:
    """Sums of one tensor; at most ``keep`` positions and channels are reported."""

    keep: int
    samples: int = 0
    tokens: int = 0
    values: int = 0
    non_finite: int = 0
    outliers: int = 0
    max_abs: float = 0.0
    inf_norm: Mean = field(default_factory=Mean)
    token_inf_norm: Mean = field(default_factory=Mean)
    kurtosis: Mean = field(default_factory=Mean)
    token_kurtosis: Mean = field(default_factory=Mean)
    positions: list[Position] = field(default_factory=list)
    counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))  # outliers per channel, [d]
    maxima: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))  # largest |x| of them, [d]

    def add(self, batch: BatchStats, first_sample: int) -> None:
        self._widen(batch.width)
        self.samples += batch.inf_norm.size
        self.tokens += batch.token_inf_norm.size
        self.values += batch.values
        self.non_finite += batch.non_finite
        self.inf_norm.add(batch.inf_norm)
        self.token_inf_norm.add(batch.token_inf_norm)
        self.kurtosis.add(_varying(batch.kurtosis, batch.inf_norm))
        self.token_kurtosis.add(_varying(batch.token_kurtosis, batch.token_inf_norm))
        if batch.inf_norm.size:
            self.max_abs = _larger(self.max_abs, float(batch.inf_norm.max()))
        if not batch.outliers.numel():
            return
        size = batch.outliers.abs()
        self.outliers += size.numel()
        self.counts += torch.bincount(batch.where[2], minlength=len(self.counts))
        self.maxima.scatter_reduce_(0, batch.where[2], size, "amax")
        # with ties, so that which of them are kept does not depend on the batches
        largest = size >= size.topk(min(self.keep, size.numel())).values[-1]
        found = zip(batch.outliers[largest].tolist(), *batch.where[:, largest].tolist(), strict=True)
        self._keep([Position(value, first_sample + s, token, channel) for value, s, token, channel in found])

    def merge(self, other: TensorSums, first_sample: int) -> None:
        """Adds the sums of another rank, whose samples are numbered from ``first_sample``."""
        self._widen(len(other.counts))
        other._widen(len(self.counts))
        self.counts += other.counts
        self.maxima = torch.maximum(self.maxima, other.maxima)
        for name in ("samples", "tokens", "values", "non_finite", "outliers"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("inf_norm", "token_inf_norm", "kurtosis", "token_kurtosis"):
            getattr(self, name).merge(getattr(other, name))
        self.max_abs = _larger(self.max_abs, other.max_abs)
        self._keep([replace(p, sample=p.sample + first_sample) for p in other.positions])

    def stats(self, name: str, in_kurtosis: bool) -> TensorStats:
        return TensorStats(
            name=name,
            samples=self.samples,
            tokens=self.tokens,
            width=len(self.counts),
            inf_norm=_known(self.inf_norm),
            max_abs=self.max_abs,
            token_inf_norm=_known(self.token_inf_norm),
            kurtosis=self.kurtosis.value,
            token_kurtosis=self.token_kurtosis.value,
            outliers=self.outliers,
            values=self.values,
            non_finite=self.non_finite,
            positions=tuple(self.positions),
            channels=tuple(self._worst_channels()),
            in_kurtosis=in_kurtosis,
        )

    def _worst_channels(self) -> list[Channel]:
        carriers = self.counts.nonzero()[:, 0]
        listed = zip(carriers.tolist(), self.counts[carriers].tolist(), self.maxima[carriers].tolist(), strict=True)
        found = [Channel(*channel) for channel in listed]
        return sorted(found, key=lambda c: (-c.count, -c.max_abs, c.channel))[: self.keep]

    def _keep(self, found: list[Position]) -> None:
        found = [*self.positions, *found]
        self.positions = sorted(found, key=lambda p: (-abs(p.value), p.sample, p.token, p.channel))[: self.keep]

    def _widen(self, width: int) -> None:
        """Adds channels: tensors whose last dimension is the sequence differ in width between batches."""
        missing = width - len(self.counts)
        if missing > 0:
            self.counts = nn.functional.pad(self.counts, (0, missing))
            self.maxima = nn.functional.pad(self.maxima, (0, missing))


def _varying(kurtosis: Array, inf_norm: Array) -> Array:
    """Without those of constant samples or tokens, which have none. One that is nan because of a nan in x stays."""
    absent = np.isnan(kurtosis)
    return kurtosis[~(absent & np.isfinite(inf_norm))] if absent.any() else kurtosis


def _known(mean: Mean) -> float:
    return math.nan if mean.value is None else mean.value


def _larger(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
