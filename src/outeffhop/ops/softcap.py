"""A softcap, which keeps scores within ±c: c·tanh(scores / c), before the mask. Gemma 2 has one.

No fused kernel has it. Written as something added to the scores, c·tanh(s / c) − s, it goes where a bias of positions
goes, and every kernel that takes an additive mask serves it, with its sink, its logsumexp and exact gradients. The
price is a tensor as large as the scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outeffhop.functional import compute_dtype

__all__ = ["cap", "capped_mask", "joined"]


def cap(scores: Tensor, softcap: float) -> Tensor:
    return softcap * torch.tanh(scores / softcap)


def joined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """One additive mask of a mask (bool, True: attend; or additive) and what is added to the scores."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def capped_mask(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None, softcap: float) -> Tensor:
    """A mask with which attention has capped scores.

    Args:
        query: [B, H, L, D]
        key: [B, G, S, D], H a multiple of G
        mask: broadcasts to [B, H, L, S]; bool or additive.
        scale: of the scores; None: 1/√D.
    """
    dtype = compute_dtype(query.dtype)
    query = query.to(dtype) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = query @ key.to(dtype).repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3).transpose(-2, -1)
    return joined(mask, cap(scores, softcap) - scores)  # type: ignore[return-value]  # there is something to add
