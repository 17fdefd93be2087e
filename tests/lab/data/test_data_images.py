"""Pictures from every form they come in, and what is done to them."""

import json
import shutil
import struct

import numpy as np
import pytest
import torch
from picture_files import pictures_of, write_idx, write_idx_pair
from PIL import Image

from outeffhop.lab.data import batches, prepare
from outeffhop.lab.data.augment import AugmentedBatch
from outeffhop.lab.data.image_files import LabelledImages, load_images
from outeffhop.lab.data.images import ImageSet, moments
from outeffhop.lab.data.specs import parse


def back(sample, data):
    """The pixels of a sample as they were, uint8 [H, W, C]."""
    how = data.about["preprocessing"]
    mean, std = torch.tensor(how["mean"])[:, None, None], torch.tensor(how["std"])[:, None, None]
    return ((sample["pixel_values"] * std + mean) * 255).round().byte().permute(1, 2, 0).numpy()


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files(tmp_path, ending):
    train, train_labels = pictures_of(40, channels=1)
    test, test_labels = pictures_of(9, channels=1)
    write_idx_pair(tmp_path, "train", train[..., 0], train_labels, ending)
    write_idx_pair(tmp_path, "t10k", test[..., 0], test_labels, ending)
    data = prepare(str(tmp_path), "classification")
    assert (len(data.train), len(data.validation), len(data.test)) == (36, 4, 9)
    assert data.changes == {"num_labels": 3, "image_size": 6, "num_channels": 1}
    for i in range(9):
        assert np.array_equal(back(data.test[i], data), test[i])
        assert data.test[i]["labels"] == test_labels[i]


def test_npz_files(tmp_path):
    parts = [pictures_of(20) for _ in range(3)]
    for name, (x, y) in zip(("data_batch_1", "data_batch_2", "test_batch"), parts, strict=True):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y.astype(np.uint8))
    data = prepare(str(tmp_path), "classification")
    assert (len(data.train), len(data.validation), len(data.test)) == (36, 4, 20)
    seen = {back(sample, data).tobytes() for part in (data.train, data.validation) for sample in part}
    assert seen == {image.tobytes() for x, _ in parts[:2] for image in x}
    assert {back(sample, data).tobytes() for sample in data.test} == {image.tobytes() for image in parts[2][0]}


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_image_folder(tmp_path, mode):
    channels = 3 if mode == "RGB" else 1
    images, _ = pictures_of(12, channels=channels)
    for i, image in enumerate(images):
        folder = tmp_path / ("train" if i < 9 else "val") / ("cat", "dog", "owl")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image if channels == 3 else image[..., 0], mode=None).save(folder / f"{i:02}.png")
    data = load_images(parse(str(tmp_path)))
    assert data.classes == ["cat", "dog", "owl"]
    # all that is brought for validation is the test split too, and train stays whole
    assert [len(data.splits[s]) for s in ("train", "validation", "test")] == [9, 3, 3]
    for split in ("validation", "test"):
        for i, label in enumerate(data.splits[split].labels):
            assert np.array_equal(data.splits[split].images[i], images[9 + i])
            assert label == i
    shutil.rmtree(tmp_path / "val")
    with pytest.raises(ValueError, match="no images in validation"):
        prepare(str(tmp_path), "classification")


def test_a_class_that_train_lacks(tmp_path):
    for path in ("train/a", "train/b", "test/c"):
        (tmp_path / path).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / path / "x.png")
    with pytest.raises(ValueError, match="class 'c' is in test but not in train"):
        load_images(parse(str(tmp_path)))


def test_a_class_may_be_called_train(tmp_path):
    for name, count in {"plane": 20, "train": 20}.items():
        (tmp_path / name).mkdir()
        for i in range(count):
            Image.new("L", (4, 4), i).save(tmp_path / name / f"{i}.png")
    data = load_images(parse(str(tmp_path)))
    assert data.classes == ["plane", "train"]
    assert [len(data.splits[s]) for s in ("train", "validation", "test")] == [32, 4, 4]


@pytest.mark.parametrize("layout", ["{split}", "{name}/{split}"])
def test_folders_of_splits_are_no_classes(tmp_path, layout):
    for name in ("cat", "dog"):
        for split in ("train", "test"):
            folder = tmp_path / layout.format(name=name, split=split)
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("L", (4, 4)).save(folder / f"{name}.png")
    with pytest.raises(ValueError, match=r"folders test, train, which name splits, not classes: .* as in train/CLASS"):
        load_images(parse(str(tmp_path)))


def test_pictures_below_a_class_are_refused(tmp_path):
    for name in ("cat", "cat/kittens", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (4, 4)).save(tmp_path / name / "x.png")
    with pytest.raises(ValueError, match=r"cat.kittens is in a folder that also contains images"):
        load_images(parse(str(tmp_path)))


