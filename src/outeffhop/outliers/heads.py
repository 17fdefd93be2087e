"""What attention heads attend to: the first token, special tokens or nothing, and how sharply.

For softmax_n the fused kernel returns the logsumexp, and a probability is exp(score − lse). The scores are computed
again, a few samples at a time, and only their maximum and a few columns are used. Methods that return their weights
(clipped softmax, entmax) are measured on these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from outeffhop.ops.call import Call
from outeffhop.outliers.outlier_report import HeadStats

__all__ = ["HeadSums", "Tokens", "shaped_as"]

# Scores in memory at a time: a few megabytes, which fit into a CPU cache; on a GPU, which starts slowly, more.
_AT_A_TIME, _AT_A_TIME_ON_GPU = 2**21, 2**25
# Queries of a causal call computed together.
_QUERIES, _QUERIES_ON_GPU = 128, 1024


@dataclass(frozen=True)
class Tokens:
    """What is known about the tokens of a batch.

    Attributes:
        samples: B.
        real: [B, T], bool: False at padding; None if there is no padding, or there are no tokens.
        special: [B, T], bool: True at special tokens; None if unknown.
    """

    samples: int
    real: Tensor | None = None
    special: Tensor | None = None

    @cached_property
    def first(self) -> Tensor | None:
        """The first real token of each sample, [B]; None if it is the first of all."""
        return None if self.real is None else self.real.int().argmax(1)

    @cached_property
    def marked(self) -> tuple[Tensor, Tensor] | None:
        """Positions of special tokens, [B, M] with M of the sample that has most, and which of them count; None: M = 0.

        A GPU has to wait for M: once a batch, and not in each attention module.
        """
        if self.special is None:
            return None
        most = int(self.special.sum(1).max())
        ordered = self.special.int().sort(stable=True, dim=1, descending=True)
        return (ordered.indices[:, :most], ordered.values[:, :most] > 0) if most else None

    def rows(self, x: Tensor) -> Tensor | None:
        """Which rows of a tensor [B, T, …] or [B·T, …] belong to real tokens; None if all do."""
        if self.real is None:
            return None
        if x.dim() > 2 and x.shape[:2] == self.real.shape:
            inner = x[0, 0, ..., 0].numel()  # [B, T, H, d] has H rows per token
            return self.real.repeat_interleave(inner, 1)
        return self.real if x.dim() == 2 and x.shape[0] == self.real.numel() else None


class HeadSums:
    """Sums of one attention module."""

    def __init__(self) -> None:
        self.queries = 0
        self.sums: Tensor | None = None  # first token, special tokens, no-op, largest; [4, H], float64
        self.knows_special = True
        self._counted: list[Tensor] = []  # queries that were counted on a GPU, which would have to wait

    def add(self, call: Call, lse: Tensor | None, weights: Tensor | None, tokens: Tokens) -> None:
        for rows, queries, masses in _masses(call, lse, weights, tokens):
            n, lq = masses.shape[1], masses.shape[3]
            found, real = masses.double(), _fitting(tokens.real, call, -2)
            if real is None:
                self.queries += n * lq
            else:
                # queries of padding may hold anything, also nan
                counts = real[rows, queries].to(found.device)
                found = torch.where(counts[:, None], found, 0.0)
                self._counted.append(counts.sum())
            kept = found.sum((1, 3))  # [4, H]
            self.sums = kept if self.sums is None else self.sums + kept.to(self.sums.device)
        self.knows_special &= _fitting(tokens.special, call, -1) is not None

    def read(self) -> None:
        """Brings everything to the CPU."""
        if self._counted:
            self.queries += int(torch.stack([one.to(self._counted[0].device) for one in self._counted]).sum())
        self._counted = []
        self.sums = None if self.sums is None else self.sums.cpu()

    def merge(self, other: HeadSums) -> None:
        if other.sums is not None:
            self.sums = other.sums if self.sums is None else self.sums + other.sums
            self.queries += other.queries
            self.knows_special &= other.knows_special

    def stats(self, name: str) -> HeadStats | None:
        self.read()
        if self.sums is None or not self.queries:
            return None
        first, special, no_op, largest = (tuple(row.tolist()) for row in self.sums / self.queries)
        return HeadStats(name, self.queries, first, special if self.knows_special else None, no_op, largest)


def shaped_as(weights: Tensor) -> Call:
    """A call of these weights' shape and nothing else, for attention that is not ours and shows its weights alone."""
    query, key = weights[..., :0], weights.transpose(-2, -1)[..., :0]  # [B, H, Lq, 0], [B, H, Lk, 0]
    return Call(query, key, key, None, 0.0, False, 1.0, -torch.inf, False, False)


def _fitting(of_tokens: Tensor | None, call: Call, dim: int) -> Tensor | None:
    """[B, T] if the queries (dim −2) or keys (−1) of the call are these tokens, else None."""
    length = call.query.shape[-2] if dim == -2 else call.key.shape[-2]
    fits = of_tokens is not None and call.query.dim() == 4 and of_tokens.shape == (call.query.shape[0], length)
    return of_tokens if fits else None


