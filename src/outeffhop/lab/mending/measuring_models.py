"""Measures a model for a mending: its outliers, and what 8 bits cost it by each scheme."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.mending.mend_config import MendConfig
from outeffhop.lab.mending.mend_report import Measured
from outeffhop.lab.training.imitation import Teacher
from outeffhop.metrics import metric_for
from outeffhop.outliers import measure
from outeffhop.quantization import SCHEMES, evaluate

__all__ = ["measured"]


def measured(
    model: Any, prepared: Prepared, config: MendConfig, original: Teacher | None, tell: Callable[[str], None]
) -> Measured:
    """The outliers of a model, and its metrics in floating point and in W8A8 by every scheme.

    Args:
        original: for a model without a head: the model as it came, which it should resemble.
    """
    evaluation = list(batches(prepared.validation, prepared.eval_collate, config.batch_size, limit=config.batches))
    tell("outliers")
    outliers = measure(model, evaluation, special_ids=_special_ids(prepared.tokenizer))
    metric = None if original is None else _resembles(model, original)
    quantized = {}
    for name in SCHEMES:
        tell(f"W8A8 {name}")
        quantized[name] = evaluate(
            model,
            lambda seed: _drawn(prepared, config.calibration_batches, config.batch_size, seed),
            evaluation,
            metric,
            scheme=f"W8A8 {name}",
            seeds=1 if name != "paper" else config.seeds,
        )
    return Measured(outliers, quantized)


def _resembles(model: nn.Module, original: Teacher) -> Any:
    """The metric of a model without a head: the SQNR against itself in floating point, and likeness to the original."""
    own = metric_for("embedding", model)

    def metric(candidate: nn.Module, given: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        kept = list(given)
        return {**own(candidate, kept), "cosine": original.likeness(candidate, kept)["cosine"]}

    return metric


def _drawn(prepared: Prepared, count: int, size: int, seed: int) -> list[dict[str, Tensor]]:
    """Batches of training samples, drawn at random."""
    samples = min(len(prepared.train), count * size)
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(seed))[:samples]
    parts = (order[i : i + size] for i in range(0, samples, size))
    return [prepared.eval_collate([prepared.train[int(j)] for j in part]) for part in parts]


def _special_ids(tokenizer: Any) -> list[int] | None:
    if tokenizer is None:
        return None
    names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
    return [i for i in (getattr(tokenizer, name, None) for name in names) if i is not None]
