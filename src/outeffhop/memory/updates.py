"""One softmax update of many queries. Three ways to the same result, chosen by device, dtype and size.

By fused attention, in memory linear in queries and patterns. A kernel works on a block of queries at a time, so that a
few thousand queries keep only part of a GPU busy: there the patterns are attended to in parts, as if they were a batch,
and the parts are merged by their logsumexps. And PyTorch's fused kernels on CUDA compute float32 without its fast
matrix products: there the scores are written, some queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from outeffhop._naming import known
from outeffhop.ops import attention

__all__ = ["PRECISIONS", "check_precision", "fused_update", "way"]

PRECISIONS = ("exact", "tf32", "bfloat16")

# What a GPU of about 130 multiprocessors is measured with; benchmarks/memory.py says which way a size took.
_BUSY = 512  # blocks of queries times parts: about four for each multiprocessor
_BLOCK = 64  # queries that a kernel's block serves
_LEAST = 1024  # patterns that are worth a part of their own
_SCORES = 2**28  # bytes of scores written at a time


def fused_update(
    x: Tensor,
    patterns: Tensor,
    beta: float,
    sink: float,
    values: Tensor | None = None,
    precision: str = "exact",
    need_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """softmax_n(βΞx)V, the weight of the no-op patterns, and log(n + Σ exp(βΞx)) if needed; n = exp(sink).

    Args:
        x: [Q, d]
        patterns: Ξ, [M, d]
        values: V, [M, d_v]; Ξ by default.
        precision: as for ``HopfieldMemory.retrieve``.
    """
    dtype = x.dtype
    values = patterns if values is None else values
    if precision == "bfloat16":
        same = values is patterns
        x, patterns = x.bfloat16(), patterns.bfloat16()
        values = patterns if same else values.bfloat16()
    if _writes_scores(x):
        with _tf32(precision == "tf32"):
            return _by_scores(x, patterns, beta, sink, values, need_lse)
    parts = _parts(x, len(patterns))
    if parts > 1:
        out, lse = _in_parts(x, patterns, beta, sink, values, parts)
    else:
        out, lse = attention(x, patterns, values, scale=beta, sink=sink, return_lse=True)
    return out.to(dtype), torch.exp(sink - lse), lse


def check_precision(precision: str, memory: Tensor) -> float:
    """The relative size of one rounding: what two updates of a query at rest may differ by."""
    known("precision", precision, PRECISIONS)
    if precision == "exact":
        return torch.finfo(memory.dtype).eps
    if memory.dtype != torch.float32:
        raise ValueError(f"precision={precision!r}: is for memories in float32, and this one is in {memory.dtype}")
    if precision == "tf32" and memory.device.type != "cuda":
        raise ValueError(f"precision='tf32': is for CUDA devices, and the memory is on {memory.device}")
    return 2.0**-10 if precision == "tf32" else torch.finfo(torch.bfloat16).eps


def way(x: Tensor, patterns: Tensor, precision: str = "exact") -> str:
    """How an update of these queries is computed, in a word."""
    x = x.bfloat16() if precision == "bfloat16" else x
    if _writes_scores(x):
        return "scores"
    parts = _parts(x, len(patterns))
    return f"{parts} parts" if parts > 1 else "fused"


def _writes_scores(x: Tensor) -> bool:
    """Autograd would keep the scores of all queries, so only without it."""
    return x.is_cuda and x.dtype in (torch.float32, torch.float64) and not (torch.is_grad_enabled() and x.requires_grad)


def _parts(x: Tensor, patterns: int) -> int:
    if not x.is_cuda or not len(x):
        return 1
    return max(1, min(_BUSY // math.ceil(len(x) / _BLOCK), patterns // _LEAST))


def _by_scores(
    x: Tensor, patterns: Tensor, beta: float, sink: float, values: Tensor, need_lse: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """By the matrix of scores, whose last columns are the no-op patterns, so that softmax alone does the rest."""
    size = len(patterns)
    # eight columns, so that rows begin at multiples of 32 bytes; all except the first are −inf
    tail = x.new_full((8 + -size % 8,), -math.inf)
    tail[0] = sink
    rows = max(1, _SCORES // ((size + len(tail)) * x.element_size()))
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for block in x.split(rows):
        scores = x.new_empty(len(block), size + len(tail))
        torch.mm(block * beta, patterns.T, out=scores[:, :size])
        scores[:, size:] = tail
        weights = torch.softmax(scores, -1)
        # exp(score − lse) is the weight: the largest has all its digits
        lse = scores.amax(-1) - weights.amax(-1).log() if need_lse else scores[:, size]
        parts.append((weights[:, :size] @ values, weights[:, size], lse))
    out, no_op, lse = (torch.cat(each) for each in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
    return out, no_op.clone() if len(parts) == 1 else no_op, lse if need_lse else None


def _in_parts(
    x: Tensor, patterns: Tensor, beta: float, sink: float, values: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    """By attention to each part of the patterns, merged: the parts' outputs weighted by exp(lse).  [Q, d_v], [Q]"""
    each = len(patterns) // parts
    whole = parts * each
    queries = x.expand(parts, 1, *x.shape).contiguous()  # [P, 1, Q, d]
    key, value = (t[:whole].view(parts, 1, each, t.shape[1]) for t in (patterns, values))
    outs, lses = attention(queries, key, value, scale=beta, sink=-math.inf, return_lse=True)
    outs, lses = outs[:, 0].to(lses.dtype), lses[:, 0]  # [P, Q, d_v], [P, Q]
    if whole < len(patterns):  # fewer than there are parts
        scores = beta * (x.to(lses.dtype) @ patterns[whole:].to(lses.dtype).T)
        rest = torch.softmax(scores, -1) @ values[whole:].to(lses.dtype)
        outs, lses = torch.cat([outs, rest[None]]), torch.cat([lses, scores.logsumexp(-1)[None]])
    lse = torch.cat([lses, lses.new_full((1, len(x)), sink)]).logsumexp(0)
    return (torch.exp(lses - lse)[..., None] * outs).sum(0), lse


@contextmanager
def _tf32(wanted: bool) -> Iterator[None]:
    """Matrix products of float32 in TF32, as ``torch.set_float32_matmul_precision`` sets them for the whole process."""
    if not wanted:
        yield
        return
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before
