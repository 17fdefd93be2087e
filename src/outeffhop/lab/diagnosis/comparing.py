"""A model beside itself in floating point: its task's metric, the SQNR of its outputs, and how often it agrees."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.metrics import Batch, Metric, evaluating, main_output, metric_for, to_device

__all__ = ["Comparison"]

_KEPT = 2**28  # numbers of the outputs in floating point that are kept: one GiB


class Comparison:
    """A metric for ``outeffhop.quantization.evaluate``; ``full`` has the values of the model itself.

    It returns the task's metric, if the task has one; "sqnr_db", signal over error of the outputs against the model's
    own, without padding; and for logits "agreement", the share of places where the largest one is the same. The model
    runs once for each batch: its outputs are kept as long as they fit into a GiB.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Batch], task: str) -> None:
        self.model, self.batches = model, batches
        self.metric: Metric = _nothing if task == "embedding" else metric_for(task)
        self._kept: dict[int, Tensor] = {}
        self._room = _KEPT
        watched = _Watched(model, self._keep)
        with evaluating(model):
            found = self.metric(watched, batches)
        self.full = {**found, "sqnr_db": math.inf, **({"agreement": 1.0} if watched.has_logits else {})}

    def __call__(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        if model is self.model:
            return self.full
        sums = _Sums()
        watched = _Watched(model, lambda i, batch, out: sums.add(batch, self._truth(i, batch), out))
        found = self.metric(watched, batches)
        return {**found, "sqnr_db": sums.sqnr_db, **({"agreement": sums.agreement} if watched.has_logits else {})}

    def _keep(self, i: int, batch: Batch, out: Tensor) -> None:
        if out.numel() <= self._room:
            self._room -= out.numel()
            self._kept[i] = out.cpu()

    @torch.no_grad()
    def _truth(self, i: int, batch: Batch) -> Tensor:
        return self._kept[i] if i in self._kept else main_output(self.model(**batch))


class _Watched(nn.Module):
    """A model whose outputs are shown as a metric runs it, with the number of the batch."""

    def __init__(self, model: nn.Module, see: Any) -> None:
        super().__init__()
        self.model, self.see = model, see
        self.has_logits = False
        self._count = 0

    def forward(self, **batch: Tensor) -> Any:
        out = self.model(**batch)
        self.has_logits = isinstance(getattr(out, "logits", None), Tensor)
        self.see(self._count, batch, main_output(out))
        self._count += 1
        return out


class _Sums:
    """Signal, error and agreement over batches."""

    def __init__(self) -> None:
        self.signal = self.noise = 0.0
        self.same = self.places = 0

    def add(self, batch: Batch, truth: Tensor, found: Tensor) -> None:
        truth, found = truth.to(found.device), found
        mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
        if mask is not None and mask.shape == truth.shape[:2]:
            truth, found = truth[mask.bool()], found[mask.bool()]
        self.signal += float(truth.double().square().sum())
        self.noise += float((found.double() - truth.double()).square().sum())
        same = truth.argmax(-1) == found.argmax(-1)
        self.same, self.places = self.same + int(same.sum()), self.places + same.numel()

    @property
    def sqnr_db(self) -> float:
        if self.noise == 0.0:
            return math.inf
        # outputs that are not finite are destroyed, whatever the rest is
        return 10.0 * math.log10(self.signal / self.noise) if 0.0 < self.signal / self.noise < math.inf else -math.inf

    @property
    def agreement(self) -> float:
        return self.same / max(self.places, 1)


@torch.no_grad()
def _nothing(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """The metric of a task without one: it only runs the model."""
    for batch in batches:
        model(**to_device(batch, model))
    return {}
