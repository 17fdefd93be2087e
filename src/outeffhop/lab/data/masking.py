"""Masked language modelling: 15 % of the tokens are predicted; 80 % of them are masked, 10 % replaced, 10 % kept."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from outeffhop.lab.data.samples import Sample, stack
from outeffhop.lab.data.tokenizer import ids_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["MaskedBatch"]

_IGNORED = -100  # the label that cross entropy ignores


class MaskedBatch:
    """Collate function that masks blocks of tokens.

    The mask of a block depends only on the block, the seed and the epoch. The masks stay the same however blocks are
    batched, on any number of processes, and after an interruption.

    Special tokens are neither chosen nor inserted. At least one token of a block is chosen, if it has an ordinary one,
    so that the loss of a batch is always defined.

    Args:
        tokenizer: defines the mask token, the special ids and the vocabulary.
        probability: of choosing a token.
        seed: of all masks.
        epoch: first epoch, changed by ``set_epoch``; None in evaluation, where masks never change.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, probability: float = 0.15, seed: int = 0, epoch: int | None = None
    ) -> None:
        if not 0.0 < probability <= 1.0:
            raise ValueError(f"mask_probability={probability}: must be in (0, 1]")
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "the tokenizer has no mask_token, which task 'mlm' needs: give one that has (--tokenizer FOLDER), or "
                "compare the outputs alone (--task embedding)"
            )
        self.probability, self.seed, self.epoch = probability, seed, epoch
        self.mask_id = tokenizer.mask_token_id
        self.special = np.ones(ids_of(tokenizer), bool)  # ids without a token are not inserted either
        self.special[list(tokenizer.get_vocab().values())] = False
        self.special[tokenizer.all_special_ids] = True
        self.ordinary = np.flatnonzero(~self.special)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[Sample]) -> Sample:
        ids = stack(samples)["input_ids"].numpy()  # [B, T]
        choice, action = np.stack([self._uniform(block) for block in ids], axis=1)  # [B, T] each
        choice[self.special[ids]] = np.inf
        chosen = choice < np.maximum(self.probability, choice.min(axis=1, keepdims=True) * (1 + 1e-9))
        labels = np.where(chosen, ids, _IGNORED)
        # the part of the uniform number beyond 0.8 selects the token to insert
        drawn = ((action - 0.8) * 10 * len(self.ordinary)).astype(np.int64).clip(0, len(self.ordinary) - 1)
        masked = np.where(chosen & (action < 0.8), self.mask_id, ids)
        masked = np.where(chosen & (action >= 0.8) & (action < 0.9), self.ordinary[drawn], masked)
        return {
            "input_ids": torch.from_numpy(masked),
            "labels": torch.from_numpy(labels),
        }

    def _uniform(self, block: NDArray[np.int64]) -> NDArray[np.float64]:
        """Two uniform numbers in [0, 1) for each token of a block."""
        named = f"{self.seed}/{self.epoch}/".encode()
        key = hashlib.blake2b(named + block.astype("<i8").tobytes(), digest_size=16).digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        return random.random((2, len(block)))
