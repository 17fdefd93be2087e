"""The no-op classification Λ: which stored patterns are outliers that take no part in retrieval.

The paper gives every pattern one dimension more, ω, which is not 0 for outliers; Λ maps each of
those to Ω = (0, …, 0, C) and leaves the others as they are. A query's extra coordinate is 0, so Ω
scores ⟨Ω, x̄⟩ = 0 whatever C is: in the d dimensions one started from, Ω is the 1 in
softmax1's denominator, and with one Ω_C per outlier there are K of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from outeffhop.memory.arguments import check_patterns

__all__ = ["NoOp", "Extended", "extend"]

Measure = Literal["cosine", "dot"]

# similarities held at once while patterns are compared with each other
_BLOCK = 1 << 24


@dataclass(frozen=True, eq=False)
class NoOp:
    """Which of M stored patterns are no-op outliers.

    Attributes:
        outliers: bool [M].
        distinct: False maps all outliers to one Ω, as lse₁ and softmax1 have it, even where there is no
            outlier; True gives each of K outliers its own Ω_C, which is lse_K and softmax_K.
    """

    outliers: Tensor
    distinct: bool = False

    def __post_init__(self) -> None:
        given = self.outliers
        if not isinstance(given, Tensor):
            raise TypeError(f"outliers is a {type(given).__name__}: a bool tensor [M] is needed; see NoOp.assign")
        if given.dtype != torch.bool or given.dim() != 1:
            raise ValueError(
                f"outliers is {given.dtype} of shape {tuple(given.shape)}: a bool tensor [M] is needed; "
                "NoOp.assign makes one from indices"
            )

    @property
    def count(self) -> int:
        """K, the number of outliers."""
        return int(self.outliers.sum())

    @property
    def n(self) -> int:
        """How many no-op patterns are left in the memory: 1, or one per outlier."""
        return self.count if self.distinct else 1

    @staticmethod
    def assign(size: int, outliers: Tensor | Sequence[int] | Sequence[bool], *, distinct: bool = False) -> NoOp:
        """By hand: the outliers' indices, or a mask, among ``size`` patterns."""
        given = torch.as_tensor(outliers)
        if given.dtype == torch.bool:
            if given.shape != (size,):
                raise ValueError(f"outliers is a mask of shape {tuple(given.shape)}: ({size},) is needed")
            return NoOp(given.clone(), distinct)
        mask = torch.zeros(size, dtype=torch.bool, device=given.device)
        mask[check_indices(given, size, "outliers")] = True
        return NoOp(mask, distinct)

    @staticmethod
    def by_similarity(
        patterns: Tensor,
        threshold: float,
        *,
        share: float = 1.0,
        measure: Measure = "cosine",
        distinct: bool = False,
    ) -> NoOp:
        """The paper's three steps: score all pairs, call those below ``threshold`` dissimilar, and
        take as outliers the patterns dissimilar to at least ``share`` of the others.

        Args:
            patterns: [M, d]
            threshold: below it two patterns are dissimilar.
            share: in (0, 1]; 1 asks for dissimilarity to every other pattern.
            measure: "cosine", or "dot" for the inner product that retrieval scores with.
        """
        patterns = _measured(check_patterns(patterns), measure)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share}: a part of the other patterns, in (0, 1], is needed")
        size = len(patterns)
        if size == 1:  # nothing to be dissimilar to
            return NoOp(torch.zeros(1, dtype=torch.bool, device=patterns.device), distinct)
        dissimilar = []
        for rows in torch.arange(size, device=patterns.device).split(max(1, _BLOCK // size)):
            below = patterns[rows] @ patterns.T < threshold
            below[rows - rows[0], rows] = False  # a pattern is no witness about itself
            dissimilar.append(below.sum(1))
        # the small number forgives the product its rounding
        return NoOp(torch.cat(dissimilar) >= share * (size - 1) - 1e-6, distinct)

    @staticmethod
    def by_query(
        patterns: Tensor, query: Tensor, threshold: float, *, measure: Measure = "cosine", distinct: bool = False
    ) -> NoOp:
        """Outliers relative to a query [d], or to every one of several [..., d]: less similar than ``threshold``."""
        patterns = check_patterns(patterns)
        if not isinstance(query, Tensor):
            raise TypeError(f"query is a {type(query).__name__}: a tensor [d] or [..., d] is needed")
        if query.dim() == 0 or query.shape[-1] != patterns.shape[1]:
            raise ValueError(
                f"query has shape {tuple(query.shape)}: [d] or [..., d] with d = {patterns.shape[1]} is needed"
            )
        query = check_patterns(query.reshape(-1, query.shape[-1]), "query").to(patterns.dtype)
        patterns, query = _measured(patterns, measure), _measured(query, measure)
        closest = patterns.new_full((len(patterns),), -torch.inf)
        for part in query.split(max(1, _BLOCK // len(patterns))):
            closest = torch.maximum(closest, (patterns @ part.T).amax(1))
        return NoOp(closest < threshold, distinct)


class Extended(NamedTuple):
    """Patterns and queries in d + 1 dimensions."""

    queries: Tensor  # x̄ = (x, 0)  [..., d + 1]
    patterns: Tensor  # ξ̄ = (ξ, ω), ω = 0 but for outliers  [M, d + 1]
    op: Tensor  # Λ(ξ̄) of those that are no outliers, ξ̄_op  [M − K, d + 1]
    omega: Tensor  # Λ(ξ̄) of the outliers without repetition, Ω  [1 or K, d + 1]


def extend(patterns: Tensor, queries: Tensor, no_op: NoOp, C: float = 1.0) -> Extended:
    """The paper's one dimension more: ω and Λ, spelled out.

    ``HopfieldMemory`` needs none of it, softmax_n says the same in d dimensions; this is the
    definition it is tested against. An update in the extended space ends with an extra coordinate
    of C times the no-op weight; ⟨Ω, x̄⟩ = 0 asks for 0 there, so it is dropped before the next.

    Args:
        patterns: [M, d]
        queries: [..., d]
        no_op: the classification of the M patterns. Distinct outliers get Ω of C, 2C, 3C, …
        C: the extra coordinate of Ω, finite and not 0.
    """
    patterns = check_patterns(patterns)
    check_size(no_op, len(patterns))
    if C == 0.0 or not math.isfinite(C):  # ⟨Ω, x̄⟩ = C · 0 is to be 0
        raise ValueError(f"C={C}: the extra coordinate tells outliers from the rest: a finite number other than 0")
    mask = no_op.outliers.to(patterns.device)
    last = torch.zeros_like(patterns[:, :1])  # ω  [M, 1]
    heights = C * torch.arange(1, no_op.n + 1, dtype=patterns.dtype, device=patterns.device)  # [n]
    last[mask, 0] = heights if no_op.distinct else heights.expand(no_op.count)
    extended = torch.cat([patterns, last], 1)
    omega = torch.cat([patterns.new_zeros(no_op.n, patterns.shape[1]), heights[:, None]], 1)
    x = torch.cat([queries, torch.zeros_like(queries[..., :1])], -1)
    return Extended(x, extended, extended[~mask], omega)


def check_size(no_op: NoOp, size: int) -> None:
    if not isinstance(no_op, NoOp):
        raise TypeError(
            f"no_op is a {type(no_op).__name__}: a NoOp is needed; NoOp.assign makes one from indices or a mask"
        )
    if len(no_op.outliers) != size:
        raise ValueError(f"no_op classifies {len(no_op.outliers)} patterns and there are {size}: one entry for each")


def check_indices(indices: Tensor, size: int, name: str) -> Tensor:
    """Integer indices in [−size, size), as 1-D; negative ones count from the end."""
    if indices.numel() == 0:  # [] as a tensor is float32
        return indices.reshape(-1).long()
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {indices.dtype}: whole numbers are needed")
    indices = indices.reshape(-1).long()
    wrong = indices[(indices < -size) | (indices >= size)]
    if len(wrong):
        raise ValueError(f"{name} holds {int(wrong[0])} and there are {size} patterns: indices from 0 to {size - 1}")
    return indices


def _measured(patterns: Tensor, measure: str) -> Tensor:
    """Vectors whose inner products are the measure; half precision as float32."""
    if measure not in ("cosine", "dot"):
        raise ValueError(f"measure={measure!r}: 'cosine' or 'dot' is needed")
    if patterns.dtype in (torch.float16, torch.bfloat16):
        patterns = patterns.float()
    if measure == "dot":
        return patterns
    norms = torch.linalg.vector_norm(patterns, dim=1, keepdim=True)
    return patterns / torch.where(norms == 0, 1.0, norms)  # short ones too: torch's normalize leaves 1e-13 as it is
