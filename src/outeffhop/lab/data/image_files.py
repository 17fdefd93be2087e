"""Labelled images by split, as stored: idx files, npz files, a folder per class, or a hub dataset."""

from __future__ import annotations

import hashlib
import math
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from outeffhop._naming import printable, require
from outeffhop.lab.data import builtin, hub
from outeffhop.lab.data.files import DAMAGED, by_split, digest_of, files_under, open_packed, split_word, suffix
from outeffhop.lab.data.samples import SPLITS
from outeffhop.lab.data.specs import KINDS, Spec, is_idx, kind_of_file

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]
    from PIL.Image import Image

__all__ = ["ImageData", "LabelledImages", "load_images", "read_npz"]

_MOST_DIMENSIONS = 4  # of an idx file: N, H, W, C
_MOST_CLASSES = 1 << 20
_DEFLATED = 1032  # bytes that a byte can stand for at most
_LOOKED_AT = 100  # evenly spaced images, to find out whether there is colour
_SHARE = 0.1  # of the training images, for each missing split


@dataclass(frozen=True)
class LabelledImages:
    """Images of one split: ``images[i]`` is uint8 [H, W, C]."""

    images: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: NDArray[np.int64]) -> LabelledImages:
        images = self.images[indices] if isinstance(self.images, np.ndarray) else Chosen(self.images, indices)
        return LabelledImages(images, self.labels[indices])


@dataclass(frozen=True)
class ImageData:
    """Images of all splits, and the names of their classes."""

    source: str
    digest: str
    classes: list[str]
    splits: dict[str, LabelledImages]


def load_images(spec: Spec) -> ImageData:
    """Loads the images of a spec; missing splits are drawn from train, 10 % each, always the same.

    Images that are given for validation are also the test split if there is no other, as in ImageNet: nothing is taken
    from train for it.
    """
    if spec.where == "builtin":
        if spec.name != "images":
            raise ValueError(f"data spec {spec.text!r} contains {spec.name}, not images: give builtin:images or a path")
        images, labels = builtin.digits()
        found = ImageData(
            spec.text, _hash(images), [str(i) for i in range(10)], {"train": LabelledImages(images, labels)}
        )
    elif spec.where == "hub":
        found = _of_hub(spec, hub.load(spec))
    else:
        found = _of_path(spec)
    if not len(found.splits.get("train", ())):
        raise ValueError(f"data spec {spec.text!r} has no training images: name a file or folder after train")
    return ImageData(found.source, found.digest, found.classes, _completed(found.splits))


def _completed(given: dict[str, LabelledImages]) -> dict[str, LabelledImages]:
    if "validation" in given:
        given = {"test": given["validation"], **given}
    missing = [split for split in SPLITS if split not in given]
    train = given["train"]
    order = np.random.default_rng(0).permutation(len(train))
    share = int(_SHARE * len(train))
    cut = {split: train.take(np.sort(order[i * share : (i + 1) * share])) for i, split in enumerate(missing)}
    rest = train.take(np.sort(order[len(missing) * share :])) if missing else train
    return {**given, "train": rest, **cut}


def _of_path(spec: Spec) -> ImageData:
    path = spec.path
    files = [file for file in files_under(path) if kind_of_file(file) == "images"]
    if not files:
        raise ValueError(f"data spec {spec.text!r} contains no images: give {KINDS['images']}")
    packed = [file for file in files if is_idx(file) or suffix(file) == ".npz"]
    if not packed:
        return _of_folder(spec, files)
    groups = by_split(packed, path) or {"train": packed}
    read = _read_idx_pair if is_idx(packed[0]) else _read_npz_files
    splits = {split: read(group) for split, group in groups.items()}
    channels = sorted({part.images[0].shape[-1] for part in splits.values()})
    if len(channels) > 1:
        raise ValueError(f"data spec {spec.text!r} has splits with images of {channels[0]} and {channels[1]} channels")
    count = 1 + max(int(part.labels.max(initial=0)) for part in splits.values())
    return ImageData(spec.text, digest_of(packed, path), [str(i) for i in range(count)], splits)