@pytest.mark.parametrize("modes", [["L", "RGB", "L"], ["L", "L", "RGBA"], ["1", "P", "L"], ["I;16", "L", "1"]])
def test_pictures_are_in_colour_where_one_is(tmp_path, modes):
    for name in ("test/a", "test/b", "train/a", "train/b"):
        (tmp_path / name).mkdir(parents=True)
        for i, mode in enumerate(modes if name == "train/b" else ["L"]):
            Image.new(mode, (4, 4)).save(tmp_path / name / f"{i}.png")
    data = load_images(parse(str(tmp_path)))
    channels = 1 if "I;16" in modes else 3
    assert {image.shape for part in data.splits.values() for image in part.images} == {(4, 4, channels)}


def test_splits_of_different_channels(tmp_path):
    for name, channels in {"train": 3, "test": 1}.items():
        x, y = pictures_of(20, channels=channels)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    with pytest.raises(ValueError, match="splits with images of 1 and 3 channels"):
        load_images(parse(str(tmp_path)))


def test_where_there_are_no_pictures(tmp_path):
    (tmp_path / "a.csv").write_text("date,x\n1,2\n")
    with pytest.raises(ValueError, match="contains no images: give an image folder"):
        load_images(parse(str(tmp_path)))
    with pytest.raises(ValueError, match="'builtin:text' contains text, not images"):
        load_images(parse("builtin:text"))


def test_broken_pictures_are_named(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "broken.png").write_bytes(b"\x89PNG rubbish")
    with pytest.raises(ValueError, match=r"broken\.png cannot be read as an image"):
        load_images(parse(str(tmp_path)))


def test_pictures_without_classes(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "x.png")
    for path in (tmp_path, tmp_path / "x.png"):
        with pytest.raises(ValueError, match="a subfolder for each of its classes"):
            load_images(parse(str(path)))


def test_wrong_npz(tmp_path):
    file = tmp_path / "a.npz"
    np.savez(file, x=np.zeros((3, 4, 4, 3)), y=np.zeros(3, int))
    with pytest.raises(ValueError, match=r"a\.npz: images float64 \(3, 4, 4, 3\)"):
        load_images(parse(str(file)))
    np.savez(file, pictures=np.zeros(3))
    with pytest.raises(ValueError, match=r"a\.npz cannot be read: .*x"):
        load_images(parse(str(file)))
    np.savez(file, x=np.array([{"an": "object"}], dtype=object), y=np.zeros(1, int))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_images(parse(str(file)))
    file.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match=r"a\.npz is not an npz file"):
        load_images(parse(str(file)))


def test_wrong_idx(tmp_path):
    file = tmp_path / "train-images-idx3-ubyte"
    file.write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 5) + b"abc")
    with pytest.raises(ValueError, match=r"header says \(5,\), but 3 bytes follow"):
        load_images(parse(str(tmp_path)))
    file.write_bytes(b"\0\0\x0d\x01")
    with pytest.raises(ValueError, match="is not an idx file of bytes"):
        load_images(parse(str(tmp_path)))
    write_idx(file, np.zeros((2, 4, 4)))
    with pytest.raises(ValueError, match="one file of images and one of labels"):
        load_images(parse(str(tmp_path)))


def test_the_digits_are_all_there_and_split_the_same_each_time():
    first, second = (load_images(parse("builtin:images")) for _ in range(2))
    images = np.concatenate([first.splits[s].images for s in ("train", "validation", "test")])
    assert len(images) == 1797 == len({image.tobytes() for image in images}) + _repeated(images)
    for split in first.splits:
        assert np.array_equal(first.splits[split].images, second.splits[split].images)
        assert set(first.splits[split].labels) == set(range(10))


def _repeated(images):
    return len(images) - len(np.unique(images.reshape(len(images), -1), axis=0))


def test_normalised_by_the_training_pictures_alone():
    data = prepare("builtin:images", "classification")
    pixels = torch.stack([sample["pixel_values"] for sample in data.train])
    assert pixels.mean() == pytest.approx(0.0, abs=1e-5)
    assert pixels.std(correction=0) == pytest.approx(1.0, abs=1e-5)
    held_out = torch.stack([sample["pixel_values"] for sample in data.test])
    assert abs(held_out.mean()) > 1e-4
    given = prepare("builtin:images", "classification", mean=(0.5,), std=(0.25,))
    assert given.train[0]["pixel_values"].min() == -2.0


def test_moments_by_channel():
    x, y = pictures_of(7)
    mean, std = moments(LabelledImages(x, y))
    assert mean == pytest.approx((x / 255).mean((0, 1, 2)).tolist())
    assert std == pytest.approx((x / 255).std((0, 1, 2)).tolist())
    for value in (0, 51):  # the sums of 51 / 255 are rounded
        with pytest.raises(ValueError, match="give std"):
            moments(LabelledImages(np.full((50, 8, 8, 3), value, np.uint8), np.zeros(50, np.int64)))
    x[..., 1] = 51
    with pytest.raises(ValueError, match="give std"):
        moments(LabelledImages(x, y))


