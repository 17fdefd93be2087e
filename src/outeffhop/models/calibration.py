"""Starts a converted model near the function it was trained for, from what its heads do on data.

Softmax does not see an offset of all scores, so the logsumexp of a trained head lies anywhere: −23 to 139 in one small
model. A sink of 0 is nothing to one head and everything to another. Here the sink of each head starts where the no-op
takes a chosen share of the weight on average, the s with mean σ(s − lse) = share. QK-norm removes the lengths of
queries and keys; its factor g starts at mean rms(q) · mean rms(k) · scale · √D, which puts their means back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outeffhop.methods import Method
from outeffhop.metrics import evaluating, to_device
from outeffhop.models.inspection import inspecting
from outeffhop.models.modules import attention_modules, state_of
from outeffhop.models.real_tokens import RealTokens
from outeffhop.ops.call import Call

__all__ = ["Calibrated", "calibrated", "sink_of_share"]

Batch = Mapping[str, Tensor]
_SAMPLES = 4096  # logsumexps kept of each head and batch
_POSITIONS = 256  # outputs compared in each batch

_log = logging.getLogger("outeffhop")


@dataclass(frozen=True)
class Calibrated:
    """How a conversion began.

    Attributes:
        sinks: module → the first sink of each head; empty without sinks.
        factors: module → the first factor of QK-norm of each head; empty without QK-norm.
        divergence: mean KL divergence of the converted model's predictions from the original's, in nats; for a model
            without logits, the squared error of its hidden states relative to their variance.
    """

    sinks: dict[str, list[float]]
    factors: dict[str, list[float]]
    divergence: float


@dataclass
class _Head:
    """What one attention module did: samples of the logsumexp [H, N], sums of rms(q) [H] and rms(k) [H], the scale."""

    lse: list[Tensor] = field(default_factory=list)
    seen: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # in this batch: all logsumexps, and which count
    query: Tensor | float = 0.0
    key: Tensor | float = 0.0
    calls: int = 0
    factor: float = 1.0  # scale · √D

    def add(self, call: Call, lse: Tensor | None, real: Tensor | None) -> None:
        if lse is not None:
            found = lse.detach().float().movedim(-2, 0).flatten(1)  # [H, B·L]
            keep = torch.isfinite(found).all(0)
            if real is not None and real.shape == (lse.shape[0], lse.shape[-1]):
                keep &= real.to(keep.device).flatten()
            self.seen.append((found, keep))
        heads = call.query.shape[-3]
        self.query = self.query + _rms(call.query)
        self.key = self.key + _rms(call.key).repeat_interleave(heads // call.key.shape[-3])
        self.calls += 1
        self.factor = call.scale * math.sqrt(call.query.shape[-1])

    def sample(self, whole: Iterator[bool]) -> None:
        """Keeps samples of the batch's logsumexps, if all of them count (``whole``) without a look at which."""
        for found, keep in self.seen:
            counted = found if next(whole) else found[:, keep]
            self.lse.append(counted[:, :: max(1, counted.shape[1] // _SAMPLES)].clone())
        self.seen.clear()

    @property
    def qk_factor(self) -> Tensor:
        return self.query / self.calls * (self.key / self.calls) * self.factor  # type: ignore[return-value]


def calibrated(
    model: PreTrainedModel,
    method: Method,
    batches: Sequence[Batch],
    share: float,
    install: Callable[[PreTrainedModel, Method, bool], None],
) -> Calibrated:
    """Installs a method in a softmax model and sets its first sinks and factors from data.

    Args:
        install: gives the model the method, with sinks that take nothing and open gates.
    """
    if not batches:
        raise ValueError("calibrate is empty: give at least one batch of inputs")
    with evaluating(model), torch.no_grad():
        heads, before = _observe(model, batches)
        install(model, method, True)
        states = {name: s for name, module in attention_modules(model).items() if (s := state_of(module)) is not None}
        factors = {}
        for name, state in states.items():
            if state.qk_norm is not None:
                state.qk_norm.query.weight.copy_(heads[name].qk_factor)  # type: ignore[union-attr]
                factors[name] = heads[name].qk_factor.tolist()
        if factors:  # other lengths, other scores
            _take_nothing(states)
            heads, _ = _observe(model, batches)
        sinks = {}
        for name, state in states.items():
            if state.moves_sink or isinstance(state.sink, nn.Parameter):
                start = sink_of_share(torch.cat(heads[name].lse, 1), share)
                state.start_at(start)
                sinks[name] = start.tolist()
        _, after = _observe(model, batches)
    found = Calibrated(sinks, factors, _divergence(before, after, model.device))
    _log.info("converted to %s: divergence %.3g on %d batches", method, found.divergence, len(batches))
    return found


def sink_of_share(lse: Tensor, share: float) -> Tensor:
    """The sink s of each head with mean over queries of σ(s − lse) = share.  [H, N] → [H]

    Examples:
        >>> sink_of_share(torch.tensor([[-20.0, -20.0], [3.0, 5.0]]), 0.5)
        tensor([-20.,   4.])
    """
    if lse.shape[-1] == 0:
        raise ValueError("calibrate has no queries: every token is padding")
    logit = math.log(share) - math.log1p(-share)
    low, high = lse.amin(-1) + logit - 1.0, lse.amax(-1) + logit + 1.0
    for _ in range(60):  # halves an interval of at most a few hundred to rounding
        middle = (low + high) / 2
        below = torch.sigmoid(middle[:, None] - lse).mean(-1) < share
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _take_nothing(states: Mapping[str, Any]) -> None:
    from outeffhop.state.method_state import NO_SINK

    for state in states.values():
        if state.sink is not None:
            state.start_at(torch.full_like(state.sink, NO_SINK))


def _observe(model: PreTrainedModel, batches: Sequence[Batch]) -> tuple[dict[str, _Head], list[Tensor]]:
    """What every attention module did, and the outputs at some positions of each batch."""
    heads: dict[str, _Head] = {}
    outputs: list[Tensor] = []
    real = RealTokens(model)

    def watch(name: str, call: Call, lse: Tensor | None, weights: Tensor | None) -> None:
        heads.setdefault(name, _Head()).add(call, lse, real.at(name))

    with inspecting(model, watch=watch):
        for batch in batches:
            real.begin(batch)
            # without inputs of its own, a decoder makes them of the labels
            needed = real.encoder is not None and "decoder_input_ids" not in batch
            given = {name: value for name, value in batch.items() if needed or name != "labels"}
            outputs.append(_outputs(model(**to_device(given, model)), real.at("")))
            # a GPU waits here, and not in each attention module
            seen = [keep.all() for head in heads.values() for _, keep in head.seen]
            whole = iter(torch.stack([each.to(seen[0].device) for each in seen]).tolist() if seen else ())
            for head in heads.values():
                head.sample(whole)
    return heads, outputs


def _outputs(out: Any, real: Tensor | None) -> Tensor:
    """Log probabilities [P, V] or hidden states [P, d] at some positions that are not padding."""
    logits = out.get("logits")
    rows = (logits if logits is not None else out[0]).flatten(0, -2)  # [B·T, V]
    if real is not None and real.numel() == rows.shape[0]:
        at = real.flatten().nonzero()[:, 0]
        rows = rows[at[:: max(1, len(at) // _POSITIONS)].to(rows.device)]
    else:
        rows = rows[:: max(1, len(rows) // _POSITIONS)]
    return (rows.float().log_softmax(-1) if logits is not None else rows.float()).cpu()


def _divergence(before: list[Tensor], after: list[Tensor], device: torch.device) -> float:
    some = torch.cat([first[:1] for first in before])
    if some.exp().sum(-1).sub(1).abs().amax() < 1e-3:  # log probabilities
        # batch by batch on the device of the model: with a large vocabulary there are many
        rows = [_kl(first.to(device), second.to(device)).cpu() for first, second in zip(before, after, strict=True)]
        return float(torch.cat(rows).mean().clamp(min=0))
    first, second = torch.cat(before), torch.cat(after)
    return float((first - second).square().mean() / first.var())


def _kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum(-1)


def _rms(x: Tensor) -> Tensor:
    """[..., H, L, D] → [H], the mean over tokens."""
    lengths = x.detach().float().square().mean(-1).sqrt()  # [..., H, L]
    return lengths.movedim(-2, 0).flatten(1).mean(1)
