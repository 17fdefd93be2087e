"""The loader of training batches: the order of samples, and the processes that load them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler
from transformers import TrainingArguments

from outeffhop.lab.data import Prepared

__all__ = ["EpochSampler", "make_loader"]


class EpochSampler(Sampler[int]):
    """A shuffle that depends only on seed and epoch, cut to whole steps.

    It is the same for any number of processes and any accumulation.
    """

    def __init__(self, size: int, batch: int, seed: int) -> None:
        self.size, self.batch, self.seed, self.epoch = size, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.size // self.batch

    def __len__(self) -> int:
        return self.steps * self.batch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(self.size, generator=generator)[: len(self)].tolist()


def make_loader(prepared: Prepared, sampler: EpochSampler, arguments: TrainingArguments) -> DataLoader[Any]:
    """Training batches of one device."""
    return DataLoader(
        prepared.train,  # type: ignore[arg-type]
        batch_size=arguments.train_batch_size,
        sampler=sampler,
        collate_fn=prepared.collate,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=arguments.dataloader_pin_memory,
        drop_last=True,
        worker_init_fn=_ignore_signals,
    )


def _ignore_signals(worker: int) -> None:
    """Makes a loading process ignore signals that are sent to the whole job.

    The training process finishes its step first and needs data for it. It then ends the loading processes by dropping
    the loader's iterator.
    """
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, signal.SIG_IGN)
