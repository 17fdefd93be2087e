"""What a spec names, what a path holds, and what is said when neither is so."""

import numpy as np
import pytest

from outeffhop.data import TASKS, describe, prepare
from outeffhop.data.files import by_split, lines, suffix
from outeffhop.data.specs import BUILTIN, kind_of_path, parse


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
    assert kind_of_path(tmp_path, wanted="text") == "text"
    np.savez(tmp_path / "bags.npz", X=np.zeros((500, 9)), bag=np.ones(500), y=np.zeros(1))
    assert kind_of_path(tmp_path / "bags.npz") == "bags"
    np.savez(tmp_path / "pictures.npz", x=np.zeros((50, 9, 9, 1), np.uint8), y=np.zeros(50, int))
    assert kind_of_path(tmp_path / "pictures.npz") == "images"


def test_nothing_usable(tmp_path):
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    (tmp_path / ".hidden.txt").write_text("not seen")
    with pytest.raises(ValueError, match="holds no file that can be read as data"):
        prepare(str(tmp_path), "mlm")


@pytest.mark.parametrize(
    ("kind", "task"), [(kind, task) for kind in BUILTIN for task in TASKS if TASKS[task][0] != kind]
)
def test_the_wrong_kind_for_a_task_is_refused_with_a_remedy(kind, task):
    needed = TASKS[task][0]
    with pytest.raises(ValueError, match=f"'builtin:{kind}' holds {kind}, but task '{task}' needs {needed}: .*builtin"):
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
