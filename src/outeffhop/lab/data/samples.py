"""What all kinds of data are turned into: three sets of samples, and functions that make batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["SPLITS", "Collate", "Prepared", "Sample", "Samples", "batches", "check_size", "random_batches", "stack"]

SPLITS = ("train", "validation", "test")

Sample = dict[str, Tensor]
Collate = Callable[[list[Sample]], Sample]


class Samples(Protocol):
    """A map-style dataset, as ``torch.utils.data.DataLoader`` takes it."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


@dataclass(frozen=True)
class Prepared:
    """Data that is ready for a model.

    Random masks and augmentation depend only on the seed, the epoch and the samples, not on the state of a generator.
    So it does not matter which process or worker collates a batch, what was prefetched, or whether a run was
    interrupted. Call ``set_epoch`` when an epoch begins, as with torch's DistributedSampler; without it every epoch
    has the same masks and augmentation.

    Attributes:
        task: mlm, clm, seq2seq, classification, forecasting or embedding.
        train, validation, test: map-style datasets of samples.
        collate: makes a training batch of samples, with new masks or augmentation in each epoch.
        eval_collate: makes an evaluation batch of samples, always the same.
        tokenizer: for text, else None.
        changes: fields of a model's config that follow from the data.
        about: source and preprocessing of the data, as JSON can hold it.
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
        """Sets the epoch of the training collate function."""
        setter = getattr(self.collate, "set_epoch", None)
        if setter is not None:
            setter(epoch)


def check_size(name: str, value: object, least: int = 1) -> None:
    """Raises a ValueError unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")


def stack(samples: Sequence[Sample]) -> Sample:
    """Stacks samples of equal shapes into a batch."""
    if not samples:
        raise ValueError("samples is empty: give at least one")
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def batches(
    dataset: Samples, collate: Collate, batch_size: int, *, limit: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yields at most ``limit`` batches in the order of the dataset; the last one may be smaller."""
    check_size("batch_size", batch_size)
    if limit is not None:
        check_size("limit", limit, 0)
    starts = range(0, len(dataset), batch_size)[:limit]
    return (collate([dataset[i] for i in range(s, min(s + batch_size, len(dataset)))]) for s in starts)


def random_batches(dataset: Samples, collate: Collate, batch_size: int, count: int, seed: int) -> list[Sample]:
    """At most ``count`` batches of samples drawn without replacement; the last one may be smaller."""
    drawn = min(len(dataset), count * batch_size)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:drawn].tolist()
    return [collate([dataset[i] for i in order[at : at + batch_size]]) for at in range(0, drawn, batch_size)]
