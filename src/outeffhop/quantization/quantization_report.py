"""What quantization cost: metrics before and after, by calibration seed, and the tensors to blame."""

from __future__ import annotations

import json
import math
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from outeffhop._io import from_json_value, parse_json, to_plain, write_whole
from outeffhop.quantization.fold import Folding

__all__ = ["QuantizationReport", "TensorError"]

_FORMAT = "outeffhop.quantization.1"


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
class QuantizationReport:
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
    """

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

    def to_json(self) -> str:
        """Strict JSON: an infinite number is written as "inf"."""
        return json.dumps({"format": _FORMAT, **to_plain(asdict(self))}, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> QuantizationReport:
        try:
            content = parse_json(text)
            if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT!r}")
            report: QuantizationReport = from_json_value(cls, content)
            return report
        except ValueError as error:
            raise ValueError(f"not a quantization report: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON; no moment finds the file half done."""
        write_whole(path, self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QuantizationReport:
        try:
            return cls.from_json(Path(path).read_bytes().decode())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __str__(self) -> str:
        how = f"{self.scheme}{'' if self.folding is None else ', LayerNorm folded'}"
        lines = [f"{self.model} ({self.method}), {how}, placement {self.placement}, {len(self.seeds)} seeds"]
        lines += [
            f"  {name}: {self.full[name]:.4g} → {self.mean(name):.4g} ± {self.std(name):.2g}" for name in self.quantized
        ]
        return "\n".join(lines)
