"""Text as it is read: documents, splits, pieces."""

import gzip
import lzma
from itertools import chain

import pytest

import outeffhop.lab.data.corpus as corpus_module
from outeffhop.lab.data.builtin import topics
from outeffhop.lab.data.corpus import SEPARATOR, load_text, pieces
from outeffhop.lab.data.specs import parse


def documents(corpus, split):
    """The documents of a split, put together again from their pieces."""
    found, held = [], ""
    for piece, ends in pieces(corpus.splits[split]()):
        held += piece
        if ends:
            found.append(held)
            held = ""
    assert held == ""
    return found


def load(path):
    return load_text(parse(str(path)))


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_split_files_are_read_as_named(tmp_path, packing):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[packing]
    for name, content in {"train": "one\n\ntwo", "valid": "three", "test": "four é"}.items():
        (tmp_path / f"wiki.{name}.tokens{packing}").write_bytes(pack(content.encode()))
    (tmp_path / "SOURCE.txt").write_text("not part of it")
    corpus = load(tmp_path)
    found = {split: documents(corpus, split) for split in corpus.splits}
    assert found == {"train": ["one\n\ntwo"], "validation": ["three"], "test": ["four é"]}


def test_separator_lines_end_documents_and_empty_ones_vanish(tmp_path):
    file = tmp_path / "a.train.txt"
    file.write_text(f"\n\na\nb\n{SEPARATOR}\n{SEPARATOR}\n \nc {SEPARATOR} inside\n{SEPARATOR}\n")
    (tmp_path / "a.valid.txt").write_text("v")
    (tmp_path / "a.test.txt").write_text("t")
    assert documents(load(tmp_path), "train") == ["a\nb", f"c {SEPARATOR} inside"]


def test_many_documents_are_split_whole(tmp_path):
    all_of_them = [f"document {i}\n" + "x" * (i % 7 * 10) for i in range(200)]
    (tmp_path / "all.txt").write_text(f"\n{SEPARATOR}\n".join(all_of_them))
    corpus = load(tmp_path)
    parts = {split: documents(corpus, split) for split in corpus.splits}
    assert sorted(chain(*parts.values())) == sorted(d.strip("\n") for d in all_of_them)
    size = sum(map(len, all_of_them))
    for split in ("validation", "test"):
        assert 0.04 < sum(map(len, parts[split])) / size < 0.06
    assert {split: documents(load(tmp_path), split) for split in parts} == parts


def test_one_document_is_split_by_position(tmp_path):
    (tmp_path / "one.txt").write_text("".join(f"line {i:04}\n" for i in range(1000)))
    corpus = load(tmp_path / "one.txt")
    parts = [documents(corpus, split)[0].split("\n") for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [900, 50, 50]
    assert list(chain(*parts)) == [f"line {i:04}" for i in range(1000)]


def test_only_what_is_missing_is_cut_from_train(tmp_path):
    (tmp_path / "train.txt").write_text("".join(f"line {i}\n" for i in range(100)))
    (tmp_path / "test.txt").write_text("given")
    corpus = load(tmp_path)
    assert documents(corpus, "test") == ["given"]
    train, validation = documents(corpus, "train")[0], documents(corpus, "validation")[0]
    assert (train + "\n" + validation).split("\n") == [f"line {i}" for i in range(100)]


def test_the_digest_is_of_the_content(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("some text\n" * 50)
    first = load(file).digest
    assert load(file).digest == first
    file.write_text("some texts\n" * 50)
    assert load(file).digest != first


def test_pieces_put_together_are_the_document(tmp_path, monkeypatch):
    monkeypatch.setattr("outeffhop.lab.data.corpus._PIECE", 50)
    content = "".join(f"{'  ' * (i % 3)}line {i}\n{chr(10) * (i % 4)}" for i in range(200)).rstrip("\n")
    (tmp_path / "a.train.txt").write_text(content)
    (tmp_path / "a.valid.txt").write_text("v")
    (tmp_path / "a.test.txt").write_text("t")
    corpus = load(tmp_path)
    assert len(list(pieces(corpus.splits["train"]()))) > 20
    assert documents(corpus, "train") == [content]


@pytest.mark.parametrize("content", ["", "\n \n", f"{SEPARATOR}\n"])
def test_empty_text_is_refused(tmp_path, content):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match="has no text"):
        load(tmp_path)


def test_text_is_counted_only_when_a_split_is_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n" * 50)
    passes = []
    counting = corpus_module._sizes
    monkeypatch.setattr(corpus_module, "_sizes", lambda stream: passes.append(1) or counting(stream))
    corpus = load(tmp_path)
    assert not passes
    whole = "".join(text for split in ("train", "validation", "test") for text in documents(corpus, split))
    assert whole.count("some text") == 50
    assert passes == [1]


def test_no_training_text_is_refused(tmp_path):
    (tmp_path / "a.test.txt").write_text("x")
    with pytest.raises(ValueError, match="no training text"):
        load(tmp_path)


def test_topics_hold_each_passage_once():
    corpus = load_text(parse("builtin:text"))
    assert sum(corpus.count(split)[0] for split in corpus.splits) == len(topics())
    parts = {split: "\n\n".join(documents(corpus, split)) for split in corpus.splits}
    for split in ("validation", "test"):
        assert 0.03 < len(parts[split]) / sum(map(len, parts.values())) < 0.08
        passages = [p for p in parts[split].split("\n\n") if len(p) > 80]
        repeated = sum(len(p) for p in passages if p in parts["train"])
        assert repeated < 0.02 * len(parts[split])


def test_a_file_of_windows_reads_as_any_other(tmp_path):
    for name, content in {"train": "Title\n\nsome text\n", "valid": "v", "test": "t"}.items():
        (tmp_path / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + content.replace("\n", "\r\n").encode())
    corpus = load(tmp_path)
    assert documents(corpus, "train") == ["Title\n\nsome text"]
    assert corpus.count("train") == (1, len("Title\n\nsome text\n"))


def test_a_separator_after_a_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_bytes(f"\ufeff{SEPARATOR}\n".encode() + b"line\n" * 100)
    assert documents(load(tmp_path), "train")[0].startswith("line\nline")


def test_a_text_of_one_line_is_split_too(tmp_path):
    content = " ".join(f"word{i}" for i in range(60_000))
    (tmp_path / "text8.txt").write_text(content)
    corpus = load(tmp_path)
    parts = [documents(corpus, split)[0] for split in ("train", "validation", "test")]
    assert "".join(parts) == content
    assert all(0.03 < len(part) / len(content) < 0.07 for part in parts[1:])
    assert max(len(piece) for piece, _ in pieces(corpus.splits["train"]())) < 140_000


def test_a_text_that_lies_there_packed_as_well_is_read_once(tmp_path):
    for i in range(30):
        content = f"document {i}\n".encode() * 5
        (tmp_path / f"{i}.txt").write_bytes(content)
        (tmp_path / f"{i}.txt.gz").write_bytes(gzip.compress(content))
    corpus = load(tmp_path)
    found = [document for split in corpus.splits for document in documents(corpus, split)]
    assert len(found) == len(set(found)) == 30
