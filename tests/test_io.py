"""Files and folders are written whole or not at all, and a manifest notices every change."""

import json
import math

import pytest

from outeffhop._io import (
    check_folder,
    check_manifest,
    from_plain,
    publish,
    read_json,
    remove_folder,
    to_plain,
    whole_file,
    whole_folder,
    write_json,
    write_manifest,
    write_whole,
)


def fail(*_):
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_with_its_folder_created(tmp_path):
    path = tmp_path / "new" / "file"
    write_whole(path, "first")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file_and_names_it(call, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(f"os.{call}", fail)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_any_error_inside_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with whole_file(path) as side:
            side.write_text("half")
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_when_it_is_finished(tmp_path):
    place = tmp_path / "a" / "folder"
    with whole_folder(place) as side:
        (side / "inner").mkdir()
        (side / "inner" / "file").write_text("content")
        assert not place.exists()
    assert (place / "inner" / "file").read_text() == "content"
    assert list(place.parent.iterdir()) == [place]
    with pytest.raises(RuntimeError, match="inside"), whole_folder(tmp_path / "other") as side:
        raise RuntimeError("inside")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_folder_does_not_replace_one_with_files(tmp_path):
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "mine").write_text("mine")
    (tmp_path / "side").mkdir()
    with pytest.raises(FileExistsError, match=r"written by another process, and is not overwritten: .*place"):
        publish(tmp_path / "side", tmp_path / "place")
    assert (tmp_path / "place" / "mine").read_text() == "mine"


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_that_is_removed_is_gone_or_whole(killed, tmp_path, monkeypatch):
    place = tmp_path / "place"
    remove_folder(place)  # there is none
    (place / "inner").mkdir(parents=True)
    if killed:
        monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    remove_folder(place)
    assert not place.exists()
    assert [p.name.startswith(".place.") for p in tmp_path.iterdir()] == [True] * killed


def test_a_manifest_notices_every_change(tmp_path):
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "file"
    file.write_text("content")
    write_manifest(tmp_path, {"made": "here"})
    assert check_manifest(tmp_path) == {"made": "here"}
    file.write_text("contenT")
    with pytest.raises(ValueError, match="the content of inner/file has changed"):
        check_manifest(tmp_path)
    file.write_text("conten")
    with pytest.raises(ValueError, match="inner/file has 6 bytes, not 7"):
        check_manifest(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="inner/file is missing"):
        check_manifest(tmp_path)
    for content in ("[1]", "{", '{"about": 1}', '{"about": 1, "files": {"a": 2}}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match=r"manifest\.json cannot be read"):
            check_manifest(tmp_path)


def test_json_stays_strict_and_comes_back(tmp_path):
    value = {"a": [math.inf, -math.inf, 1.5, "text", None, True], "b": {"c": (1, 2)}}
    write_json(tmp_path / "value.json", value)
    text = (tmp_path / "value.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == to_plain(value)
    assert from_plain(read_json(tmp_path / "value.json")) == {**value, "b": {"c": [1, 2]}}
    assert math.isnan(from_plain(to_plain(math.nan)))


def test_a_file_that_cannot_be_read_as_json_is_named(tmp_path):
    (tmp_path / "value.json").write_text("{")
    for name in ("value.json", "none.json"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as JSON"):
            read_json(tmp_path / name)


def test_a_folder_that_cannot_be_created_is_refused(tmp_path):
    check_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out='.*file' is a file"):
        check_folder(tmp_path / "file")
    with pytest.raises(ValueError, match=r"path='.*b' cannot be created: '.*file' is a file"):
        check_folder(tmp_path / "file" / "b", "path")
