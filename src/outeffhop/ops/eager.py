"""Attention in plain PyTorch: any normalizer, any mask, any number of derivatives. The reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from outeffhop.functional import below_sink, compute_dtype, logsumexp_n, softmax_n
from outeffhop.ops.call import Call, prepare
from outeffhop.ops.probe import shown, watch
from outeffhop.ops.softcap import cap
from outeffhop.ops.window import Packed

__all__ = ["attend", "eager_attention", "why_not"]


def why_not(call: Call) -> str | None:
    return None


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    normalizer: Callable[[Tensor], Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: tuple[int | None, int | None] | None = None,
    packed: Packed | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention with any function from scores to weights, over the last dimension.

    ``normalizer`` gets −inf for masked scores. Returns the output and the weights (before
    dropout), shaped as for ``scaled_dot_product_attention``.
    """
    call = prepare(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, -math.inf, False, window, packed
    )
    call = replace(call.with_positions_as_mask(), softcap=softcap)  # for a watch
    weights = normalizer(_scores(call)).to(call.value.dtype)
    watcher = watch()
    if watcher is not None:
        watcher(call, None, weights)
    out = _weighted_values(weights, call)
    lead = query.shape[:-2]
    return out.reshape(*lead, *out.shape[-2:]), weights.reshape(*lead, *weights.shape[-2:])


def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    """softmax_n(q·kᵀ·scale + mask)·v, and log(n + Σ exp(scores)) on request."""
    scores = _scores(call)
    sink = call.sink if isinstance(call.sink, Tensor) else scores.new_full((1,), call.sink)
    scores, n, shift = below_sink(scores, sink.to(scores.dtype)[:, None, None])
    weights = softmax_n(scores, n).to(call.value.dtype)
    out = _weighted_values(weights, call)
    return out, logsumexp_n(scores, n) + shift.squeeze(-1) if call.return_lse else None


def _scores(call: Call) -> Tensor:
    """q·kᵀ·scale, capped, + mask, −inf where a key is masked; float32 at least.  [..., H, Lq, Lk]"""
    key = _repeat_heads(call.key, call.query.shape[-3])
    scores = (call.query * call.scale) @ key.transpose(-2, -1)
    scores = shown("scores", scores if call.softcap is None else cap(scores, call.softcap))
    scores = scores.to(compute_dtype(scores.dtype))
    if call.mask is not None and call.mask.dtype == torch.bool:
        scores = scores.masked_fill(~call.mask, -math.inf)
    elif call.mask is not None:
        scores = scores + call.mask
    seen = call.visible()
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _weighted_values(weights: Tensor, call: Call) -> Tensor:
    weights = shown("probabilities", weights)
    weights = torch.dropout(weights, call.dropout_p, train=call.dropout_p > 0)
    return shown("context", weights @ _repeat_heads(call.value, weights.shape[-3]))


def _repeat_heads(t: Tensor, heads: int) -> Tensor:
    """Repeats key or value heads that several query heads share."""
    return t if t.shape[-3] == heads else t.repeat_interleave(heads // t.shape[-3], dim=-3)
