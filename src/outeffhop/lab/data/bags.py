"""Bags of instances for multiple-instance learning: one label a bag, and which instance earns it is not said."""

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
    """Bags of instances [n_i, d] with a label each; a map-style dataset.

    Attributes:
        source: the spec or path they came from.
        instances: one tensor a bag.
        labels: 0 or 1 a bag, int64.
    """

    source: str
    instances: list[Tensor]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.instances)

    def __getitem__(self, index: int) -> Sample:
        return {"instances": self.instances[index], "labels": self.labels[index]}

    def take(self, indices: Sequence[int]) -> Bags:
        """Some of the bags."""
        return Bags(self.source, [self.instances[i] for i in indices], self.labels[list(indices)])

    def scaled(self, like: Bags | None = None) -> Bags:
        """Features with mean 0 and deviation 1 over the instances of ``like``: the training bags, for the test's."""
        seen = torch.cat((self if like is None else like).instances)
        mean, deviation = seen.mean(0), seen.std(0, correction=0)
        # of a feature that is always the same, rounding may leave a deviation of 1e-8
        deviation = torch.where(seen.amax(0) > seen.amin(0), deviation, torch.ones_like(deviation))
        return Bags(self.source, [(bag - mean) / deviation for bag in self.instances], self.labels)

    def folds(self, k: int = 10, seed: int = 0) -> Iterator[tuple[list[int], list[int]]]:
        """Indices of training and test bags, k times; each fold has its share of positive bags."""
        smallest = int(torch.bincount(self.labels, minlength=2).min())
        if not 2 <= k <= smallest:
            raise ValueError(f"k={k}: from 2 to {smallest} folds, since the rarer class has so many bags")
        splitter = require("sklearn.model_selection").StratifiedKFold(k, shuffle=True, random_state=seed)
        for train, test in splitter.split(np.zeros(len(self)), self.labels.numpy()):
            yield train.tolist(), test.tolist()


def collate_bags(samples: list[Sample]) -> Sample:
    """Bags to a batch: instances [B, n, d] padded with zeros, key_padding_mask [B, n] True where padded, labels [B]."""
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
    """Bags from an npz file with X, bag and y, or made of any pictures with classes.

    An npz file (elephant, fox, tiger, ucsb_breast) is taken as it is, features unscaled; the other arguments are for
    pictures (a folder with MNIST, or ``builtin:images``). There a bag is positive if it holds the target class. Sizes
    are drawn from a normal distribution, pictures with replacement, bags until half of them are positive.

    Args:
        spec: a path or a spec.
        split: which pictures bags are made of; train, validation or test.
        count: how many bags are made, half of them positive.
        target: the class that makes a bag positive.
        mean_size, std_size: of the number of pictures in a bag.
        seed: of what is drawn.
    """
    parsed = parse(os.fspath(spec))
    if parsed.where == "path" and kind_of_path(parsed.path, spec=parsed.text) == "bags":
        if parsed.path.is_dir():
            raise ValueError(f"data spec {parsed.text!r} is a folder: give one of its npz files")
        return _read_npz(parsed.path)
    data = load_images(parsed)
    pictures = data.splits[known("split", split, data.splits)]
    if not (1 <= mean_size < math.inf and 0 <= std_size < math.inf and count >= 2):
        raise ValueError(f"mean_size={mean_size}, std_size={std_size}, count={count}: at least 1, 0 and 2 are needed")
    positive = pictures.labels == target
    if not positive.any() or positive.all():
        raise ValueError(f"target={target}: {split} has pictures of classes {sorted(set(pictures.labels.tolist()))}")
    images = [np.asarray(image) for image in pictures.images]
    sizes = sorted({image.shape for image in images})
    if len(sizes) > 1:
        raise ValueError(
            f"data spec {parsed.text!r} has pictures of sizes {sizes[0]} and {sizes[1]}: bags need one size"
        )
    drawn, labels = _draw(positive, count, mean_size, std_size, np.random.default_rng(seed))
    pixels = torch.from_numpy(np.stack(images).reshape(len(images), -1))
    return Bags(parsed.text, [pixels[indices].float() / 255 for indices in drawn], torch.tensor(labels))


def _draw(
    positive: NDArray[np.bool_], count: int, mean: float, std: float, random: np.random.Generator
) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Indices of each bag and its label, positive and negative in turn."""
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
            f"{file}: X {features.dtype} {features.shape}, bag {bag.shape} and y {labels.shape} of 0 and 1 do not fit; "
            "numbers [instances, d], [instances] and [bags] are needed"
        )
    if not np.array_equal(np.unique(bag), np.arange(1, len(labels) + 1)):
        raise ValueError(f"{file}: bag must name bags 1 to {len(labels)}, each at least once")
    with np.errstate(over="ignore"):  # what overflows is named below
        values = torch.from_numpy(features.astype(np.float32))
    lost = (~torch.isfinite(values)).nonzero()
    if len(lost):
        row, column = lost[0].tolist()
        raise ValueError(f"{file}: X[{row}, {column}] is no finite number, or one too large for float32")
    instances = [values[torch.from_numpy(bag == number)] for number in range(1, len(labels) + 1)]
    return Bags(str(file), instances, torch.from_numpy(labels.astype(np.int64)))
