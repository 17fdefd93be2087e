"""Random pictures, and idx files of them."""

import gzip
import struct

import numpy as np

RANDOM = np.random.default_rng(0)


def pictures_of(number, size=6, channels=3, classes=3):
    shape = (number, size, size, channels)
    return RANDOM.integers(0, 256, shape, dtype=np.uint8), np.arange(number) % classes


def write_idx(file, array):
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def write_idx_pair(folder, prefix, images, labels, ending=""):
    write_idx(folder / f"{prefix}-images-idx3-ubyte{ending}", images)
    write_idx(folder / f"{prefix}-labels-idx1-ubyte{ending}", labels)