def _masses(
    call: Call, lse: Tensor | None, weights: Tensor | None, tokens: Tokens
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yields [4, n, H, q] for some samples and queries: first token, special tokens, no-op, largest probability."""
    query, key = call.query.flatten(0, -4), call.key.flatten(0, -4)  # [N, H, Lq, D], [N, G, Lk, D]
    n, heads, lq, lk = *query.shape[:3], key.shape[2]
    first = torch.zeros(n, dtype=torch.int64, device=query.device)
    if tokens.first is not None and _fitting(tokens.real, call, -1) is not None:
        first = tokens.first.to(query.device)
    marked = tokens.marked if _fitting(tokens.special, call, -1) is not None else None
    if weights is not None:
        weights = weights.flatten(0, -4)
    step = max(1, (_AT_A_TIME if query.device.type == "cpu" else _AT_A_TIME_ON_GPU) // (heads * lq * lk))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        if weights is not None:
            p = weights[rows].float() if weights.dtype != torch.float64 else weights[rows]
            column = p.take_along_dim(first[rows, None, None, None], -1).squeeze(-1)
            on_special = torch.zeros_like(column)
            if marked is not None:
                chosen, counts = _of_keys(marked, rows, lk, p.device)
                on_special = torch.where(counts, p.take_along_dim(chosen, -1), 0.0).sum(-1)
            yield rows, slice(0, lq), torch.stack([column, on_special, 1 - p.sum(-1), p.amax(-1)])
            continue
        for queries, keys in _blocks(call, lq, lk):
            s = _scores(call, query[rows, :, queries], key[rows, :, :keys], rows, queries)
            at = lse.flatten(0, -3)[rows, :, queries].to(s.dtype)  # type: ignore[union-attr]  # [n, H, q]
            column = (s.take_along_dim(first[rows, None, None, None], -1).squeeze(-1) - at).exp()
            on_special = torch.zeros_like(column)
            if marked is not None:
                chosen, counts = _of_keys(marked, rows, keys, s.device)
                on_special = torch.where(counts, (s.take_along_dim(chosen, -1) - at[..., None]).exp(), 0.0).sum(-1)
            largest = (s.amax(-1) - at).exp().clamp(max=1)
            empty = at.isneginf()  # softmax without any key: weights are 0
            column, largest = column.masked_fill(empty, 0), largest.masked_fill(empty, 0)
            yield rows, queries, torch.stack([column, on_special, _no_op(call, at), largest])


def _blocks(call: Call, lq: int, lk: int) -> Iterator[tuple[slice, int]]:
    """Ranges of queries, and how many keys they can see: under a causal mask early queries see few."""
    if not call.is_causal or call.mask is not None:
        yield slice(0, lq), lk
        return
    together = _QUERIES if call.query.device.type == "cpu" else _QUERIES_ON_GPU
    for start in range(0, lq, together):
        end = min(start + together, lq)
        yield slice(start, end), min(end, lk)


def _of_keys(marked: tuple[Tensor, Tensor], rows: slice, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The positions of special tokens among the first keys of these rows, [n, 1, 1, M], and which of them count."""
    positions, counts = (each[rows, None, None].to(device) for each in marked)
    return positions.clamp(max=keys - 1), counts & (positions < keys)


def _no_op(call: Call, lse: Tensor) -> Tensor:
    """1 − γ = n / (n + Σ exp(scores)) = exp(s − lse)."""
    sink = call.sink.to(lse)[:, None] if isinstance(call.sink, Tensor) else torch.full((1, 1), call.sink).to(lse)
    return torch.where(lse.isneginf(), 1.0, (sink - lse).exp())


def _scores(call: Call, query: Tensor, key: Tensor, rows: slice, queries: slice) -> Tensor:
    """q·kᵀ·scale, −inf at masked keys.  [n, H, q, k]"""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key = query.to(dtype) * call.scale, key.to(dtype)
    if call.grouped:  # query heads that share a key head are adjacent
        shared = query.unflatten(1, (key.shape[1], -1))  # [n, G, H/G, Lq, D]
        s = (shared @ key[:, :, None].transpose(-2, -1)).flatten(1, 2)
    else:
        s = query @ key.transpose(-2, -1)
    if call.mask is not None:
        mask = call.mask
        if mask.dim() > 3:  # leading dimensions as the queries have them; the mask may have 1 there
            mask = mask.expand(*call.query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)[rows]
        s = s.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else s.add_(mask.to(dtype))
    if call.is_causal:
        later = s[..., queries.start :]  # all of these queries see the keys before the first of them
        later.masked_fill_(torch.ones(later.shape[-2:], dtype=torch.bool, device=s.device).triu_(1), -torch.inf)
    return s
