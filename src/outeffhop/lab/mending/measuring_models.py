"""Measures a model for a mending: its outliers, and what 8 bits cost it by each scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.data.samples import random_batches
from outeffhop.lab.data.tokenizer import marking_ids
from outeffhop.lab.mending.mend_config import MendConfig
from outeffhop.lab.mending.mend_report import Measured
from outeffhop.lab.training.imitation import Teacher
from outeffhop.metrics import metric_for
from outeffhop.outliers import measure
from outeffhop.quantization import evaluate

__all__ = ["MEASURED", "measured"]

MEASURED = ("paper", "linear", "per-token", "smoothquant", "fp8")
"""The schemes that a mending measures, before and after."""


def measured(
    model: Any, prepared: Prepared, config: MendConfig, original: Teacher | None, tell: Callable[[str], None]
) -> Measured:
    """The outliers of a model, and its metrics in floating point and in W8A8 by the schemes of ``MEASURED``.

    Args:
        original: for a model without a head: the model as it came, which it should resemble.
    """
    evaluation = list(batches(prepared.validation, prepared.eval_collate, config.batch_size, limit=config.batches))
    tell("outliers")
    outliers = measure(model, evaluation, special_ids=marking_ids(prepared.tokenizer))
    metric = None if original is None else _resembles(model, original)
    quantized = {}
    for name in MEASURED:
        tell(f"W8A8 {name}")
        quantized[name] = evaluate(
            model,
            lambda seed: random_batches(
                prepared.train, prepared.eval_collate, config.batch_size, config.calibration_batches, seed
            ),
            evaluation,
            metric,
            scheme=f"W8A8 {name}",
            seeds=1 if name != "paper" else config.seeds,
        )
    return Measured(outliers, quantized)


def _resembles(model: nn.Module, original: Teacher) -> Any:
    """The metrics of a model without a head: likeness to the original, and the SQNR against itself unquantized."""
    own = metric_for("embedding", model)

    def metric(candidate: nn.Module, given: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        kept = list(given)
        return {"cosine": original.likeness(candidate, kept)["cosine"], **own(candidate, kept)}

    return metric
