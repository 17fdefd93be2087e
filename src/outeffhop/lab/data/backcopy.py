"""Backcopy, a task on which outliers and parked attention appear within a minute of training on a CPU.

Most symbols are followed by what a Markov chain draws. A few are triggers: after a trigger comes the symbol before it
once more. A head that looks back therefore has work after a trigger and none elsewhere, and softmax has to put its
weight somewhere all the same. Every sequence begins with the same start symbol, where it ends up.

The task is from Guo et al., "Active-Dormant Attention Heads" (arXiv 2410.13835).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["START", "Backcopy"]

START = 0
"""The symbol that begins every sequence, and occurs nowhere else."""


class Backcopy:
    """Sequences of the task, for a causal language model.

    Symbols 1 … ``triggers`` are the triggers; those after them are ordinary.

    Args:
        symbols: how many there are besides the start symbol.
        triggers: how many of them are triggers.
        length: of a sequence, with the start symbol.
        concentration: of the Dirichlet distribution that the rows of the chain are drawn from. Small ones make the next
            symbol easier to guess.
        seed: of the chain. Sequences have their own.
    """

    def __init__(
        self, symbols: int = 64, triggers: int = 4, length: int = 64, concentration: float = 0.1, seed: int = 0
    ) -> None:
        if not 0 < triggers < symbols:
            raise ValueError(f"triggers={triggers}: must be at least 1 and less than symbols={symbols}")
        self.triggers, self.length = triggers, length
        self.vocabulary = symbols + 1
        rows = np.random.default_rng(seed).dirichlet(np.full(symbols, concentration), size=self.vocabulary)
        rows[START, :triggers] = 0  # there is no symbol before the first to copy
        self._upto = np.cumsum(rows / rows.sum(1, keepdims=True), 1)  # [vocabulary, symbols]

    def sample(self, count: int, seed: int | np.random.Generator) -> Tensor:
        """Sequences as ids.  [count, length]"""
        random = np.random.default_rng(seed)
        ids = np.full((count, self.length), START)
        for t in range(1, self.length):
            before = ids[:, t - 1]
            drawn = 1 + (random.random((count, 1)) > self._upto[before, :-1]).sum(1)
            copies = (before > START) & (before <= self.triggers)
            ids[:, t] = np.where(copies, ids[:, max(t - 2, 0)], drawn)
        return torch.from_numpy(ids)

    def batches(self, count: int, size: int, seed: int | np.random.Generator) -> list[dict[str, Tensor]]:
        """Batches with labels: what a model takes, and what ``measure`` and ``evaluate`` read."""
        return [{"input_ids": ids, "labels": ids} for ids in self.sample(count * size, seed).split(size)]

    def copies(self, ids: Tensor) -> Tensor:
        """Where the next symbol is a copy: at triggers, the last position excepted.  [count, length − 1], bool"""
        return (ids[:, :-1] > START) & (ids[:, :-1] <= self.triggers)
