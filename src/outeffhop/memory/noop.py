"""The no-op classification Λ: which stored patterns are outliers and excluded from retrieval.

The paper gives every pattern one more dimension, ω, which is nonzero for outliers. Λ maps each outlier
to Ω = (0, …, 0, C) and leaves the other patterns unchanged. A query's extra coordinate is 0, so Ω
scores ⟨Ω, x̄⟩ = 0 for every C. In the original d dimensions, Ω is the 1 in softmax1's denominator;
with one Ω_C per outlier it is K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outeffhop._naming import known
from outeffhop.functional import compute_dtype
from outeffhop.memory.arguments import check_patterns

__all__ = ["NoOp", "check_indices", "check_size"]

Measure = Literal["cosine", "dot"]

# the most similarities held at once
_BLOCK = 1 << 24


@dataclass(frozen=True, eq=False)
class NoOp:
    """Which of M stored patterns are no-op outliers.

    Attributes:
        outliers: bool [M].
        distinct: False maps all outliers to one Ω, as in lse₁ and softmax1, even if there is no
            outlier; True gives each of K outliers its own Ω_C, as in lse_K and softmax_K.
    """

    outliers: Tensor
    distinct: bool = False

    def __post_init__(self) -> None:
        given = self.outliers
        if not isinstance(given, Tensor):
            raise TypeError(f"outliers is a {type(given).__name__}: expected a bool tensor [M]; see NoOp.assign")
        if given.dtype != torch.bool or given.dim() != 1:
            raise ValueError(
                f"outliers is {given.dtype} of shape {tuple(given.shape)}: expected a bool tensor [M]; "
                "NoOp.assign makes one from indices"
            )

    @property
    def count(self) -> int:
        """K, the number of outliers."""
        return int(self.outliers.sum())

    @property
    def n(self) -> int:
        """How many no-op patterns the memory has: 1, or one per outlier."""
        return self.count if self.distinct else 1

    @staticmethod
    def assign(size: int, outliers: Tensor | Sequence[int] | Sequence[bool], *, distinct: bool = False) -> NoOp:
        """From the outliers' indices among ``size`` patterns, or from a mask."""
        given = torch.as_tensor(outliers)
        if given.dtype == torch.bool:
            if given.shape != (size,):
                raise ValueError(f"outliers is a mask of shape {tuple(given.shape)}: expected ({size},)")
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
        """The paper's three steps: score all pairs, call pairs below ``threshold`` dissimilar, and take
        the patterns that are dissimilar to at least ``share`` of the others as outliers.

        Args:
            patterns: [M, d]
            threshold: below it two patterns are dissimilar.
            share: in (0, 1]; 1 means dissimilar to every other pattern.
            measure: "cosine", or "dot" for the inner product that retrieval scores with.
        """
        patterns = _measured(check_patterns(patterns), measure)
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share}: must be a share of the other patterns, in (0, 1]")
        size = len(patterns)
        if size == 1:  # there is no other pattern
            return NoOp(torch.zeros(1, dtype=torch.bool, device=patterns.device), distinct)
        dissimilar = []
        for rows in torch.arange(size, device=patterns.device).split(max(1, _BLOCK // size)):
            below = patterns[rows] @ patterns.T < threshold
            below[rows - rows[0], rows] = False  # a pattern is not compared with itself
            dissimilar.append(below.sum(1))
        # 1e-6 allows for rounding in the product
        return NoOp(torch.cat(dissimilar) >= share * (size - 1) - 1e-6, distinct)


def check_size(no_op: NoOp, size: int) -> None:
    if not isinstance(no_op, NoOp):
        raise TypeError(
            f"no_op is a {type(no_op).__name__}: expected a NoOp; NoOp.assign makes one from indices or a mask"
        )
    if len(no_op.outliers) != size:
        raise ValueError(
            f"no_op classifies {len(no_op.outliers)} patterns and there are {size}: expected one entry for each"
        )


def check_indices(indices: Tensor, size: int, name: str) -> Tensor:
    """Integer indices in [−size, size), as 1-D; negative ones count from the end."""
    if indices.numel() == 0:  # [] as a tensor is float32
        return indices.reshape(-1).long()
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {indices.dtype}: expected integers")
    indices = indices.reshape(-1).long()
    wrong = indices[(indices < -size) | (indices >= size)]
    if len(wrong):
        raise ValueError(f"{name} holds {int(wrong[0])} and there are {size} patterns: choose from 0 to {size - 1}")
    return indices


def _measured(patterns: Tensor, measure: str) -> Tensor:
    """Vectors whose inner products are the measure; half precision as float32."""
    known("measure", measure, ("cosine", "dot"))
    patterns = patterns.to(compute_dtype(patterns.dtype))
    if measure == "dot":
        return patterns
    norms = torch.linalg.vector_norm(patterns, dim=1, keepdim=True)
    # torch's normalize would leave vectors of length 1e-13 as they are
    return patterns / torch.where(norms == 0, 1.0, norms)
