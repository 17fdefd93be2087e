"""What every kind of data becomes: three sets of samples, and how samples become a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["SPLITS", "Collate", "Prepared", "Sample", "Samples", "batches", "check_size", "stack"]

SPLITS = ("train", "validation", "test")

Sample = dict[str, Tensor]
Collate = Callable[[list[Sample]], Sample]


class Samples(Protocol):
    """A map-style dataset, as ``torch.utils.data.DataLoader`` takes it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Prepared:
    """Data ready for one model.

    What is drawn at random is a function of the seed, the epoch and the samples: masks of each block alone,
    augmentation of the batch it mixes. Nothing depends on a generator's state, so it does not matter which process
    or worker collates, what was fetched ahead, or whether a run was interrupted. Only the epoch must be told: call
    ``set_epoch`` as each epoch begins, as with torch's DistributedSampler; without it every epoch draws the same.

    Attributes:
        task: mlm, clm, classification or forecasting.
        train, validation, test: map-style datasets of samples.
        collate: samples to a training batch: fresh masks or augmentation in each epoch.
        eval_collate: samples to an evaluation batch, always the same.
        tokenizer: of text, else None.
        changes: the fields of a model's config that the data decides.
        about: where the data came from and what was done to it, as JSON could say it.
    """

    task: str
    train: Samples
    validation: Samples
    test: Samples
    collate: Collate
    eval_collate: Collate
    tokenizer: PreTrainedTokenizerFast | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def set_epoch(self, epoch: int) -> None:
        """Tells the training collate which epoch begins."""
        setter = getattr(self.collate, "set_epoch", None)
        if setter is not None:
            setter(epoch)


def check_size(name: str, value: object, least: int = 1) -> None:
    """Refuses what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r}: a whole number, at least {least}, is needed")


def stack(samples: Sequence[Sample]) -> Sample:
    """Samples of equal shapes to one batch."""
    if not samples:
        raise ValueError("samples is empty: a batch needs at least one")
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def batches(
    dataset: Samples, collate: Collate, batch_size: int, *, limit: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Batches in the dataset's order, the last one shorter where it must be; ``limit`` counts batches."""
    check_size("batch_size", batch_size)
    if limit is not None:
        check_size("limit", limit, 0)
    starts = range(0, len(dataset), batch_size)[:limit]
    return (collate([dataset[i] for i in range(s, min(s + batch_size, len(dataset)))]) for s in starts)
