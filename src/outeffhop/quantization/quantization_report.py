"""What quantization cost: metrics before and after, by calibration seed, and the tensors to blame."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from outeffhop._dataclass_io import JsonReport
from outeffhop.quantization.fold import Folding

__all__ = ["QuantizationReport", "Saved", "TensorError"]


@dataclass(frozen=True)
class TensorError:
    """How one quantizer rounds.

    Attributes:
        typical_db: signal over rounding error of the median channel or token; inf if nothing was lost.
        sqnr_db: the same for the whole tensor; an outlier's own power makes it look good.
        low, high: the ends of its range; None if each token has its own.
        std: the tensor's standard deviation.
        largest: its largest |x|. Many std mean outliers, which leave few steps to all other values.
    """

    name: str
    kind: str
    typical_db: float
    sqnr_db: float
    low: float | None
    high: float | None
    std: float
    largest: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint that ``save_compressed`` wrote, with the ranges of the first seed.

    Attributes:
        path: its folder.
        metric: metric → value of the model that was loaded from it.
        bytes_before, bytes_after: the weights of the checkpoint in floating point and of this one, on disk.
    """

    path: str
    metric: dict[str, float]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class QuantizationReport(JsonReport):
    """A model's metric in floating point and quantized.

    Attributes:
        model: the model's class.
        method: the method of its attention.
        scheme: the ``Scheme`` as text.
        placement: what was quantized.
        task: the task whose metric it is.
        seeds: the seeds of the calibration draws.
        calibration_batches, evaluation_batches: how many batches of each.
        full: metric → value in floating point.
        quantized: metric → value per seed.
        worst: the tensors with the lowest ``typical_db`` first, from the first seed and one evaluation batch.
        floating: what stayed in floating point, and why.
        folding: which LayerNorms were folded into the next layers first; None without folding.
        saved: the quantized checkpoint, if one was saved.
    """

    FORMAT = "outeffhop.quantization.1"

    model: str
    method: str
    scheme: str
    placement: str
    task: str
    seeds: tuple[int, ...]
    calibration_batches: int
    evaluation_batches: int
    full: dict[str, float]
    quantized: dict[str, tuple[float, ...]]
    worst: tuple[TensorError, ...]
    floating: dict[str, str]
    folding: Folding | None = None
    saved: Saved | None = None

    def __post_init__(self) -> None:
        for name, values in self.quantized.items():
            if name not in self.full or not values:
                raise ValueError(f"quantized.{name}: needs a value for each seed, and one in full")

    def mean(self, metric: str) -> float:
        return statistics.fmean(self.quantized[metric])

    def std(self, metric: str) -> float:
        """Sample standard deviation over calibration seeds; 0 for a single seed."""
        values = self.quantized[metric]
        finite = len(values) > 1 and all(map(math.isfinite, values))
        return statistics.stdev(values) if finite else 0.0

    def __str__(self) -> str:
        how = f"{self.scheme}{'' if self.folding is None else ', LayerNorm folded'}"
        lines = [f"{self.model} ({self.method}), {how}, placement {self.placement}, {len(self.seeds)} seeds"]
        lines += [
            f"  {name}: {self.full[name]:.4g} → {self.mean(name):.4g} ± {self.std(name):.2g}" for name in self.quantized
        ]
        return "\n".join(lines)
