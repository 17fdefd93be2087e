"""NaN in data: refused by file and place, before anything is trained on it.

A loss, weights or activations that become NaN in training are in tests/lab/training/test_train.py; checkpoints with NaN
in tests/models/test_loading.py.
"""

import csv

import numpy as np
import pytest
import torch
from PIL import Image

from outeffhop.cli.main import main
from outeffhop.lab.data import load_bags, prepare
from outeffhop.lab.training import RunFolder


def series(path, bad, row=250, column=1):
    with open(path, "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["date", "x", "y"])
        for i in range(400):
            line = [f"2020-01-{i}", np.sin(i / 9), np.cos(i / 7)]
            if i == row:
                line[column] = bad
            table.writerow(line)
    return path


@pytest.mark.parametrize("bad", ["nan", "NaN", "inf", "-Infinity", "", "NULL", "1e999"])
def test_a_series(bad, tmp_path, capsys):
    file = series(tmp_path / "a.csv", bad)
    arguments = ["train", "--model", "stanhop", "--data", str(file), "--out", str(tmp_path / "run")]
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"outeffhop: {file}, row 252, column 'x': {bad!r} is not a finite number; fill or drop the row\n"
    )
    assert not RunFolder(tmp_path / "run").exists


@pytest.mark.parametrize("large", ["1e200", "-1e308"])
def test_a_series_whose_scale_overflows(large, tmp_path):
    """Finite itself, but its square is not: scaled by it, all other rows would become 0 or NaN."""
    with pytest.raises(ValueError, match=r"a\.csv'.*'x'.*too large"):
        prepare(str(series(tmp_path / "a.csv", large)), "forecasting", in_len=10, out_len=5)


def test_large_numbers_that_can_be_scaled(tmp_path):
    data = prepare(str(series(tmp_path / "a.csv", "1e100")), "forecasting", in_len=10, out_len=5)
    assert all(torch.isfinite(value).all() for sample in data.train for value in sample.values())


def test_pictures_of_floats(tmp_path):
    """npz files are of bytes, which have no NaN; others are refused, not rounded."""
    images = np.random.default_rng(0).random((20, 8, 8, 1), np.float32)
    images[3, 2, 1] = np.nan
    np.savez(tmp_path / "train.npz", x=images, y=np.arange(20) % 2)
    with pytest.raises(ValueError, match=r"train\.npz: images float32 .* must be uint8"):
        prepare(str(tmp_path), "classification")


def folder_of(tmp_path, pixels, kind):
    for i in range(20):
        folder = tmp_path / f"class{i % 2}"
        folder.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i}.png", format=kind)
    return prepare(str(tmp_path), "classification", mean=(0.0,), std=(1.0,))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_folder_of_pictures_of_32_bits(dtype, tmp_path):
    """A tiff by another name: Pillow would cut it to bytes, NaN and all."""
    pixels = np.full((8, 8), 1000, dtype)
    if dtype == np.float32:
        pixels[2, 1] = np.nan
    with pytest.raises(ValueError, match=r"\.png has pixels of 32 bits"):
        folder_of(tmp_path, pixels, "tiff").train[0]


def test_a_folder_of_pictures_of_16_bits(tmp_path):
    pixels = (np.arange(64, dtype=np.uint16) * 1024).reshape(8, 8)
    found = folder_of(tmp_path, pixels, "png").train[0]["pixel_values"]
    assert torch.equal((found[0] * 255).round().int(), torch.arange(64).mul(4).reshape(8, 8).int())


def test_bags(tmp_path):
    features = np.ones((6, 3))
    features[4, 2] = np.nan
    np.savez(tmp_path / "a.npz", X=features, bag=[1, 1, 2, 2, 3, 3], y=[0, 1, 1])
    with pytest.raises(ValueError, match=r"a\.npz: X\[4, 2\] is not finite"):
        load_bags(tmp_path / "a.npz")
