"""Images prepared for a Vision Transformer: scaled to [0, 1], resized, cropped square, normalized."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from outeffhop._naming import known
from outeffhop.lab.data.augment import AUGMENTATIONS, AugmentedBatch
from outeffhop.lab.data.image_files import ImageData, LabelledImages
from outeffhop.lab.data.samples import SPLITS, Prepared, Sample, check_size, stack

__all__ = ["ImageSet", "moments", "prepare_images"]

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_ENOUGH = 4096  # evenly spaced images from which mean and standard deviation are computed


class ImageSet(Dataset[Sample]):
    """Samples of pixel_values, float [C, S, S], and labels if ``labelled``.

    The shorter side is resized to ``size`` (bilinear with antialiasing), the longer one is cropped to its middle.
    Grey images get as many equal channels as ``mean`` and ``std`` have.
    """

    def __init__(
        self,
        images: LabelledImages,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        labelled: bool = True,
    ) -> None:
        self.images, self.size, self.labelled = images, size, labelled
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"image {index} of {len(self)}")
        index %= len(self)
        pixels = (_square(self.images.images[index], self.size) - self.mean) / self.std
        if not self.labelled:
            return {"pixel_values": pixels}
        return {"pixel_values": pixels, "labels": torch.tensor(int(self.images.labels[index]))}


def _square(image: NDArray[np.uint8], size: int) -> Tensor:
    """uint8 [H, W, C] to float [C, size, size] in [0, 1]."""
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
    height, width = pixels.shape[1:]
    if min(height, width) != size:
        scale = size / min(height, width)
        to = (max(size, round(height * scale)), max(size, round(width * scale)))
        pixels = interpolate(pixels[None], to, mode="bilinear", antialias=True, align_corners=False)[0]
        height, width = to
    top, left = (height - size) // 2, (width - size) // 2
    return pixels[:, top : top + size, left : left + size].contiguous()


def moments(images: LabelledImages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel in [0, 1], over all pixels of at most 4,096 images."""
    total = squares = np.zeros(images.images[0].shape[-1])
    low, high = np.full(len(total), 255), np.zeros(len(total), np.int64)
    count = 0
    for index in np.linspace(0, len(images) - 1, min(len(images), _ENOUGH)).round().astype(int):
        pixels = images.images[index].reshape(-1, len(total))
        low, high = np.minimum(low, pixels.min(0)), np.maximum(high, pixels.max(0))
        pixels = pixels / 255.0
        total, squares, count = total + pixels.sum(0), squares + (pixels**2).sum(0), count + len(pixels)
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0.0))
    if (low == high).any():  # rounding may give it a deviation of 1e-8
        raise ValueError("the training images are constant in a channel: give std")
    return tuple(mean.tolist()), tuple(deviation.tolist())


def prepare_images(
    data: ImageData,
    task: str,
    *,
    image_size: int | None,
    num_channels: int | None,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    augment: str,
    label_smoothing: float,
    seed: int,
) -> Prepared:
    """Prepares images for a classifier, or without labels for an embedding."""
    known("augment", augment, AUGMENTATIONS)
    plain, labelled = augment == "none" and label_smoothing == 0.0, task == "classification"
    if not plain and not labelled:
        raise ValueError(
            f"augment={augment!r}, label_smoothing={label_smoothing}: task {task!r} has no labels; leave these out"
        )
    train = data.splits["train"]
    height, width, channels = train.images[0].shape
    if num_channels not in (None, channels) and (channels, num_channels) != (1, 3):
        raise ValueError(
            f"num_channels={num_channels}: data spec {data.source!r} has images of {channels} channels, and only grey "
            "images can be turned into colour ones"
        )
    channels = num_channels or channels
    size = image_size if image_size is not None else min(height, width)
    check_size("image_size", size)
    mean, std = _normalisation(data, channels, mean, std)
    sets = {split: ImageSet(data.splits[split], size, mean, std, labelled) for split in SPLITS}
    empty = [split for split, part in sets.items() if not len(part)]
    if empty:
        raise ValueError(f"data spec {data.source!r} has no images in {empty[0]}: give at least ten")
    classes = len(data.classes)
    return Prepared(
        task,
        train=sets["train"],
        validation=sets["validation"],
        test=sets["test"],
        collate=stack if plain else AugmentedBatch(augment, classes, mean, std, label_smoothing, seed),
        eval_collate=stack,
        changes={**({"num_labels": classes} if labelled else {}), "image_size": size, "num_channels": channels},
        about={
            "source": data.source,
            "kind": "images",
            "content": data.digest,
            "splits": {split: {"samples": len(part)} for split, part in sets.items()},
            "classes": data.classes,
            "preprocessing": {
                "image_size": size,
                "mean": list(mean),
                "std": list(std),
                "augment": augment,
                "label_smoothing": label_smoothing,
                "seed": seed,
            },
        },
    )


def _normalisation(
    data: ImageData, channels: int, mean: tuple[float, ...] | None, std: tuple[float, ...] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The given values, else ImageNet's for ImageNet from the hub, else those of the training images."""
    if mean is None or std is None:
        imagenet = data.source.startswith("hub:") and "imagenet" in data.source.lower() and channels == 3
        measured = _IMAGENET if imagenet else moments(data.splits["train"])
        measured_mean, measured_std = (m * (channels // len(m)) for m in measured)  # grey turned into colour
        mean, std = measured_mean if mean is None else mean, measured_std if std is None else std
    return _each_channel("mean", mean, channels), _each_channel("std", std, channels)


def _each_channel(name: str, given: Iterable[float], channels: int) -> tuple[float, ...]:
    try:
        values = tuple(float(value) for value in given)
    except (TypeError, ValueError):  # a single number, or text
        values = ()
    if len(values) != channels or not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
        raise ValueError(f"{name}={given}: must be {channels} finite numbers, one per channel, std above 0")
    return values
