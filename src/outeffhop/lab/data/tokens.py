"""Text is tokenized once: each split becomes one long array of ids on disk, from which blocks are cut.

Each document is followed by the tokenizer's end token. The array depends neither on the length of blocks nor on the
task, so masked and causal models of every length share it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from outeffhop._naming import printable
from outeffhop.lab.data.corpus import Corpus, pieces
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.data.masking import MaskedBatch
from outeffhop.lab.data.samples import SPLITS, Collate, Prepared, Sample, check_size, stack
from outeffhop.lab.data.tokenizer import around_of, find_tokenizer, ids_of, special_ids

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedTokenizerFast

__all__ = ["ContinuedBatch", "TokenBlocks", "causal_batch", "prepare_text", "tokenize"]

Around = tuple[tuple[int, ...], tuple[int, ...]]
_VERSION = 2  # of the tokenization below; part of the cache key of tokens
_AT_ONCE = 64  # pieces, about 4 MB of text


class TokenBlocks(Dataset[Sample]):
    """Blocks of ``length`` ids from a file; an incomplete last block is dropped.

    Args:
        file: raw ids of ``dtype``; mapped into memory, never read as a whole.
        around: the ids before and after each block; they count towards its length.
    """

    def __init__(self, file: Path, dtype: str, length: int, around: Around = ((), ())) -> None:
        self.file, self.dtype, self.length, self.around = file, dtype, length, around
        self.inner = length - sum(map(len, around))
        self.tokens = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype)

    def __len__(self) -> int:
        return len(self.tokens) // self.inner

    def __getitem__(self, index: int) -> Sample:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.inner
        ids = torch.from_numpy(self.tokens[start : start + self.inner].astype(np.int64))
        return {"input_ids": _between(self.around, ids)}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenBlocks, (self.file, self.dtype, self.length, self.around)  # a worker process maps the file again


def _between(around: Around, ids: Tensor) -> Tensor:
    before, after = (torch.tensor(some, dtype=torch.long).expand(*ids.shape[:-1], -1) for some in around)
    return torch.cat([before, ids, after], -1)


def causal_batch(samples: list[Sample]) -> Sample:
    """Makes a batch for a causal model, which shifts the labels itself."""
    ids = stack(samples)["input_ids"]
    # no attention_mask: blocks have no padding, and the fastest kernels take no mask
    return {"input_ids": ids, "labels": ids.clone()}


class ContinuedBatch:
    """Collate function for an encoder and a decoder: the first half of a block is the source, the second the target.

    Args:
        source: the number of ids of a source, with those around it.
    """

    def __init__(self, source: int, around: Around) -> None:
        self.cut, self.around = source - sum(map(len, around)), around

    def __call__(self, samples: list[Sample]) -> Sample:
        ids = stack(samples)["input_ids"]
        # cloned: a view would travel between processes with the whole block
        return {"input_ids": _between(self.around, ids[:, : self.cut]), "labels": ids[:, self.cut :].clone()}


def prepare_text(
    corpus: Corpus,
    task: str,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerFast | None,
    vocab_size: int,
    length: int,
    mask_probability: float,
    cache: DiskCache,
    seed: int,
) -> Prepared:
    """Prepares text for a language model, or without labels for an embedding."""
    found = find_tokenizer(tokenizer, corpus, vocab_size, cache)
    content = _digest(found)
    around = ((), ()) if task == "clm" else around_of(found)
    extra = sum(map(len, around))
    # room for a token of text between the special ones, for seq2seq in either half
    check_size("length", length, max(3, 2 * extra + 2 if task == "seq2seq" else extra + 1))
    collate, eval_collate = _collates(task, found, length, around, mask_probability, seed)
    sets, sizes = {}, {}
    for split in SPLITS:
        file, said = tokenize(corpus, split, found, cache, content)
        if task == "seq2seq":  # its collate puts the special ids around the source alone
            blocks = TokenBlocks(file, said["dtype"], length - extra)
        else:
            blocks = TokenBlocks(file, said["dtype"], length, around)
        if not len(blocks):
            raise ValueError(
                f"data spec {corpus.source!r} has {said['tokens']} tokens in {split}, too few for one block of "
                f"length={length}: give more text or a smaller length"
            )
        sets[split], sizes[split] = blocks, {"samples": len(blocks), **said}
    return Prepared(
        task,
        train=sets["train"],
        validation=sets["validation"],
        test=sets["test"],
        collate=collate,
        eval_collate=eval_collate,
        tokenizer=found,
        changes={"vocab_size": ids_of(found), **special_ids(found)},
        about={
            "source": corpus.source,
            "kind": "text",
            "content": corpus.digest,
            "splits": sizes,
            "tokenizer": {"vocab_size": ids_of(found), "content": content, "trained_here": tokenizer is None},
            "preprocessing": {"length": length, "around": around, "seed": seed}
            | ({"mask_probability": mask_probability} if task == "mlm" else {}),
        },
    )


def _collates(
    task: str, tokenizer: PreTrainedTokenizerFast, length: int, around: Around, mask_probability: float, seed: int
) -> tuple[Collate, Collate]:
    """The collate functions of training and of evaluation."""
    if task == "mlm":
        first, later = (MaskedBatch(tokenizer, mask_probability, seed, epoch=epoch) for epoch in (0, None))
        return first, later
    if task == "seq2seq":
        continued = ContinuedBatch(length // 2, around)
        return continued, continued
    plain = causal_batch if task == "clm" else stack
    return plain, plain


def tokenize(
    corpus: Corpus, split: str, tokenizer: PreTrainedTokenizerFast, cache: DiskCache, content: str | None = None
) -> tuple[Path, dict[str, Any]]:
    """The cached file of a split's ids, and its dtype, tokens and documents.

    ``content`` is the hash of the tokenizer, if it is known already.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        raise ValueError("the tokenizer has neither an eos_token nor a sep_token to end documents with: set one")
    dtype = "uint16" if ids_of(tokenizer) <= 1 << 16 else "uint32"

    def build(folder: Path) -> dict[str, Any]:
        tokens = documents = 0
        with (folder / "tokens.bin").open("wb") as out:
            for ids, ended in _encoded(corpus, split, tokenizer):
                out.write(np.asarray([*ids, end] if ended else ids, dtype).tobytes())
                tokens += len(ids) + ended
                documents += ended
        return {"tokens": tokens, "documents": documents, "dtype": dtype}

    content = content or _digest(tokenizer)
    key = {"version": _VERSION, "text": corpus.digest, "split": split, "tokenizer": content, "end": end}
    folder, said = cache.get("tokens", key, build)
    return folder / "tokens.bin", said


def _encoded(corpus: Corpus, split: str, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[list[int], bool]]:
    """Yields the ids of each piece, and whether it ends a document; pieces are encoded in parallel on all cores."""
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "</s>" in a text is text and does not end a document
    stream = pieces(corpus.splits[split]())
    with _progress(f"tokenizing {corpus.source} ({split})") as advance:
        while some := list(islice(stream, _AT_ONCE)):
            encoded = backend.encode_batch_fast([text for text, _ in some], add_special_tokens=False)
            for encoding, (_, ended) in zip(encoded, some, strict=True):
                yield encoding.ids, ended
            advance(sum(len(text) for text, _ in some))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int], None]]:
    """Shows the number of characters done, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda characters: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    # not in the format of a column: a path may contain braces
    named = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), named, TextColumn("{task.completed:,} characters"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=None)
        yield lambda characters: bar.advance(task, characters)


def _digest(tokenizer: PreTrainedTokenizerFast) -> str:
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    for unused in ("truncation", "padding", "post_processor"):  # settings of use, not of the vocabulary
        settings.pop(unused, None)
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