def _of_folder(spec: Spec, files: list[Path]) -> ImageData:
    root = spec.path
    if any(file.parent == root or file == root for file in files):
        raise ValueError(f"data spec {spec.text!r}: an image folder needs a subfolder for each of its classes")
    folders = {file.parent for file in files}
    inner = next((folder for folder in sorted(folders) if folders & set(folder.parents)), None)
    if inner is not None:
        raise ValueError(
            f"data spec {spec.text!r}: {inner.relative_to(root)} is in a folder that also contains images, so its "
            "class is unclear: the folder of a class must not contain other folders of images"
        )
    # only folders above that of a class name a split: a class may be called train
    above = by_split(sorted({folder.parent for folder in folders}), root)
    groups = {split: [f for f in files if f.parent.parent in said] for split, said in above.items()}
    groups = groups or {"train": files}
    classes = sorted({file.parent.name for file in groups.get("train", [])})
    if len(classes) < 2:
        raise ValueError(f"data spec {spec.text!r} has training images of {len(classes)} classes: give at least two")
    if all(map(split_word, classes)):
        raise ValueError(
            f"data spec {spec.text!r} has images directly in folders {', '.join(classes)}, which name splits, not "
            "classes: put them into a subfolder per class, as in train/CLASS"
        )
    number = {name: i for i, name in enumerate(classes)}
    splits = {}
    colour = _any_colour(len(groups["train"]), lambda i: _open(groups["train"][i]))
    for split, group in groups.items():
        unknown = sorted({file.parent.name for file in group} - number.keys())
        if unknown:
            raise ValueError(f"data spec {spec.text!r}: class {unknown[0]!r} is in {split} but not in train")
        labels = np.array([number[file.parent.name] for file in group], np.int64)
        splits[split] = LabelledImages(Files(group, colour), labels)
    # names and sizes instead of the bytes: a folder of images may be too large to hash
    names = "\n".join(f"{file.relative_to(root)} {file.stat().st_size}" for file in files)
    digest = hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()
    shown = [name.encode(errors="replace").decode() for name in classes]  # names that are not UTF-8 cannot be printed
    return ImageData(spec.text, digest, shown, splits)


def _of_hub(spec: Spec, found: dict[str, Dataset]) -> ImageData:
    datasets = require("datasets")
    if not len(found.get("train", ())):
        raise ValueError(f"data spec {spec.text!r} has splits {', '.join(found)}, but no train split with images")
    features = found["train"].features
    image = next(n for n, f in features.items() if isinstance(f, datasets.Image))
    label = next(n for n, f in features.items() if isinstance(f, datasets.ClassLabel))
    splits = {}
    colour = _any_colour(len(found["train"]), lambda i: found["train"][i][image])
    for split in SPLITS:
        if split in found:
            labels = np.array(found[split][label], np.int64)
            if (labels >= 0).all():  # hidden test sets have labels −1
                splits[split] = LabelledImages(Rows(found[split], image, colour), labels)
    prints = "/".join(str(rows._fingerprint) for rows in found.values())
    return ImageData(spec.text, hashlib.sha256(prints.encode()).hexdigest(), list(features[label].names), splits)


_GREY = ("1", "L", "I", "F", "I;16")


def _any_colour(count: int, image: Callable[[int], Image]) -> bool:
    """Whether any of the images is in colour: then all are read in colour."""
    some = np.linspace(0, count - 1, min(count, _LOOKED_AT)).round().astype(int).tolist()
    return any(image(index).mode not in _GREY for index in some)


class Files(Sequence[NDArray[np.uint8]]):
    """Image files that are opened on access."""

    def __init__(self, files: list[Path], colour: bool) -> None:
        self.files, self.colour = files, colour

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        return _pixels(_open(self.files[index]), self.colour, str(self.files[index]))


class Rows(Sequence[NDArray[np.uint8]]):
    """The image column of a hub dataset, decoded on access."""

    def __init__(self, rows: Dataset, column: str, colour: bool) -> None:
        self.rows, self.column, self.colour = rows, column, colour

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return _pixels(self.rows[int(index)][self.column], self.colour, f"image {index} of the hub")


class Chosen(Sequence[NDArray[np.uint8]]):
    """A subset of a sequence of images."""

    def __init__(self, images: Sequence[NDArray[np.uint8]], indices: NDArray[np.int64]) -> None:
        self.images, self.indices = images, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: Any) -> Any:
        return self.images[int(self.indices[index])]


def _open(file: Path) -> Image:
    pillow = require("PIL.Image")
    try:
        image: Image = pillow.open(file)
        image.load()
    except Exception as error:  # every decoder has its own errors for damaged files
        raise ValueError(f"{file} cannot be read as an image ({error}): replace or remove it") from error
    return image


