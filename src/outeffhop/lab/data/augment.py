"""Random augmentation of training images by kornia, on whole batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from outeffhop._naming import require
from outeffhop.lab.data.samples import Sample, stack

__all__ = ["AUGMENTATIONS", "AugmentedBatch"]

AUGMENTATIONS = {
    "none": "images unchanged",
    "light": "a shift by up to an eighth of the side; random horizontal flips of colour images",
    "paper": "random resized crop and flip, RandAugment (2 changes of strength 9), then mixup or cutmix, half each",
}


class AugmentedBatch:
    """Collate function that makes an augmented batch of images.

    A batch has ``labels``, the indices of the classes. With label smoothing or mixed images it also has
    ``soft_labels``, [B, classes], whose rows sum to 1. The training loss is the cross entropy against these.

    Random numbers depend only on the seed, the epoch and the samples of the batch, so a resumed run draws the same
    ones. The state of torch's global generator does not change.

    Args:
        kind: none, light or paper.
        classes: number of classes.
        mean, std: normalization of the samples; undone while the images are augmented.
        label_smoothing: share of the target that is spread over all classes.
        seed: of all random numbers.
    """

    def __init__(
        self,
        kind: str,
        classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        label_smoothing: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"label_smoothing={label_smoothing}: must be in [0, 1)")
        self.kind, self.classes, self.label_smoothing, self.seed, self.epoch = kind, classes, label_smoothing, seed, 0
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, samples: list[Sample]) -> Sample:
        batch = stack(samples)
        pixels, labels = batch["pixel_values"], batch["labels"]
        soft = one_hot(labels, self.classes).to(pixels.dtype)
        with _drawing(self._key(pixels, labels)):
            if self.kind != "none":
                natural = (pixels * self.std + self.mean).clamp(0, 1)
                pixels = (self._change(natural) - self.mean) / self.std
            if self.kind == "paper":
                pixels, soft = self._mix(pixels, labels)
        batch["pixel_values"] = pixels
        if self.kind == "paper" or self.label_smoothing:
            batch["soft_labels"] = (1 - self.label_smoothing) * soft + self.label_smoothing / self.classes
        return batch

    def _change(self, natural: Tensor) -> Tensor:
        channels = natural.shape[1]
        changed = natural.expand(-1, 3, -1, -1)  # kornia expects three channels
        for step in self._steps(channels, *natural.shape[2:]):
            changed = step(changed)
        return changed[:, :channels]

    def _steps(self, channels: int, height: int, width: int) -> list[Any]:
        augmentation = require("kornia.augmentation")
        size = (height, width)
        flip = [augmentation.RandomHorizontalFlip(p=0.5)] if channels == 3 else []  # a mirrored digit is not a digit
        if self.kind == "light":
            return [augmentation.RandomCrop(size, padding=max(1, height // 8)), *flip]
        return [augmentation.RandomResizedCrop(size, scale=(0.08, 1.0)), *flip, augmentation.auto.RandAugment(n=2, m=9)]

    @cached_property
    def _mixers(self) -> list[Any]:
        augmentation = require("kornia.augmentation")
        both = {"p": 1.0, "data_keys": ["input", "class"]}
        return [
            augmentation.RandomMixUpV2(**both),
            augmentation.RandomCutMixV2(**both, use_correct_lambda=True),
        ]

    def _mix(self, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mixup or cutmix with a share drawn uniformly from (0, 1)."""
        cut = bool(torch.rand(()) < 0.5)
        mixed, told = self._mixers[cut](pixels, labels)
        first, second, share = told.reshape(-1, 3).unbind(-1)
        share = share if cut else 1 - share  # kornia returns the share of the first for cutmix, of the second for mixup
        kept = one_hot(first.long(), self.classes) * share[:, None]
        return mixed, (kept + one_hot(second.long(), self.classes) * (1 - share)[:, None]).to(pixels.dtype)

    def _key(self, pixels: Tensor, labels: Tensor) -> int:
        """A hash of seed, epoch and batch; of each image only some pixels are hashed."""
        flat = pixels.flatten(1)
        some = flat[:, :: max(1, flat.shape[1] // 64)].contiguous()
        named = f"{self.seed}/{self.epoch}/".encode() + labels.numpy().tobytes() + some.numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(named, digest_size=7).digest(), "little")


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Seeds torch's CPU generator, which kornia draws from, and restores its state afterwards."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
