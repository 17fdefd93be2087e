"""Bags of instances for multiple-instance learning: each bag has one label, its instances have none."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from outeffhop._naming import known, require
from outeffhop.lab.data.image_files import load_images, read_npz
from outeffhop.lab.data.samples import Sample
from outeffhop.lab.data.specs import kind_of_path, parse

__all__ = ["Bags", "collate_bags", "load_bags"]


@dataclass(frozen=True, eq=False)
class Bags(Dataset[Sample]):
    """A map-style dataset of bags: instances [n_i, d] and one label each.

    Attributes:
        source: spec or path of the data.
        instances: one tensor per bag.
        labels: 0 or 1 per bag, int64.
    """

    source: str
    instances: list[Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, index: int) -> Sample:
        return {"instances": self.instances[index], "labels": self.labels[index]}

    def take(self, indices: Sequence[int]) -> Bags:
        """A subset of the bags."""
        return Bags(self.source, [self.instances[i] for i in indices], self.labels[list(indices)])

    def scaled(self, like: Bags | None = None) -> Bags:
        """Scales features to mean 0 and standard deviation 1 over the instances of ``like`` (the training bags)."""
        seen = torch.cat((self if like is None else like).instances)
        mean, deviation = seen.mean(0), seen.std(0, correction=0)
        # rounding may give a constant feature a deviation of 1e-8
        deviation = torch.where(seen.amax(0) > seen.amin(0), deviation, torch.ones_like(deviation))
        return Bags(self.source, [(bag - mean) / deviation for bag in self.instances], self.labels)

    def folds(self, k: int = 10, seed: int = 0) -> Iterator[tuple[list[int], list[int]]]:
        """Yields indices of training and test bags, k times; folds are stratified by label."""
        smallest = int(torch.bincount(self.labels, minlength=2).min())
        if not 2 <= k <= smallest:
            raise ValueError(f"k={k}: must be from 2 to {smallest}, the number of bags of the rarer class")
        splitter = require("sklearn.model_selection").StratifiedKFold(k, shuffle=True, random_state=seed)
        for train, test in splitter.split(np.zeros(len(self)), self.labels.numpy()):
            yield train.tolist(), test.tolist()


def collate_bags(samples: list[Sample]) -> Sample:
    """Makes a batch: instances [B, n, d] padded with zeros, key_padding_mask [B, n] True at padding, labels [B]."""
    bags = [sample["instances"] for sample in samples]
    sizes = torch.tensor([len(bag) for bag in bags])
    padded = torch.nn.utils.rnn.pad_sequence(bags, batch_first=True)
    mask = torch.arange(padded.shape[1])[None] >= sizes[:, None]
    return {
        "instances": padded,
        "key_padding_mask": mask,
        "labels": torch.stack([sample["labels"] for sample in samples]),
    }


def load_bags(
    spec: str | os.PathLike[str],
    *,
    split: str = "train",
    count: int = 200,
    target: int = 9,
    mean_size: float = 10.0,
    std_size: float = 2.0,
    seed: int = 0,
) -> Bags:
    """Loads bags from an npz file with X, bag and y, or makes them from images with classes.

    An npz file (elephant, fox, tiger, ucsb_breast) is read as it is, with unscaled features. The other arguments are
    for images (a folder with MNIST, or ``builtin:images``): a bag is positive if it contains the target class. Sizes
    of bags are drawn from a normal distribution, and images with replacement.

    Args:
        spec: a path or a spec.
        split: images to use: train, validation or test.
        count: number of bags to make, half of them positive.
        target: the class that makes a bag positive.
        mean_size, std_size: mean and standard deviation of the number of images in a bag.
        seed: of the random numbers.
    """
    parsed = parse(os.fspath(spec))
    if parsed.where == "path" and kind_of_path(parsed.path, spec=parsed.text) == "bags":
        if parsed.path.is_dir():
            raise ValueError(f"data spec {parsed.text!r} is a folder: give one of its npz files")
        return _read_npz(parsed.path)
    data = load_images(parsed)
    labelled = data.splits[known("split", split, data.splits)]
    if not (1 <= mean_size < math.inf and 0 <= std_size < math.inf and count >= 2):
        raise ValueError(f"mean_size={mean_size}, std_size={std_size}, count={count}: must be at least 1, 0 and 2")
    positive = labelled.labels == target
    if not positive.any() or positive.all():
        raise ValueError(f"target={target}: {split} has images of classes {sorted(set(labelled.labels.tolist()))}")
    images = [np.asarray(image) for image in labelled.images]
    sizes = sorted({image.shape for image in images})
    if len(sizes) > 1:
        raise ValueError(
            f"data spec {parsed.text!r} has images of sizes {sizes[0]} and {sizes[1]}: bags need images of one size"
        )
    drawn, labels = _draw(positive, count, mean_size, std_size, np.random.default_rng(seed))
    pixels = torch.from_numpy(np.stack(images).reshape(len(images), -1))
    return Bags(parsed.text, [pixels[indices].float() / 255 for indices in drawn], torch.tensor(labels))


def _draw(
    positive: NDArray[np.bool_], count: int, mean: float, std: float, random: np.random.Generator
) -> tuple[list[NDArray[np.int64]], list[int]]:
    """The indices of each bag and its label; positive and negative bags alternate."""
    absent = np.flatnonzero(~positive)
    bags, labels = [], []
    for number in range(count):
        size = max(1, round(random.normal(mean, std)))
        label = 1 - number % 2
        bag = random.integers(len(positive), size=size) if label else random.choice(absent, size=size)
        while label and not positive[bag].any():
            bag = random.integers(len(positive), size=size)
        bags.append(bag)
        labels.append(label)
    return bags, labels


def _read_npz(file: Path) -> Bags:
    features, bag, labels = read_npz(file, ("X", "bag", "y"), "X [instances, d], bag and y")
    fits = features.ndim == 2 and bag.shape == features.shape[:1] and labels.ndim == 1 and len(labels)
    if not fits or features.dtype.kind not in "fiub" or not set(np.unique(labels)) <= {0, 1}:
        raise ValueError(
            f"{file}: X {features.dtype} {features.shape}, bag {bag.shape} and y {labels.shape} do not fit: "
            "X must be numbers [instances, d], bag [instances] and y 0 or 1 [bags]"
        )
    if not np.array_equal(np.unique(bag), np.arange(1, len(labels) + 1)):
        raise ValueError(f"{file}: bag must name bags 1 to {len(labels)}, each at least once")
    with np.errstate(over="ignore"):  # overflow is reported below
        values = torch.from_numpy(features.astype(np.float32))
    lost = (~torch.isfinite(values)).nonzero()
    if len(lost):
        row, column = lost[0].tolist()
        raise ValueError(f"{file}: X[{row}, {column}] is not finite, or too large for float32")
    instances = [values[torch.from_numpy(bag == number)] for number in range(1, len(labels) + 1)]
    return Bags(str(file), instances, torch.from_numpy(labels.astype(np.int64)))
