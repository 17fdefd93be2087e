"""HopfieldMemory: store patterns, classify outliers, compute energies, retrieve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outeffhop.functional import compute_dtype, logsumexp_n
from outeffhop.memory import saved
from outeffhop.memory.arguments import check_beta, check_method, check_patterns, check_queries, check_values
from outeffhop.memory.energy import conjugate, energy, why_no_energy
from outeffhop.memory.noop import NoOp, check_indices, check_size
from outeffhop.memory.retrieval import Retrieval, Update, iterate
from outeffhop.memory.updates import check_precision, fused_update
from outeffhop.methods import Clipped, Method, Normalizer, SoftmaxN

__all__ = ["HopfieldMemory", "effective_normalizer"]

# the most scores held at once for models that no fused kernel serves: 64 MiB of float32
_BLOCK = 1 << 24


class HopfieldMemory:
    """An associative memory of patterns Ξ [M, d] that queries x [..., d] retrieve: x ← Ξᵀ w(βΞx).

    ``memory(x)`` is ``memory.retrieve(x)``. With ``values`` V [M, d_v] the memory is heteroassociative: its patterns
    are keys, and a retrieval also reads out Vᵀ w(βΞx), with the weights of its last update.

    The method chooses w: "vanilla" or "dense" (softmax), "outeffhop" (softmax_n), "sparse"
    (sparsemax), "gsh" (entmax) and "polynomial", which each descend an energy (energy.py); the
    clipped ones retrieve without one. What a method would learn stays at its initial value. The
    polynomial model's weights do not depend on β.

    Softmax models retrieve through fused attention, whose memory is linear in queries and patterns; in float32 on a
    GPU, and with other models, the scores of a block of queries are held at a time.

    Args:
        patterns: [M, d], one pattern per row; copied, as is the classification.
        beta: β > 0, the inverse temperature.
        method: anything ``Method.parse`` takes, without a gate.
        no_op: Λ. Outliers stay stored but leave the sum. In "outeffhop" they become n = 1 no-op
            pattern, or n = K if they are distinct; a model without no-op patterns drops them.
        values: [M, d_v], what each pattern stands for, of the patterns' dtype and device; copied. The no-op patterns
            stand for 0.

    Examples:
        >>> memory = HopfieldMemory(torch.eye(3), beta=8.0)
        >>> memory.retrieve(torch.tensor([0.9, 0.1, 0.0])).state
        tensor([9.9686e-01, 1.6563e-03, 7.4424e-04])
        >>> memory = HopfieldMemory(torch.eye(3), beta=8.0, values=torch.tensor([[10.0], [20.0], [30.0]]))
        >>> memory(torch.tensor([[0.9, 0.1, 0.0], [-1.0, -1.0, -1.0]])).value  # the second resembles no pattern
        tensor([[10.0240],
                [ 0.0201]])
    """

    def __init__(
        self,
        patterns: Tensor,
        beta: float = 1.0,
        method: str | Method = "outeffhop",
        no_op: NoOp | None = None,
        *,
        values: Tensor | None = None,
    ) -> None:
        self.method = check_method(method)
        self.beta = check_beta(beta)
        patterns = check_patterns(patterns).clone(memory_format=torch.contiguous_format)
        values = check_values(values, patterns)
        self._store(patterns, no_op, None if values is None else values.clone(memory_format=torch.contiguous_format))

    def _store(self, stored: Tensor, no_op: NoOp | None, values: Tensor | None) -> None:
        """Sets the patterns once all checks have passed."""
        active, active_values = stored, values
        if no_op is not None:
            check_size(no_op, len(stored))
            no_op = NoOp(no_op.outliers.to(stored.device, copy=True), no_op.distinct)
            active = stored[~no_op.outliers]
            active_values = None if values is None else values[~no_op.outliers]
            if len(active) == 0:
                raise ValueError(f"no_op makes outliers of all {len(stored)} patterns: at least one must remain active")
        normalizer = effective_normalizer(self.method, None if no_op is None else no_op.n)
        self._stored, self._active, self.no_op, self._normalizer = stored, active, no_op, normalizer
        self._stored_values, self._values = values, active_values
        self._largest = float(torch.linalg.vector_norm(active, dim=1, dtype=compute_dtype(active.dtype)).max())

    @property
    def stored(self) -> Tensor:
        """All patterns, outliers included, in the order of ``remove``'s indices.  [M, d]"""
        return self._stored

    @property
    def patterns(self) -> Tensor:
        """The patterns that take part in retrieval.  [M − K, d]"""
        return self._active

    @property
    def stored_values(self) -> Tensor | None:
        """The values of ``stored``; None for a memory without values.  [M, d_v]"""
        return self._stored_values

    @property
    def values(self) -> Tensor | None:
        """The values of ``patterns``; None for a memory without values.  [M − K, d_v]"""
        return self._values

    @property
    def outliers(self) -> Tensor:
        """The patterns Λ maps to the no-op class.  [K, d]"""
        return self._stored[:0] if self.no_op is None else self._stored[self.no_op.outliers]

    @property
    def indices(self) -> Tensor:
        """The indices of ``patterns`` in ``stored``.  [M − K]"""
        if self.no_op is not None:
            return (~self.no_op.outliers).nonzero().squeeze(1)
        return torch.arange(len(self._stored), device=self._stored.device)

    @property
    def n(self) -> float:
        """How many no-op patterns retrieval counts; 0 for models without them."""
        return self._normalizer.n if isinstance(self._normalizer, SoftmaxN | Clipped) else 0.0

    def retrieve(
        self,
        x: Tensor,
        steps: int | None = 1,
        *,
        tol: float = 1e-4,
        max_steps: int | None = None,
        trace: bool = False,
        precision: str = "exact",
    ) -> Retrieval:
        """Retrieves for queries [..., d], differentiably in them.

        Args:
            x: [..., d], of the memory's dtype and device.
            steps: how many updates of every query; None updates each query until it is at rest.
            tol: a query is at rest once an update moves it by at most tol·max(1, ‖x‖); a tol below the
                dtype's resolution is raised to that.
            max_steps: updates each query until it is at rest, like steps=None, but at most this often; 1000 with
                steps=None. A query that reaches the limit has converged False.
            trace: also return the energy before and after each update; this takes one more evaluation.
            precision: of the products with patterns and values, for softmax models in float32. "exact" is the memory's
                own dtype. "tf32" rounds what is multiplied to 10 bits (on CUDA, where no gradient is asked for),
                "bfloat16" to 7 bits; sums stay in float32. A tol below the rounding is raised to it.
        """
        check_queries(x, self._active)
        if trace:
            self._check_energy()
        if precision != "exact" and not isinstance(self._normalizer, SoftmaxN):
            raise ValueError(
                f"precision={precision!r} with method={str(self.method)!r}: only softmax models ('vanilla', "
                "'outeffhop') have it; leave it out"
            )
        tol = max(tol, check_precision(precision, self._active)) if tol >= 0.0 else tol
        read = None if self._values is None else partial(self._read, values=self._values, precision=precision)
        update = partial(self._update, with_energy=trace, precision=precision)
        return iterate(update, x, steps, tol, max_steps, trace, read)

    __call__ = retrieve

    def energy(self, x: Tensor) -> Tensor:
        """H(x), which no retrieval step raises; energy.py defines it for each model.  [...]"""
        check_queries(x, self._active)
        self._check_energy()
        values = self._update(x.reshape(-1, x.shape[-1]), with_energy=True).energy
        return values.reshape(x.shape[:-1])  # type: ignore[union-attr]  # _check_energy has passed

    def association(self, x: Tensor) -> Tensor:
        """The weight of each pattern in the next update.  [..., M − K]"""
        return self._weights(check_queries(x, self._active))[0].to(x.dtype)

    def add(
        self,
        patterns: Tensor,
        *,
        outliers: Tensor | Sequence[bool] | None = None,
        values: Tensor | None = None,
    ) -> HopfieldMemory:
        """Appends patterns [m, d]; returns self.

        Args:
            outliers: which of the new patterns are no-op outliers, bool [m]; by default none.
            values: [m, d_v], needed by a memory with values, and by no other.
        """
        new = check_patterns(patterns)
        if new.shape[1] != self._stored.shape[1]:
            raise ValueError(
                f"patterns have size {new.shape[1]} and the memory's {self._stored.shape[1]}: the sizes must be equal"
            )
        all_values = self._with(values, new)
        no_op = self.no_op
        if outliers is not None and no_op is None:
            no_op = NoOp(torch.zeros(len(self), dtype=torch.bool, device=self._stored.device))
        if no_op is not None:
            given = torch.as_tensor([False] * len(new) if outliers is None else outliers)
            if given.dtype != torch.bool:  # 0 and 1 could mean a mask or indices
                raise TypeError(f"outliers has dtype {given.dtype}: expected a bool for each of the new patterns")
            more = NoOp.assign(len(new), given)
            no_op = NoOp(torch.cat([no_op.outliers, more.outliers.to(no_op.outliers.device)]), no_op.distinct)
        stored = check_patterns(torch.cat([self._stored, new.to(self._stored)]))
        self._store(stored, no_op, check_values(all_values, stored))
        return self

    def remove(self, indices: Tensor | Sequence[int] | int) -> HopfieldMemory:
        """Removes the patterns at these indices of ``stored``; later ones move up. Returns self."""
        gone = check_indices(torch.as_tensor(indices), len(self), "indices").to(self._stored.device)
        keep = torch.ones(len(self), dtype=torch.bool, device=self._stored.device)
        keep[gone] = False
        if not keep.any():
            raise ValueError(f"indices name all {len(self)} patterns: a memory needs at least one")
        no_op = None if self.no_op is None else NoOp(self.no_op.outliers[keep], self.no_op.distinct)
        self._store(self._stored[keep], no_op, None if self._stored_values is None else self._stored_values[keep])
        return self

    def to(self, *args: Any, **options: Any) -> HopfieldMemory:
        """Moves or converts the memory as ``torch.nn.Module.to`` does a module; returns self."""
        stored = check_patterns(self._stored.to(*args, **options))
        values = None if self._stored_values is None else self._stored_values.to(*args, **options)
        self._store(stored, self.no_op, check_values(values, stored))
        return self

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a safetensors file; an old file at ``path`` stays until the new one is complete."""
        saved.save(path, self._stored, self.beta, str(self.method), self.no_op, self._stored_values)

    @staticmethod
    def load(path: str | PathLike[str], device: torch.device | str = "cpu") -> HopfieldMemory:
        """Reads a saved memory; ValueError if the file is not one."""
        with saved.reading(path) as parts:
            memory = HopfieldMemory(**parts)
        return memory.to(device)  # outside the with: a missing device is not an error of the file

    def __len__(self) -> int:
        return len(self._stored)

    def __repr__(self) -> str:
        size, d = self._stored.shape
        outliers = "" if self.no_op is None else f", {self.no_op.count} of them outliers"
        values = "" if self._values is None else f" with values of size {self._values.shape[1]}"
        place = f"{self._stored.dtype} on {self._stored.device}".removeprefix("torch.")
        return (
            f"HopfieldMemory({size} patterns of size {d}{values}{outliers}; {self.method}, beta={self.beta:g}; {place})"
        )

    def _with(self, values: Tensor | None, patterns: Tensor) -> Tensor | None:
        """The memory's values and those of the new patterns."""
        mine = self._stored_values
        if mine is None and values is not None:
            raise ValueError("values: this memory has none; give them when it is made, HopfieldMemory(…, values=…)")
        if mine is not None and values is None:
            raise ValueError(f"values=None: this memory has values of size {mine.shape[1]}; give the new patterns' too")
        new = check_values(values, patterns)
        if mine is None or new is None:
            return None
        if new.shape[1] != mine.shape[1]:
            raise ValueError(f"values have size {new.shape[1]} and the memory's {mine.shape[1]}: they must be equal")
        return torch.cat([mine, new.to(mine)])

    def _check_energy(self) -> None:
        why = why_no_energy(self._normalizer)
        if why is not None:
            raise ValueError(f"method={str(self.method)!r} has no energy: {why}; retrieve() works without one")

    def _update(self, x: Tensor, with_energy: bool, precision: str = "exact") -> Update:
        """One update of queries [Q, d]."""
        if isinstance(self._normalizer, SoftmaxN):
            sink = self._normalizer.sink
            state, no_op, psi = fused_update(x, self._active, self.beta, sink, None, precision, with_energy)
            return Update(state, no_op, self._energy(x, psi) if with_energy and psi is not None else None)
        parts = self._by_blocks(partial(self._plain_update, with_energy=with_energy), x)
        state, no_op = torch.cat([p.state for p in parts]), torch.cat([p.no_op for p in parts])
        energies = [p.energy for p in parts if p.energy is not None]
        return Update(state, no_op, torch.cat(energies) if energies else None)

    def _by_blocks(self, what: Callable[[Tensor], Any], x: Tensor) -> list[Any]:
        """``what`` of the queries [Q, d], a block at a time, whose scores are few enough to be held at once."""
        blocks = x.split(max(1, _BLOCK // len(self._active)))
        if torch.is_grad_enabled() and x.requires_grad and len(blocks) > 1:
            # autograd would keep the scores of all blocks for the backward pass: compute them again there
            return [checkpoint(what, block, use_reentrant=False) for block in blocks]
        return [what(block) for block in blocks]

    def _plain_update(self, x: Tensor, with_energy: bool) -> Update:
        weights, scores = self._weights(x)
        no_op = scores.new_zeros(len(x))
        if self.n > 0:
            no_op = torch.exp(math.log(self.n) - logsumexp_n(scores, self.n))
        psi = conjugate(self._normalizer, scores, weights) if with_energy else None
        state = weights @ self._active.to(weights.dtype)
        return Update(state, no_op, None if psi is None else self._energy(x, psi))

    def _read(self, x: Tensor, values: Tensor, precision: str = "exact") -> Tensor:
        """Vᵀ w(βΞx) of queries [Q, d].  [Q, d_v]"""
        if isinstance(self._normalizer, SoftmaxN):
            return fused_update(x, self._active, self.beta, self._normalizer.sink, values, precision, False)[0]
        parts = self._by_blocks(lambda block: self._weights(block)[0] @ values.to(compute_dtype(values.dtype)), x)
        return torch.cat(parts).to(values.dtype)

    def _energy(self, x: Tensor, psi: Tensor) -> Tensor:
        return energy(self._normalizer, x, psi, self.beta, len(self._active), self._largest)

    def _weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """w(βΞx) and βΞx, float32 at least.  [..., M] each"""
        dtype = compute_dtype(x.dtype)
        scores = (self.beta * x.to(dtype)) @ self._active.to(dtype).T
        return self._normalizer(scores), scores


def effective_normalizer(method: Method, no_op: int | None) -> Normalizer:
    """The method's normalizer, with the n of a classification if there is one."""
    normalizer = method.normalizer
    if no_op is None or not isinstance(normalizer, SoftmaxN) or normalizer.n == 0:
        return normalizer
    if normalizer.n != 1:
        raise ValueError(
            f"method={str(method)!r} and no_op both set the number of no-op patterns, {normalizer.n:g} and "
            f"{no_op}: give 'outeffhop' with no_op, or n without no_op"
        )
    return dataclasses.replace(normalizer, n=float(no_op), noop="fixed")
