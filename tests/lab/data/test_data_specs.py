"""What a spec names, what a path holds, and what is said when neither is so."""

import os

import numpy as np
import pytest
from PIL import Image

from outeffhop.lab.data import describe, prepare
from outeffhop.lab.data.files import by_split, files_under, lines, suffix
from outeffhop.lab.data.specs import BUILTIN, kind_of_path, parse
from outeffhop.metrics import TASKS


def test_the_three_ways_to_name_data(tmp_path):
    assert (parse("builtin:text").where, parse("builtin:text").name) == ("builtin", "text")
    assert (parse("hub:wikitext/wikitext-2-v1").where, parse("hub:a/b/").name) == ("hub", "a/b")
    assert parse(str(tmp_path)).path == tmp_path


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        ("builtin:imges", "did you mean 'images'"),
        ("builtin-text", "did you mean 'builtin:text'"),
        ("hub:", "hub:NAME"),
        ("", "is empty"),
    ],
)
def test_a_wrong_spec_is_told_the_nearest_right_one(spec, hint):
    with pytest.raises(ValueError, match=hint):
        parse(spec)


def test_a_wrong_path_is_told_its_nearest_neighbour(tmp_path):
    (tmp_path / "prose.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no such path; did you mean '.*prose\.txt'"):
        parse(str(tmp_path / "prosa.txt"))


def test_kind_by_content(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 100)
    assert kind_of_path(tmp_path) == "text"
    (tmp_path / "b.csv").write_text("date,x\n" + "1,2\n" * 100)
    assert kind_of_path(tmp_path) == "series"
    assert kind_of_path(tmp_path, wanted=("text",)) == "text"
    np.savez(tmp_path / "bags.npz", X=np.zeros((500, 9)), bag=np.ones(500), y=np.zeros(1))
    assert kind_of_path(tmp_path / "bags.npz") == "bags"
    np.savez(tmp_path / "pictures.npz", x=np.zeros((50, 9, 9, 1), np.uint8), y=np.zeros(50, int))
    assert kind_of_path(tmp_path / "pictures.npz") == "images"


def test_nothing_usable(tmp_path):
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    (tmp_path / ".hidden.txt").write_text("not seen")
    with pytest.raises(ValueError, match="contains no file that can be read as data"):
        prepare(str(tmp_path), "mlm")


@pytest.mark.parametrize(
    ("kind", "task"), [(kind, task) for kind in BUILTIN for task in TASKS if kind not in TASKS[task][0]]
)
def test_the_wrong_kind_for_a_task_is_refused_with_a_remedy(kind, task):
    needed = " or ".join(TASKS[task][0])
    with pytest.raises(
        ValueError, match=f"'builtin:{kind}' contains {kind}, but task '{task}' needs {needed}.*builtin"
    ):
        describe(f"builtin:{kind}", task)


def test_unknown_task():
    with pytest.raises(ValueError, match="task='forcasting' is unknown; did you mean 'forecasting'"):
        prepare("builtin:series", "forcasting")


def test_split_names(tmp_path):
    names = ["wiki.train.tokens.xz", "prose_valid.txt", "t10k-images-idx3-ubyte.gz", "SOURCE.txt", "latest.txt"]
    found = by_split([tmp_path / name for name in names], tmp_path)
    assert {split: [p.name for p in files] for split, files in found.items()} == {
        "train": ["wiki.train.tokens.xz"],
        "validation": ["prose_valid.txt"],
        "test": ["t10k-images-idx3-ubyte.gz"],
    }
    only_test = by_split([tmp_path / "data_batch_1.npz", tmp_path / "test_batch.npz"], tmp_path)
    assert [p.name for p in only_test["train"]] == ["data_batch_1.npz"]
    assert by_split([tmp_path / "val" / "a.txt"], tmp_path)["validation"]
    assert by_split([tmp_path / "a.txt"], tmp_path) == {}


def test_suffix_under_packing(tmp_path):
    assert suffix(tmp_path / "A.TXT.xz") == ".txt"
    assert suffix(tmp_path / "a.csv") == ".csv"


def test_bytes_that_are_no_text_are_named(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"fine\nna\xefve\n")
    with pytest.raises(ValueError, match=r"bad\.txt is not UTF-8: byte 7"):
        list(lines(bad))
    bad.write_bytes(b"fine\nzero \0 byte")
    with pytest.raises(ValueError, match=r"bad\.txt is not text: a zero byte at byte 10"):
        list(lines(bad))


@pytest.mark.parametrize("packing", ["gz", "xz"])
def test_a_packed_file_cut_short_is_named(tmp_path, packing):
    import gzip
    import lzma

    whole = {"gz": gzip, "xz": lzma}[packing].compress(np.random.default_rng(0).bytes(9000).hex().encode())
    bad = tmp_path / f"bad.txt.{packing}"
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=rf"bad\.txt\.{packing} is damaged or cut short"):
        list(lines(bad))
    bad.write_bytes(b"not packed at all")
    with pytest.raises(ValueError, match="damaged"):
        list(lines(bad))


def test_links_to_folders_are_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("x")
    data = tmp_path / "data"
    (data / "inside").mkdir(parents=True)
    (data / "a.txt").write_text("x")
    (data / "train").symlink_to(tmp_path / "elsewhere")
    (data / ".hidden").symlink_to(tmp_path / "elsewhere")
    (data / "gone").symlink_to(tmp_path / "nowhere")
    # links that lead back would be walked through without end
    (data / "itself").symlink_to(data)
    (data / "inside" / "up").symlink_to(tmp_path)
    (tmp_path / "elsewhere" / "back").symlink_to(data)
    assert files_under(data) == [data / "a.txt", data / "train" / "b.txt"]


def test_a_packed_file_beside_its_content_is_left_out(tmp_path):
    for name in ("a.txt", "a.txt.gz", "b.txt.xz", "train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"):
        (tmp_path / name).write_bytes(b"x")
    assert [file.name for file in files_under(tmp_path)] == ["a.txt", "b.txt.xz", "train-images-idx3-ubyte"]


def test_a_path_may_be_a_path(tmp_path):
    (tmp_path / "a.txt").write_text("line\n" * 100)
    assert describe(tmp_path / "a.txt") == describe(str(tmp_path / "a.txt"))
    data = prepare(tmp_path / "a.txt", "clm", length=3, vocab_size=261, cache_dir=tmp_path / "cache")
    assert data.about["source"] == str(tmp_path / "a.txt")


def test_names_that_are_not_utf_8(tmp_path):
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        os.mkdir(folder)
    except OSError:
        pytest.skip("this file system takes names of UTF-8 alone")
    (tmp_path / "b").mkdir()
    for i in range(20):
        with open((folder, os.fsencode(tmp_path / "b"))[i % 2] + b"/%d.png" % i, "wb") as file:
            Image.new("L", (4, 4), i).save(file, "png")
    assert describe(tmp_path)["classes"] == ["b", "caf?"]
    with open(folder + b"/\xe9.txt", "w") as file:
        file.write("line\n" * 100)
    assert describe(tmp_path, "clm")["splits"]["train"]["characters"] == 450
