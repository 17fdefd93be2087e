"""A memory over the processes of torch.distributed: each holds a slice of the patterns.

Softmax over all patterns is the mean of the slices' softmax outputs, weighted by exp(lse) of each
slice. So every process retrieves from its own slice with fused attention and sends only (output, lse):
Q·(d + 2) numbers per update, for any number of patterns. The result is exact.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from outeffhop.functional import compute_dtype
from outeffhop.memory.arguments import check_beta, check_method, check_patterns, check_queries, check_values
from outeffhop.memory.energy import energy
from outeffhop.memory.hopfield_memory import effective_normalizer
from outeffhop.memory.noop import NoOp, check_size
from outeffhop.memory.retrieval import Retrieval, Update, iterate
from outeffhop.memory.updates import fused_update
from outeffhop.methods import Method, SoftmaxN

__all__ = ["ShardedMemory"]


class ShardedMemory:
    """``HopfieldMemory`` over the ranks of a process group, for the softmax models.

    Every rank creates it with its own patterns, calls it with the same queries and gets the same result.
    Sparse, GSH and polynomial weights need all scores of a query at once and are not supported.

    Args:
        patterns: this rank's slice [m, d]; m may differ between ranks, and be 0 on some.
        beta, method: as for ``HopfieldMemory``, the same on every rank.
        no_op: the classification of this rank's patterns; on every rank or on none.
        group: the ranks that share the memory; all by default.
        values: those of this rank's patterns, as for ``HopfieldMemory``; on every rank or on none.
    """

    def __init__(
        self,
        patterns: Tensor,
        beta: float = 1.0,
        method: str | Method = "outeffhop",
        no_op: NoOp | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        values: Tensor | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError("torch.distributed has no process group: call init_process_group() first")
        self._group = group
        facts: dict[str, Any] = {}
        error: str | None = None
        try:
            facts = self._take(patterns, beta, method, no_op, values)
        except (ValueError, TypeError) as problem:
            error = str(problem)
        # if only one rank raised, the others would wait for it
        everywhere: list[tuple[dict[str, Any], str | None]] = [({}, None)] * dist.get_world_size(group)
        dist.all_gather_object(everywhere, (facts, error), group=group)
        self._check(everywhere)
        each = [facts for facts, _ in everywhere]
        self._size = sum(f["active"] for f in each)
        self._total = sum(f["stored"] for f in each)
        self._largest = max(f["largest"] for f in each)
        count = None if no_op is None else (sum(f["outliers"] for f in each) if no_op.distinct else 1)
        # _take has refused the others
        self._normalizer: SoftmaxN = effective_normalizer(self.method, count)  # type: ignore[assignment]

    @classmethod
    def split(
        cls,
        patterns: Tensor,
        beta: float = 1.0,
        method: str | Method = "outeffhop",
        no_op: NoOp | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        values: Tensor | None = None,
    ) -> ShardedMemory:
        """From patterns [M, d] that every rank has: each keeps its slice, as ``Tensor.tensor_split`` cuts them."""
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if isinstance(no_op, NoOp):  # a wrong size shows on some rank, and all ranks raise together
            no_op = NoOp(no_op.outliers.tensor_split(ranks)[rank], no_op.distinct)
        if isinstance(values, Tensor) and values.dim():
            values = values.tensor_split(ranks)[rank]
        return cls(patterns.tensor_split(ranks)[rank], beta, method, no_op, group, values=values)

    @property
    def patterns(self) -> Tensor:
        """This rank's patterns without outliers."""
        return self._active

    @property
    def values(self) -> Tensor | None:
        """The values of this rank's ``patterns``; None for a memory without values."""
        return self._values

    @property
    def n(self) -> float:
        """How many no-op patterns retrieval counts."""
        return self._normalizer.n

    @torch.no_grad()
    def retrieve(
        self, x: Tensor, steps: int | None = 1, *, tol: float = 1e-4, max_steps: int | None = None, trace: bool = False
    ) -> Retrieval:
        """Like ``HopfieldMemory.retrieve``, without gradients; every rank calls it with the same queries."""
        self._check_same(x)
        read = None if self._values is None else partial(self._read, values=self._values)
        return iterate(self._update, x, steps, tol, max_steps, trace, read, self._as_first_rank)

    __call__ = retrieve

    @torch.no_grad()
    def energy(self, x: Tensor) -> Tensor:
        """H(x) of the whole memory.  [...]"""
        self._check_same(x)
        values = self._update(x.reshape(-1, x.shape[-1])).energy
        return values.reshape(x.shape[:-1])  # type: ignore[union-attr]

    def __len__(self) -> int:
        """The number of patterns on all ranks."""
        return self._total

    def __repr__(self) -> str:
        here, ranks = len(self._active), dist.get_world_size(self._group)
        return (
            f"ShardedMemory({self._total} patterns of size {self._active.shape[1]} over {ranks} ranks, {here} active "
            f"here; {self.method}, beta={self.beta:g})"
        )

    def _take(
        self, patterns: Tensor, beta: float, method: str | Method, no_op: NoOp | None, values: Tensor | None
    ) -> dict[str, Any]:
        """Checks this rank's arguments and returns what the other ranks need to know about them."""
        self.beta, self.method = check_beta(beta), check_method(method)
        if not isinstance(self.method.normalizer, SoftmaxN):
            raise ValueError(
                f"method={str(self.method)!r}: its weights need all scores of a query at once, and each rank has only "
                "its own; use 'vanilla' or 'outeffhop', or HopfieldMemory, which takes every method"
            )
        stored = check_patterns(patterns, may_be_empty=True)
        active, values = stored, check_values(values, stored)
        if no_op is not None:
            check_size(no_op, len(stored))
            keep = ~no_op.outliers.to(stored.device)
            active, values = stored[keep], None if values is None else values[keep]
        self._active = active.clone(memory_format=torch.contiguous_format)
        self._values = None if values is None else values.clone(memory_format=torch.contiguous_format)
        norms = torch.linalg.vector_norm(active, dim=1, dtype=compute_dtype(active.dtype))
        return {
            "same": (
                ("size", active.shape[1]),
                ("dtype", str(active.dtype)),
                ("beta", self.beta),
                ("method", str(self.method)),
                ("values", "none" if values is None else f"of size {values.shape[1]}"),
                ("no_op", "none" if no_op is None else f"distinct={no_op.distinct}"),
            ),
            "stored": len(stored),
            "active": len(active),
            "outliers": len(stored) - len(active),
            "largest": float(norms.max()) if len(norms) else 0.0,
        }

    def _check(self, everywhere: list[tuple[dict[str, Any], str | None]]) -> None:
        for rank, (_, error) in enumerate(everywhere):
            if error is not None:
                raise ValueError(f"rank {rank}: {error}")
        for rank, (facts, _) in enumerate(everywhere):
            for (name, here), (_, first) in zip(facts["same"], everywhere[0][0]["same"], strict=True):
                if here != first:
                    raise ValueError(f"rank {rank} has {name} {here} and rank 0 {first}: they must be the same")
        if sum(facts["active"] for facts, _ in everywhere) == 0:
            raise ValueError("patterns: no rank has any active pattern; a memory needs at least one")

    def _check_same(self, x: Tensor) -> None:
        """Raises on every rank if x is wrong on one or differs between ranks."""
        error: Exception | None = None
        try:
            check_queries(x, self._active)
            if x.requires_grad:
                raise ValueError("x requires a gradient, which cannot pass between ranks: give x.detach()")
        except (ValueError, TypeError) as problem:
            error = problem
        # a digest of all bits in order: sums would not notice queries in another order
        content = b"" if error is not None else x.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        digest = int.from_bytes(hashlib.sha256(content).digest()[:7])  # its negative fits into int64 as well
        facts = [0 if error is None else 1, x.numel() if error is None else 0, digest]
        both = torch.tensor([*facts, *(-f for f in facts)], device=self._active.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
        highest, lowest = both[:3].tolist(), (-both[3:]).tolist()
        if error is not None:
            raise error
        if highest[0]:
            raise ValueError("x was refused on another rank; the error there says why")
        if highest != lowest:
            raise ValueError("x is not the same on all ranks: give every rank the same queries")

    def _update(self, x: Tensor) -> Update:
        """One update of queries [Q, d], the same on every rank."""
        state, lse = self._attend(x, self._active)
        value = energy(self._normalizer, x, lse, self.beta, self._size, self._largest)
        return Update(state, torch.exp(self._normalizer.sink - lse), value)

    def _read(self, x: Tensor, values: Tensor) -> Tensor:
        """The values of queries [Q, d].  [Q, d_v]"""
        return self._attend(x, values)[0].to(values.dtype)

    def _attend(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """softmax_n over all ranks' patterns times their values, and log(n + Σ exp).  [Q, d_v], [Q]"""
        # no slice holds the no-op patterns: the first rank counts them
        sink = self._normalizer.sink if dist.get_rank(self._group) == 0 else -math.inf
        lse: Tensor
        if len(self._active):
            out, _, lse = fused_update(x, self._active, self.beta, sink, values)  # type: ignore[assignment]  # needed
        else:
            out, lse = x.new_zeros(len(x), values.shape[1]), x.new_full((len(x),), sink, dtype=compute_dtype(x.dtype))
        # relative to the largest lse of all ranks, so that no exponential overflows
        top = lse.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=self._group)
        weight = torch.exp(lse - top)[:, None]  # [Q, 1]
        sums = torch.cat([weight * out.to(weight.dtype), weight], 1)  # [Q, d_v + 1]
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=self._group)
        return sums[:, :-1] / sums[:, -1:], top + torch.log(sums[:, -1])

    def _as_first_rank(self, stop: Tensor) -> Tensor:
        """Rank 0's decision about which queries stop: ranks on different hardware may round differently."""
        decision = stop.to(torch.uint8)
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        dist.broadcast(decision, first, group=self._group)
        return decision.bool()