def test_mean_and_std_as_arrays():
    given = prepare("builtin:images", "classification", mean=np.float32([0.5]), std=np.float32([0.25]))
    assert json.loads(json.dumps(given.about))["preprocessing"]["std"] == [0.25]


def test_resized_and_cut_square():
    wide = np.zeros((1, 4, 12, 3), np.uint8)
    wide[0, :, 4:8] = 255  # the middle third
    found = ImageSet(LabelledImages(wide, np.zeros(1, np.int64)), 4, (0.0,) * 3, (1.0,) * 3)[0]["pixel_values"]
    assert found.shape == (3, 4, 4)
    assert (found == 1).all()
    flat = np.full((1, 9, 15, 1), 51, np.uint8)
    found = ImageSet(LabelledImages(flat, np.zeros(1, np.int64)), 5, (0.0,), (1.0,))[0]["pixel_values"]
    assert found.shape == (1, 5, 5)
    torch.testing.assert_close(found, torch.full((1, 5, 5), 0.2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"augment": "ligth"}, "augment='ligth' is unknown; did you mean 'light'"),
        ({"mean": (0.1, 0.2), "std": (1.0, 1.0)}, "mean=.*1 finite numbers"),
        ({"mean": (0.1,), "std": (0.0,)}, "std="),
        ({"mean": 0.5, "std": 0.5}, "mean=0.5: must be 1 finite numbers"),
        ({"mean": ()}, "mean=.*1 finite numbers"),
        ({"image_size": 0}, "image_size=0"),
        ({"image_size": 8.5}, "image_size=8.5: must be an integer"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
    ],
)
def test_wrong_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        prepare("builtin:images", "classification", **change)


# ---- augmentation


def constant_samples(number=16, classes=16, size=16):
    """Picture i is of class i and of value i / classes everywhere."""
    value = torch.arange(number) / classes
    return [{"pixel_values": value[i].expand(3, size, size).clone(), "labels": torch.tensor(i)} for i in range(number)]


def test_soft_labels_say_what_was_mixed():
    """Of images that are their own class, the mean pixel is the mean class: for mixup and cutmix both."""
    collate = AugmentedBatch("paper", 16, (0.0,) * 3, (1.0,) * 3)
    collate._change = lambda natural: natural  # mixing alone
    kinds = set()
    for epoch in range(8):
        collate.set_epoch(epoch)
        batch = collate(constant_samples())
        soft, pixels = batch["soft_labels"], batch["pixel_values"]
        torch.testing.assert_close(soft.sum(-1), torch.ones(16))
        torch.testing.assert_close(pixels.mean((1, 2, 3)), soft @ (torch.arange(16) / 16))
        kinds.add("cut" if pixels.flatten(1).std(dim=1).max() > 1e-3 else "mixup")
        assert batch["labels"].equal(torch.arange(16))
    assert kinds == {"cut", "mixup"}


def test_label_smoothing():
    data = prepare("builtin:images", "classification", label_smoothing=0.1)
    batch = next(batches(data.train, data.collate, 8))
    expected = torch.full((8, 10), 0.01).scatter(1, batch["labels"][:, None], 0.91)
    torch.testing.assert_close(batch["soft_labels"], expected)
    assert batch["pixel_values"].equal(next(batches(data.train, data.eval_collate, 8))["pixel_values"])


@pytest.mark.parametrize("kind", ["light", "paper"])
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentation_is_drawn_from_seed_epoch_and_batch(kind, channels):
    x, y = pictures_of(8, size=16, channels=channels)
    mean, std = (0.5,) * channels, (0.3,) * channels
    samples = list(ImageSet(LabelledImages(x, y), 16, mean, std))

    def drawn(seed=0, epoch=0):
        collate = AugmentedBatch(kind, 3, mean, std, seed=seed)
        collate.set_epoch(epoch)
        return collate(samples)["pixel_values"]

    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = drawn()
    assert torch.get_rng_state().equal(state)
    torch.manual_seed(8)
    assert drawn().equal(first)
    assert not drawn(epoch=1).equal(first)
    assert not drawn(seed=1).equal(first)
    assert first.shape == (8, channels, 16, 16)
    assert first.isfinite().all()
    assert first.min() >= -0.5 / 0.3 - 1e-4
    assert first.max() <= 0.5 / 0.3 + 1e-4


def test_light_augmentation_shifts_and_never_swaps_grey_pictures():
    left = np.zeros((64, 16, 16, 1), np.uint8)
    left[:, :, :4] = 255
    samples = list(ImageSet(LabelledImages(left, np.zeros(64, np.int64)), 16, (0.0,), (1.0,)))
    found = AugmentedBatch("light", 2, (0.0,), (1.0,))(samples)
    assert "soft_labels" not in found
    assert found["pixel_values"][..., 8:].max() == 0
    assert len({picture.numpy().tobytes() for picture in found["pixel_values"]}) > 4
