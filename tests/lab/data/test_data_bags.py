"""Bags: from files, of images, in folds and in batches."""

import numpy as np
import pytest
import torch
from picture_files import pictures_of, write_idx_pair
from PIL import Image

from outeffhop.lab.data import Bags, collate_bags, load_bags


def write_bags(file, sizes=(3, 1, 4, 2, 5, 2), labels=(1, 0, 1, 0, 1, 0), features=4):
    bag = np.repeat(np.arange(1, len(sizes) + 1), sizes).astype(np.int32)
    values = np.random.default_rng(0).normal(3.0, 2.0, (len(bag), features))
    np.savez(file, X=values, bag=bag, y=np.array(labels, np.int8))
    return values


def test_a_file_of_bags(tmp_path):
    file = tmp_path / "fox.npz"
    values = write_bags(file)
    bags = load_bags(file)
    assert [len(bag) for bag in bags.instances] == [3, 1, 4, 2, 5, 2]
    assert bags.labels.tolist() == [1, 0, 1, 0, 1, 0]
    torch.testing.assert_close(torch.cat(bags.instances), torch.from_numpy(values).float())


def test_a_padded_batch_ignores_what_is_padding(tmp_path):
    write_bags(tmp_path / "a.npz")
    bags = load_bags(tmp_path / "a.npz")
    batch = collate_bags([bags[i] for i in range(6)])
    assert batch["instances"].shape == (6, 5, 4)
    assert batch["labels"].equal(bags.labels)
    for i, bag in enumerate(bags.instances):
        assert batch["instances"][i][~batch["key_padding_mask"][i]].equal(bag)
        assert (batch["instances"][i][batch["key_padding_mask"][i]] == 0).all()


def test_scaling_is_fitted_on_the_bags_it_is_told(tmp_path):
    write_bags(tmp_path / "a.npz")
    bags = load_bags(tmp_path / "a.npz")
    train, test = bags.take([0, 2, 4]), bags.take([1, 3, 5])
    own = torch.cat(train.scaled().instances)
    torch.testing.assert_close(own.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(own.std(0, correction=0), torch.ones(4))
    seen = torch.cat(train.instances)
    expected = (test.instances[0] - seen.mean(0)) / seen.std(0, correction=0)
    torch.testing.assert_close(test.scaled(like=train).instances[0], expected)


def test_a_feature_that_stands_still_is_not_scaled_by_rounding():
    train = Bags("", [torch.full((1000, 1), 0.1)], torch.tensor([1]))
    test = Bags("", [torch.full((3, 1), 0.2)], torch.tensor([1]))
    torch.testing.assert_close(test.scaled(like=train).instances[0], torch.full((3, 1), 0.1))


def test_folds_are_stratified_disjoint_and_seeded(tmp_path):
    labels = [1] * 20 + [0] * 30
    write_bags(tmp_path / "a.npz", sizes=[2] * 50, labels=labels)
    bags = load_bags(tmp_path / "a.npz")
    folds = list(bags.folds(10, seed=3))
    assert sorted(i for _, test in folds for i in test) == list(range(50))
    for train, test in folds:
        assert not set(train) & set(test)
        assert len(train) + len(test) == 50
        assert int(bags.labels[test].sum()) == 2
    assert list(bags.folds(10, seed=3)) == folds
    assert list(bags.folds(10, seed=4)) != folds
    with pytest.raises(ValueError, match="k=21: must be from 2 to 20"):
        list(bags.folds(21))


def test_bags_of_pictures(tmp_path):
    images, labels = pictures_of(300, size=4, channels=1, classes=10)
    write_idx_pair(tmp_path, "train", images[..., 0], labels)
    write_idx_pair(tmp_path, "t10k", images[:50, ..., 0], labels[:50])
    bags = load_bags(tmp_path, count=400, target=9, seed=5)
    by_pixels = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    for bag, label in zip(bags.instances, bags.labels, strict=True):
        inside = [by_pixels[(pixels * 255).round().byte().numpy().tobytes()] for pixels in bag]
        assert (9 in inside) == bool(label)
    sizes = torch.tensor([len(bag) for bag in bags.instances], dtype=torch.float)
    assert sizes.mean() == pytest.approx(10, abs=0.4)
    assert sizes.std() == pytest.approx(2, abs=0.3)
    assert bags.labels.sum() == 200
    again = load_bags(tmp_path, count=400, target=9, seed=5)
    assert all(a.equal(b) for a, b in zip(again.instances, bags.instances, strict=True))
    other = load_bags(tmp_path, count=400, target=9, seed=6)
    assert not all(a.shape == b.shape for a, b in zip(other.instances, bags.instances, strict=True))


def test_bags_of_the_digits_that_ship():
    bags = load_bags("builtin:images", split="test", count=10)
    assert len(bags) == 10
    assert bags[0]["instances"].shape[1] == 64
    assert 0 <= bags[0]["instances"].min() <= bags[0]["instances"].max() <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 77}, "target=77: train has images of classes"),
        ({"split": "tset"}, "did you mean 'test'"),
        ({"count": 1}, "count=1"),
        ({"mean_size": float("nan")}, "mean_size=nan"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        load_bags("builtin:images", **change)


def test_wrong_files_of_bags(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, X=np.zeros((3, 2)), bag=np.array([1, 1, 3]), y=np.array([0, 1]))
    with pytest.raises(ValueError, match="bag must name bags 1 to 2"):
        load_bags(file)
    np.savez(file, X=np.zeros((3, 2)), bag=np.array([1, 1, 2]), y=np.array([0, 7]))
    with pytest.raises(ValueError, match=r"do not fit: .* y 0 or 1"):
        load_bags(file)
    np.savez(file, X=np.full((2, 2), np.nan), bag=np.array([1, 2]), y=np.array([0, 1]))
    with pytest.raises(ValueError, match=r"X\[0, 0\] is not finite"):
        load_bags(file)
    with pytest.raises(ValueError, match="is a folder: give one"):
        load_bags(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.array([[0], [1]])}, r"y \(2, 1\) do not fit: .* y 0 or 1"),
        ({"X": np.array([["a", "b"]] * 3)}, "X <U1"),
        ({"X": np.full((3, 2), 1e300)}, r"X\[0, 0\] is not finite, or too large for float32"),
        ({"X": np.zeros((0, 2)), "bag": np.zeros(0, int), "y": np.zeros(0, int)}, "do not fit"),
    ],
)
def test_arrays_that_are_no_bags(tmp_path, change, message):
    file = tmp_path / "a.npz"
    np.savez(file, **{"X": np.zeros((3, 2)), "bag": np.array([1, 1, 2]), "y": np.array([0, 1])} | change)
    with pytest.raises(ValueError, match=message):
        load_bags(file)


def test_features_of_other_byte_order(tmp_path):
    np.savez(tmp_path / "a.npz", X=np.array([[1.5], [2.5]], ">f8"), bag=np.array([1, 2]), y=np.array([0, 1]))
    assert torch.cat(load_bags(tmp_path / "a.npz").instances).tolist() == [[1.5], [2.5]]


def test_pictures_of_different_sizes(tmp_path):
    for i in range(20):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        Image.new("L", (4 + i, 4)).save(tmp_path / "ab"[i % 2] / f"{i}.png")
    with pytest.raises(ValueError, match=r"images of sizes \(4, 4, 1\) and \(4, \d, 1\): bags need images of one size"):
        load_bags(tmp_path, target=1)
