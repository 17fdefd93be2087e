"""Pairs of texts: read, split, encoded, padded and refused."""

import json

import pytest
import torch

from outeffhop.lab.data import batches, describe, prepare
from outeffhop.lab.data.builtin import topics
from outeffhop.lab.data.tokenizer import train_tokenizer

PAIRS = [(f"number {i} " + "and more " * (i % 5), f"{i} zahlen") for i in range(40)]


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(iter(topics()), 400)


@pytest.fixture
def folder(tmp_path):
    at = tmp_path / "pairs"
    at.mkdir()
    (at / "train.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    (at / "valid.jsonl").write_text("\n".join(json.dumps({"source": a, "target": b}) for a, b in PAIRS[:3]) + "\n\n")
    return at


def test_pairs_are_read_by_split(folder, trained):
    data = prepare(folder, "seq2seq", tokenizer=trained, length=64)
    assert (len(data.train), len(data.validation), len(data.test)) == (38, 3, 2)
    for split in ("train", "validation", "test"):
        for sample in getattr(data, split):
            pair = tuple(trained.decode(sample[name], skip_special_tokens=True) for name in ("input_ids", "labels"))
            assert pair in PAIRS
    held = {tuple(s["labels"].tolist()) for s in data.test}
    assert not held & {tuple(s["labels"].tolist()) for s in data.train}
    found = describe(folder)
    assert (found["kind"], found["tasks"]) == ("pairs", ["seq2seq"])
    assert found["samples"][1].startswith("number")


def test_a_batch_is_padded(folder, trained):
    data = prepare(folder, "seq2seq", tokenizer=trained, length=64)
    samples = [data.validation[i] for i in range(3)]
    batch = next(batches(data.validation, data.eval_collate, 3))
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    assert lengths.unique().numel() == 3
    assert batch["attention_mask"].sum(1).equal(lengths)
    for row, sample in enumerate(samples):
        real = batch["attention_mask"][row].bool()
        assert batch["input_ids"][row][real].equal(sample["input_ids"])
        assert (batch["input_ids"][row][~real] == trained.pad_token_id).all()
        assert batch["labels"][row][batch["labels"][row] != -100].equal(sample["labels"])
    with pytest.raises(ValueError, match="samples is empty"):
        data.collate([])


def test_long_texts_are_cut(folder, trained):
    data = prepare(folder, "seq2seq", tokenizer=trained, length=9)
    assert max(len(s["input_ids"]) for s in data.train) == 4
    assert max(len(s["labels"]) for s in data.train) == 5
    assert all(s["labels"][-1] == trained.eos_token_id for s in data.train)


def test_a_tokenizer_can_be_trained_on_pairs(folder, tmp_path):
    data = prepare(folder, "seq2seq", vocab_size=280, cache_dir=tmp_path)
    assert len(data.tokenizer) <= 280
    assert data.changes["vocab_size"] == len(data.tokenizer)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.tsv", "no tab"),
        ("a.tsv", "one\ttwo\tthree"),
        ("a.tsv", "one\t "),
        ("a.jsonl", '{"source": "one"}'),
        ("a.jsonl", '{"source": "one", "target": 2}'),
        ("a.jsonl", "[1, 2]"),
        ("a.jsonl", '{"source'),
    ],
)
def test_a_wrong_line_is_named(name, line, tmp_path, trained):
    good = "a\tb" if name.endswith("tsv") else '{"source": "a", "target": "b"}'
    (tmp_path / name).write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(ValueError, match=f"{name}, line 2: must be "):
        prepare(tmp_path / name, "seq2seq", tokenizer=trained)


def test_too_few_pairs(tmp_path, trained):
    (tmp_path / "a.tsv").write_text("a\tb\nc\td\n")
    with pytest.raises(ValueError, match="2 training pairs: give more than 2"):
        prepare(tmp_path, "seq2seq", tokenizer=trained)
    with pytest.raises(ValueError, match="contains pairs, but task 'mlm' needs text"):
        prepare(tmp_path, "mlm", tokenizer=trained)
