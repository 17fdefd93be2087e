"""Learning from a teacher: its outputs take the place of labels.

A model whose labels are unknown can still be fine-tuned, without losing what it does, if it imitates its former self.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, kl_div, log_softmax

from outeffhop.metrics import evaluating, main_output, sqnr_db, task_of, to_device

__all__ = ["Teacher", "inputs_of", "without_dropout"]

_NOT_INPUTS = ("labels", "soft_labels")
_LARGEST = 1 << 24  # elements of logits compared at once


class Teacher:
    """A frozen model whose outputs another one learns.

    Args:
        model: gives logits, or hidden states if it has no head.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self.task = task_of(model)

    def items(self, batch: dict[str, Tensor]) -> Tensor | int:
        """What the loss is a mean over: tokens of language models, without padding; samples of others."""
        if self.task == "seq2seq":
            return batch["labels"].ne(-100).sum()
        if self.task in ("mlm", "clm"):
            mask = batch.get("attention_mask")
            return batch["input_ids"].numel() if mask is None else mask.sum()
        return len(next(iter(batch.values())))

    def loss(self, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
        """The KL divergence of the predictions from the teacher's, averaged over positions.

        For a model without a head: the squared error of its hidden states relative to their square, plus 1 − the cosine
        of their means over tokens, averaged over samples.
        """
        with torch.no_grad():
            truth = self.model(**inputs_of(batch, self.model))
        found, target = main_output(outputs), main_output(truth)
        mask = self._mask(batch, target)
        if truth.get("logits") is None:
            return _distance(_wide(found), _wide(target), mask)
        found, target = found.flatten(0, -2), target.flatten(0, -2)
        if mask is not None:
            found, target = found[mask.flatten()], target[mask.flatten()]
        rows = max(1, _LARGEST // target.shape[-1])  # the float32 logits of a large vocabulary do not fit at once
        parts = zip(found.split(rows), target.split(rows), strict=True)
        total = sum(
            kl_div(log_softmax(_wide(a), -1), log_softmax(_wide(b), -1), reduction="sum", log_target=True)
            for a, b in parts
        )
        return total / max(len(target), 1)  # type: ignore[return-value]

    def _mask(self, batch: dict[str, Tensor], target: Tensor) -> Tensor | None:
        """[B, T] of bools: False at padding. None if the outputs have none."""
        mask = batch["labels"].ne(-100) if self.task == "seq2seq" else batch.get("attention_mask")
        return mask.bool() if mask is not None and mask.shape == target.shape[:2] else None

    @torch.no_grad()
    def likeness(self, model: nn.Module, given_batches: Iterable[dict[str, Tensor]]) -> dict[str, float]:
        """How near another model's hidden states are: the cosine of their means over tokens, and their SQNR in dB."""
        cosines, triples = [], []
        with evaluating(model):
            for batch in given_batches:
                given = inputs_of(to_device(batch, model), model)
                truth, found = main_output(self.model(**given)), main_output(model(**given))
                mask = self._mask(given, truth)
                cosines.append(cosine_similarity(_pooled(found, mask), _pooled(truth, mask), dim=-1))
                triples.append((given, truth, found))
        return {"cosine": float(torch.cat(cosines).mean()), "sqnr_db": sqnr_db(triples)}


def without_dropout(model: nn.Module) -> None:
    """Turns dropout off: an imitation has an exact target, and noise only keeps it from reaching it."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "dropout" in name and isinstance(value, float):  # of functional dropout, as in OPT and Llama
                setattr(module, name, 0.0)


def inputs_of(batch: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """The batch without its labels; a model with an encoder and a decoder needs them to make the decoder's inputs."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {name: value for name, value in batch.items() if name != "soft_labels"}
    return {name: value for name, value in batch.items() if name not in _NOT_INPUTS}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _pooled(x: Tensor, mask: Tensor | None) -> Tensor:
    """[B, ..., d] → [B, d], the mean over tokens."""
    x = _wide(x).flatten(1, -2) if x.dim() > 2 else _wide(x)[:, None]
    if mask is None:
        return x.mean(1)
    weight = mask[..., None].to(x.dtype)
    return (x * weight).sum(1) / weight.sum(1).clamp(min=1)


def _distance(found: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    weight = 1.0 if mask is None else mask[..., None].to(target.dtype)
    error = ((found - target) * weight).square().flatten(1).sum(1)
    relative = error / (target * weight).square().flatten(1).sum(1).clamp(min=1e-12)
    return (relative + 1 - cosine_similarity(_pooled(found, mask), _pooled(target, mask), dim=-1)).mean()
