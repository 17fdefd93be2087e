"""Tokenizers, blocks, and the tokens kept on disk, whole or rebuilt."""

import json
import multiprocessing
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from outeffhop.lab.data import prepare, tokenizer, tokens
from outeffhop.lab.data.builtin import topics
from outeffhop.lab.data.corpus import load_text, pieces
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.data.specs import parse
from outeffhop.lab.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def trained():
    return train_tokenizer(iter(topics()), 400)


def bare_bert(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "!"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def bare_byte_level(folder, special):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *letters, "he", "Ġw"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nĠ w\n")


def test_a_trained_tokenizer_gives_text_back(trained):
    sample = "Ünïcode, 東京 and\n\ttabs: </s> x_1 = 'it''s'  "
    ids = trained(sample, add_special_tokens=False)["input_ids"]
    assert trained.decode(ids) == sample
    assert len(trained) == 400
    assert trained.convert_tokens_to_ids(["<pad>", "<s>", "</s>", "<unk>", "<mask>"]) == [0, 1, 2, 3, 4]
    assert trained("a")["input_ids"][0] == trained.bos_token_id
    assert trained("a")["input_ids"][-1] == trained.eos_token_id


def test_training_is_the_same_each_time(trained):
    again = train_tokenizer(iter(topics()), 400)
    assert again.backend_tokenizer.to_str() == trained.backend_tokenizer.to_str()


def test_a_long_text_is_learned_from_pieces_spread_over_it(monkeypatch):
    corpus = load_text(parse("builtin:text"))
    monkeypatch.setattr("outeffhop.lab.data.corpus._PIECE", 1000)
    every = [piece for piece, _ in pieces(corpus.splits["train"]())]
    assert list(tokenizer._spread(corpus)) == every
    monkeypatch.setattr(tokenizer, "_ENOUGH", corpus.count("train")[1] // 10)
    assert list(tokenizer._spread(corpus)) == every[::10]


def test_a_saved_tokenizer_loads_as_it_was(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    assert found("print(x)\n")["input_ids"] == trained("print(x)\n")["input_ids"]
    assert found.all_special_ids == trained.all_special_ids


def test_bare_bert_vocabulary(tmp_path):
    bare_bert(tmp_path)
    found = load_tokenizer(tmp_path)
    assert found("Hello worlds! ??")["input_ids"] == [2, 5, 6, 7, 8, 1, 1, 3]
    assert (found.cls_token_id, found.sep_token_id, found.mask_token_id, found.pad_token_id) == (2, 3, 4, 0)


def test_bare_gpt2_vocabulary(tmp_path):
    bare_byte_level(tmp_path, ["<|endoftext|>"])
    found = load_tokenizer(tmp_path)
    assert found.convert_ids_to_tokens(found("he we")["input_ids"]) == ["he", "Ġw", "e"]
    assert found.bos_token_id == found.eos_token_id == 0
    with pytest.raises(ValueError, match="no mask_token"):
        prepare("builtin:text", "mlm", tokenizer=found, cache_dir=tmp_path)


def test_bare_opt_vocabulary_keeps_its_begin_token(tmp_path):
    bare_byte_level(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    found = load_tokenizer(tmp_path)
    assert found("he")["input_ids"] == [2, found.convert_tokens_to_ids("he")]
    assert (found.bos_token, found.eos_token, found.pad_token_id, found.cls_token_id) == ("</s>", "</s>", 1, 0)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"not a folder with a tokenizer: it must contain tokenizer\.json, vocab\.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("hello\n")
    with pytest.raises(ValueError, match=r"lacks \[PAD\], \[UNK\]"):
        load_tokenizer(tmp_path)


def test_too_small_a_vocabulary(tmp_path):
    for size in (0, 100):
        with pytest.raises(ValueError, match=f"vocab_size={size}: must be at least 261"):
            prepare("builtin:text", "clm", vocab_size=size, cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size=300\.5: must be an integer"):
        prepare("builtin:text", "clm", vocab_size=300.5, cache_dir=tmp_path)


@pytest.fixture
def corpus(tmp_path):
    """Two documents to train on, one each to hold out."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.txt").write_text(topics()[0] + "\n<|endoftext|>\nliteral </s> and <mask>\n")
    (folder / "valid.txt").write_text(topics()[1])
    (folder / "test.txt").write_text(topics()[2])
    return str(folder)


def test_blocks_are_the_documents_end_to_end(corpus, trained, tmp_path):
    data = prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=tmp_path / "cache")
    stream = []
    for document in (topics()[0], "literal </s> and <mask>"):
        ids = trained(document, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        stream += [*ids, trained.eos_token_id]
    blocks = torch.stack([data.train[i]["input_ids"] for i in range(len(data.train))])
    assert blocks.flatten().tolist() == stream[: len(stream) // 16 * 16]
    assert data.about["splits"]["train"] == {
        "samples": len(stream) // 16,
        "tokens": len(stream),
        "documents": 2,
        "dtype": "uint16",
    }
    batch = data.collate([data.train[0], data.train[1]])
    assert batch["input_ids"].equal(batch["labels"])
    assert set(batch) == {"input_ids", "labels"}  # full blocks: a mask of ones would cost the fastest kernels
    with pytest.raises(IndexError):
        data.train[len(data.train)]
    assert data.train[-1]["input_ids"].equal(blocks[-1])


def test_mlm_blocks_are_wrapped(corpus, trained, tmp_path):
    plain = prepare(corpus, "clm", tokenizer=trained, length=14, cache_dir=tmp_path)
    wrapped = prepare(corpus, "mlm", tokenizer=trained, length=16, cache_dir=tmp_path)
    assert len(plain.train) == len(wrapped.train)
    for i in range(len(plain.train)):
        ids = wrapped.train[i]["input_ids"].tolist()
        assert ids == [trained.cls_token_id, *plain.train[i]["input_ids"].tolist(), trained.sep_token_id]
    assert wrapped.changes == {"vocab_size": 400, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    json.dumps(wrapped.about)


@pytest.mark.parametrize("style", ["topics", "wikitext", "blank lines", "one line", "ends in a space"])
def test_cutting_a_document_changes_no_token(corpus, tmp_path, monkeypatch, style):
    spaces = ["\n\n", " \n", "\n\n\n", "\n ", "\n\t", " \n\n"] * 100
    trained = train_tokenizer(iter([topics()[0], *spaces]), 300)  # knows line breaks in a row as one token
    assert "ĊĊ" in trained.get_vocab()
    passages = topics()[0].split("\n")
    rewritten = {
        "topics": topics()[0],
        "wikitext": " \n".join(f" {line.strip()}" for line in passages),
        "blank lines": "".join(
            line + " " * (i % 2) + "\n" * (i % 4) + "\t" * (i % 3) for i, line in enumerate(passages)
        ),
        "one line": (" ".join(passages * 2) + "  two spaces, a tab\t and 'twas it's").replace(".", " .\f x"),
        "ends in a space": topics()[0] + "\n" + "x" * 300 + "\n ",
    }
    with open(f"{corpus}/train.txt", "w") as file:
        file.write(rewritten[style])
    whole = prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=tmp_path / "a")
    monkeypatch.setattr("outeffhop.lab.data.corpus._PIECE", 200)
    monkeypatch.setattr("outeffhop.lab.data.corpus._LINE", 100)
    cut = prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=tmp_path / "b")
    assert len(list(pieces(load_text(parse(corpus)).splits["train"]()))) > 3
    assert np.array_equal(whole.train.tokens, cut.train.tokens)


def test_blocks_travel_to_a_worker_as_a_path(corpus, trained, tmp_path):
    data = prepare(corpus, "mlm", tokenizer=trained, length=16, cache_dir=tmp_path).train
    packed = pickle.dumps(data)
    assert len(packed) < 1000
    assert pickle.loads(packed)[3]["input_ids"].equal(data[3]["input_ids"])


def test_too_little_text_for_a_block(corpus, trained, tmp_path):
    with pytest.raises(ValueError, match=r"tokens in train, too few for one block of length=100000"):
        prepare(corpus, "clm", tokenizer=trained, length=100_000, cache_dir=tmp_path)


# ---- what is kept on disk


@pytest.fixture
def counted(monkeypatch):
    """How often text was really tokenised."""
    calls = []
    encoded = tokens._encoded

    def counting(corpus, split, tokenizer):
        calls.append(split)
        return encoded(corpus, split, tokenizer)

    monkeypatch.setattr(tokens, "_encoded", counting)
    return calls


def kept(corpus, trained, cache):
    source = load_text(parse(corpus))
    file, said = tokens.tokenize(source, "train", trained, DiskCache(cache))
    return file, np.fromfile(file, said["dtype"])


def test_tokens_are_made_once(corpus, trained, tmp_path, counted):
    _, first = kept(corpus, trained, tmp_path / "c")
    _, second = kept(corpus, trained, tmp_path / "c")
    assert counted == ["train"]
    assert np.array_equal(first, second)
    with open(f"{corpus}/train.txt", "a") as file:
        file.write("more")
    assert len(kept(corpus, trained, tmp_path / "c")[1]) > len(first)
    assert counted == ["train", "train"]


def cut_tokens(folder):
    os.truncate(folder / "tokens.bin", (folder / "tokens.bin").stat().st_size // 2)


def change_a_token(folder):
    with (folder / "tokens.bin").open("r+b") as file:
        file.seek(10)
        file.write(b"\xff")


def cut_manifest(folder):
    os.truncate(folder / "manifest.json", 20)


DAMAGE = {
    "cut tokens": cut_tokens,
    "changed token": change_a_token,
    "cut manifest": cut_manifest,
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "no tokens": lambda folder: (folder / "tokens.bin").unlink(),
    "empty tokens": lambda folder: os.truncate(folder / "tokens.bin", 0),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_rebuilt(corpus, trained, tmp_path, counted, damage):
    file, whole = kept(corpus, trained, tmp_path / "c")
    DAMAGE[damage](file.parent)
    file, again = kept(corpus, trained, tmp_path / "c")
    assert counted == ["train", "train"]
    assert np.array_equal(whole, again)
    kept(corpus, trained, tmp_path / "c")
    assert len(counted) == 2


def half_then_wait(cache, started):
    def build(folder):
        (folder / "tokens.bin").write_bytes(b"half of it")
        started.set()
        signal.pause()

    DiskCache(cache).get("tokens", {"of": "something"}, build)


def test_a_killed_build_is_never_read(tmp_path):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=half_then_wait, args=(tmp_path, started))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    left = list(tmp_path.iterdir())
    assert [(p / "tokens.bin").read_bytes() for p in left] == [b"half of it"]

    def build(folder):
        (folder / "tokens.bin").write_bytes(b"all of it")
        return {"size": 9}

    folder, said = DiskCache(tmp_path).get("tokens", {"of": "something"}, build)
    assert (folder / "tokens.bin").read_bytes() == b"all of it"
    assert said == {"size": 9}
    for path in (left[0] / "tokens.bin", left[0]):
        os.utime(path, (0, 0))
    DiskCache(tmp_path).get("tokens", {"of": "another"}, build)
    assert not left[0].exists()  # a day later nothing is left of it


def tokenise_some_and_wait(corpus, trained, cache, started):
    encoded = tokens._encoded

    def some(*arguments):
        for number, piece in enumerate(encoded(*arguments)):
            yield piece
            if number == 1:
                started.set()
                signal.pause()

    tokens._encoded = some  # in this process alone
    prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=cache)


def test_tokenising_that_was_killed_begins_again(corpus, trained, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the child is forked
    monkeypatch.setattr("outeffhop.lab.data.corpus._PIECE", 200)
    whole = prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=tmp_path / "whole")
    context = multiprocessing.get_context("fork")
    started = context.Event()
    process = context.Process(target=tokenise_some_and_wait, args=(corpus, trained, tmp_path / "killed", started))
    process.start()
    assert started.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(list((tmp_path / "killed").iterdir())) == 1
    again = prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=tmp_path / "killed")
    for split in ("train", "validation", "test"):
        assert np.array_equal(getattr(again, split).tokens, getattr(whole, split).tokens)


def test_two_builders_at_once_both_get_a_whole_entry(tmp_path):
    def first(folder):
        DiskCache(tmp_path).get("tokens", {"a": 1}, second)  # finishes while we are at it
        (folder / "tokens.bin").write_bytes(b"content")
        return {"by": "first"}

    def second(folder):
        (folder / "tokens.bin").write_bytes(b"content")
        return {"by": "second"}

    folder, _ = DiskCache(tmp_path).get("tokens", {"a": 1}, first)
    assert (folder / "tokens.bin").read_bytes() == b"content"
    assert [p.name for p in tmp_path.iterdir()] == [folder.name]


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "tokens.bin").write_bytes(b"x")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        DiskCache(tmp_path).get("tokens", {}, build)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path, corpus, trained):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(ValueError, match=r"cache_dir='.*cache' cannot be created: .*OUTEFFHOP_CACHE"):
        prepare(corpus, "clm", tokenizer=trained, length=16, cache_dir=blocked / "cache")


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "here"))
    assert DiskCache().folder == tmp_path / "here"
    assert DiskCache(tmp_path).folder == tmp_path


def test_only_tokenizers_are_taken_as_such(trained, tmp_path):
    for wrong in (5, trained.backend_tokenizer):
        with pytest.raises(TypeError, match=f"tokenizer is of type {type(wrong).__name__}: give a PreTrained"):
            prepare("builtin:text", "clm", tokenizer=wrong, cache_dir=tmp_path)


@pytest.mark.parametrize("length", [2, 128.0, "128"])
def test_the_length_is_checked(length, trained, tmp_path):
    with pytest.raises(ValueError, match=f"length={length!r}: must be an integer of at least 3"):
        prepare("builtin:text", "clm", tokenizer=trained, length=length, cache_dir=tmp_path)


# ---- other tasks


def test_an_embedding_gets_blocks_without_labels(corpus, trained, tmp_path):
    masked = prepare(corpus, "mlm", tokenizer=trained, length=16, cache_dir=tmp_path)
    data = prepare(corpus, "embedding", tokenizer=trained, length=16, cache_dir=tmp_path)
    batch = data.eval_collate([data.train[0], data.train[1]])
    assert set(batch) == {"input_ids"}
    assert batch["input_ids"][1].equal(masked.train[1]["input_ids"])
    assert data.task == "embedding"


def test_special_ids_are_those_of_the_tokenizer(trained, tmp_path):
    assert tokenizer.around_of(trained) == ((1,), (2,))
    bare_bert(tmp_path)
    assert tokenizer.around_of(load_tokenizer(tmp_path)) == ((2,), (3,))
    bare_byte_level(tmp_path, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"])
    (tmp_path / "vocab.txt").unlink()
    assert tokenizer.around_of(load_tokenizer(tmp_path)) == ((2,), ())
    bare_byte_level(tmp_path, ["<|endoftext|>"])
    assert tokenizer.around_of(load_tokenizer(tmp_path)) == ((), ())


@pytest.mark.parametrize("length", [16, 17])
def test_the_decoder_continues_what_the_encoder_reads(corpus, trained, tmp_path, length):
    plain = prepare(corpus, "clm", tokenizer=trained, length=length - 2, cache_dir=tmp_path)
    data = prepare(corpus, "seq2seq", tokenizer=trained, length=length, cache_dir=tmp_path)
    batch = data.collate([data.train[0], data.train[1]])
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].shape == (2, length // 2)
    for i in range(2):
        first, *source, last = batch["input_ids"][i].tolist()
        assert (first, last) == (trained.bos_token_id, trained.eos_token_id)
        assert source + batch["labels"][i].tolist() == plain.train[i]["input_ids"].tolist()
    with pytest.raises(ValueError, match="length=5: must be an integer of at least 6"):
        prepare(corpus, "seq2seq", tokenizer=trained, length=5, cache_dir=tmp_path)