def _pixels(image: Image, colour: bool, where: str) -> NDArray[np.uint8]:
    """Pixels of 8 bits: the upper ones of 16. Pillow would turn all values above 255 into white."""
    if image.mode in ("I", "F"):
        raise ValueError(f"{where} has pixels of 32 bits, whose scale is unknown: save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):
        image = require("PIL.Image").fromarray((np.asarray(image) >> 8).astype(np.uint8))
    pixels = np.asarray(image.convert("RGB" if colour else "L"))
    return pixels if colour else pixels[..., None]


def _read_npz_files(files: list[Path]) -> LabelledImages:
    parts = [_read_npz(file) for file in files]
    shapes = {images.shape[1:] for images, _ in parts}
    if len(shapes) > 1:
        raise ValueError(f"{files[0].parent}: npz files with different image sizes {sorted(shapes)}")
    return LabelledImages(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]))


def _read_npz(file: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = read_npz(file, ("x", "y"), "x, uint8 [N, H, W, C], and y, [N]")
    return _checked(file, images, labels)


def read_npz(file: Path, names: Sequence[str], needs: str) -> list[NDArray[Any]]:
    """Arrays of an npz file by name, without pickle; ``needs`` says in error messages what the file must contain."""
    try:
        with np.load(file, allow_pickle=False) as found:
            _check_npz(found.zip)
            arrays = [found[name] for name in names]
    except Exception as error:  # zip, compression and numpy each have their own errors for damaged files
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{file} cannot be read: {said}. It must contain {needs}") from error
    return arrays


def _check_npz(archive: zipfile.ZipFile) -> None:
    """Raises a ValueError if an array's header says more bytes than follow it: NumPy makes the array, then reads."""
    for entry in archive.infolist():
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(
                f"{printable(entry.filename)} is compressed in another way than numpy.savez_compressed does"
            )
        with archive.open(entry) as array:
            version = np.lib.format.read_magic(array)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(array)
            follow = min(entry.file_size, _DEFLATED * entry.compress_size) - array.tell()
        if not dtype.hasobject and math.prod(shape) * dtype.itemsize > follow:
            raise ValueError(f"{printable(entry.filename)} says shape {shape} of {dtype}, but {follow} bytes follow")


def _checked(file: Path, images: Any, labels: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images = images[..., None] if images.ndim == 3 else images
    fits = images.ndim == 4 and images.shape[-1] in (1, 3) and labels.shape == images.shape[:1]
    if not fits or images.dtype != np.uint8 or labels.dtype.kind not in "iu" or not images.size:
        raise ValueError(
            f"{file}: images {images.dtype} {images.shape} and labels {labels.dtype} {labels.shape} do not fit: "
            "they must be uint8 [N, H, W, C], C being 1 or 3, and N integers"
        )
    if labels.min() < 0 or labels.max() >= _MOST_CLASSES:
        raise ValueError(
            f"{file}: labels from {labels.min()} to {labels.max()}; classes must be from 0 to {_MOST_CLASSES - 1}"
        )
    return images, labels.astype(np.int64)


def _read_idx_pair(files: list[Path]) -> LabelledImages:
    arrays = {file: read_idx(file) for file in files}
    images = [file for file, array in arrays.items() if array.ndim >= 3]
    labels = [file for file, array in arrays.items() if array.ndim == 1]
    if len(images) != 1 or len(labels) != 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"idx files {names}: each split needs one file of images and one of labels")
    return LabelledImages(*_checked(images[0], arrays[images[0]], arrays[labels[0]]))


def read_idx(file: Path) -> NDArray[np.uint8]:
    """Reads an idx file of bytes: 0, 0, 8, the number of dimensions, each size as four bytes, then the content."""
    try:
        with open_packed(file) as handle:
            content = handle.read()
    except (*DAMAGED, OSError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if len(content) < 4 or content[:3] != b"\0\0\x08" or len(content) < 4 + 4 * content[3]:
        raise ValueError(f"{file} is not an idx file of bytes: it begins with {content[:4]!r}")
    shape = struct.unpack_from(f">{content[3]}I", content, 4)
    begin = 4 + 4 * content[3]
    if len(shape) > _MOST_DIMENSIONS or len(content) - begin != math.prod(shape):
        raise ValueError(f"{file}: its header says {shape}, but {len(content) - begin} bytes follow")
    return np.frombuffer(content, np.uint8, offset=begin).reshape(shape)


def _hash(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
