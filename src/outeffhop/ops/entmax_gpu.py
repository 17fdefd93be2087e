"""Attention with α-entmax on a GPU, by the package adasplash if it is installed, and which calls that serves.

Its kernels find the threshold of each query, then skip what lies below it, in memory linear in the length. The version
without block masks is used: the one whose outputs and gradients Triton's interpreter lets us compare with eager
attention without a GPU. Left to eager attention: what the kernels do not have (masks, dropout, other numbers of keys
than of queries, a learned α, which would get no gradient), and float32, which they would round to TF32.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outeffhop.ops.call import Call
from outeffhop.ops.probe import is_seen
from outeffhop.ops.torch_state import is_exporting, is_watched

__all__ = ["attend", "available", "why_not"]

_DEVICE = "cuda"
_HALF = (torch.float16, torch.bfloat16)
_SMALLEST_HEAD, _LARGEST_HEAD = 16, 256
_LOWEST, _HIGHEST = 1.01, 2.0
# steps of the search for the threshold: with the package's 10, sparsemax of scores of 100 is off by 5e-4
_STEPS = 16
# Without lengths the kernels read and write whole blocks, the longest of 128 rows, and take powers of two alone.
_BLOCK = 128


@cache
def available() -> bool:
    return find_spec("adasplash") is not None and find_spec("triton") is not None


def why_not(call: Call, alpha: float, learned: bool = False) -> str | None:
    """Why the kernels do not serve a call; None if they do."""
    query, key, value = call.query, call.key, call.value
    if query.device.type != _DEVICE:
        return f"serves {_DEVICE} tensors, got {query.device.type}"
    if not available():
        return "needs the package adasplash: pip install 'outeffhop[entmax-gpu]'"
    if learned:
        return "has no gradient for a learned α; give α as a number"
    if not _LOWEST <= alpha <= _HIGHEST:
        return f"serves α from {_LOWEST} to {_HIGHEST}, got {alpha:g}"
    if is_seen():
        return "shows a probe or a watch nothing"
    if is_exporting() or is_watched():
        return "is neither compiled nor exported"
    if query.dtype not in _HALF:
        return f"serves float16 and bfloat16, got {query.dtype}"
    if query.dim() != 4 or call.empty:
        return "serves [B, H, L, D] that are not empty"
    if max(query.shape[-1], value.shape[-1]) > _LARGEST_HEAD:
        return f"serves head sizes up to {_LARGEST_HEAD}, got {max(query.shape[-1], value.shape[-1])}"
    if query.shape[-2] != key.shape[-2]:
        return f"serves as many queries as keys, got {query.shape[-2]} and {key.shape[-2]}"
    if call.mask is not None:
        return "takes no attn_mask"
    if call.banded:
        return "takes no window and no packed batch"
    if call.dropout_p:
        return "has no dropout"
    if call.transformed:
        return "has no rule for torch.func transforms and forward-mode differentiation"
    if call.needs_grad and not query.requires_grad:
        return "gives gradients only together with the query's"
    return None


def attend(call: Call, alpha: float) -> Tensor:
    """entmax_α(q·kᵀ·scale)·v  [B, H, L, Dv]"""
    query, key, value = call.query, call.key, call.value
    if call.grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    value_size = value.shape[-1]
    size = max(_SMALLEST_HEAD, 1 << (max(query.shape[-1], value_size) - 1).bit_length())
    factor = call.scale * math.sqrt(size)  # the kernels divide the scores by √size
    if factor != 1.0:
        query = query * factor
    query, key, value = (pad(t, (0, size - t.shape[-1])).contiguous() for t in (query, key, value))
    batch, length = query.shape[0], query.shape[2]
    whole = length >= _BLOCK and length & (length - 1) == 0
    lengths = None if whole else torch.full((batch,), length, dtype=torch.int32, device=query.device)
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        out: Tensor = _kernels()(query, key, value, alpha, call.is_causal, lengths, _STEPS)
    return out[..., :value_size]


def _kernels() -> Any:
    from adasplash.adasplash_no_block_mask import sparse_attn

    return sparse_attn
