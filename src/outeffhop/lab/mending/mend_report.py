"""What mending changed: outliers and the cost of 8 bits, before and after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outeffhop._dataclass_io import JsonReport
from outeffhop.outliers.outlier_report import OutlierReport
from outeffhop.quantization.quantization_report import QuantizationReport

__all__ = ["Measured", "MendReport"]


@dataclass(frozen=True)
class Measured(JsonReport):
    """A model as it was measured once.

    Attributes:
        outliers: of its activations, and what its heads attend to.
        quantized: scheme → what it costs; "paper" is static W8A8 of everything.
    """

    FORMAT = "outeffhop.measured.1"

    outliers: OutlierReport
    quantized: dict[str, QuantizationReport]

    @property
    def full(self) -> dict[str, float]:
        """The metrics in floating point."""
        return self.quantized["paper"].full


@dataclass(frozen=True)
class MendReport(JsonReport):
    """The report of a mending; ``mend.json``.

    Attributes:
        checkpoint: the name of the folder that was mended.
        data: what it was fine-tuned and measured on.
        method: the attention method of the mended model; "vanilla" means that its architecture is that of the original.
        task: what it was fine-tuned for.
        teacher: the name of the checkpoint that it imitated; None if it learned from labels.
        steps, batch_size, length: of the fine-tuning; the length is None for data other than text.
        penalty, penalty_kind, weight_bound, lr: of the fine-tuning.
        seconds: that the fine-tuning took, without measuring.
        seed: of the fine-tuning.
        before, after: the model as it came, and the mended one.
        plain: the model after the same fine-tuning without any remedy; None if it was not asked for.
    """

    FORMAT = "outeffhop.mending.1"
    DERIVED = ("summary",)

    checkpoint: str
    data: str
    method: str
    task: str
    teacher: str | None
    steps: int
    batch_size: int
    length: int | None
    penalty: float
    weight_bound: float
    lr: float
    seconds: float
    seed: int
    before: Measured
    after: Measured
    plain: Measured | None = None
    penalty_kind: str = "log_tail"

    @property
    def columns(self) -> dict[str, Measured]:
        """The models by name, in the order in which they are shown."""
        fine = {} if self.plain is None else {"plain fine-tuning": self.plain}
        return {"as it came": self.before, **fine, "mended": self.after}

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        """Each model in a few numbers."""
        return {
            name: {
                "max_inf_norm": each.outliers.max_inf_norm,
                "avg_kurtosis": each.outliers.avg_kurtosis,
                "floating_point": each.full,
                **{scheme: {m: q.mean(m) for m in q.quantized} for scheme, q in each.quantized.items()},
            }
            for name, each in self.columns.items()
        }
