"""Pairs of a source and a target text, from .tsv and .jsonl files, for models with an encoder and a decoder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from outeffhop.lab.data.corpus import Corpus
from outeffhop.lab.data.files import by_split, digest_of, files_under, lines, suffix
from outeffhop.lab.data.samples import SPLITS, Prepared, Sample, check_size
from outeffhop.lab.data.specs import Spec, kind_of_file
from outeffhop.lab.data.tokenizer import find_tokenizer, ids_of, special_ids

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from outeffhop.lab.data.disk_cache import DiskCache

__all__ = ["PaddedBatch", "PairData", "PairSet", "load_pairs", "prepare_pairs"]

Pair = tuple[str, str]
_SHARE = 0.05  # of the training pairs, for each missing split
_IGNORED = -100  # the label that cross entropy ignores


@dataclass(frozen=True)
class PairData:
    """Pairs of source and target by split, and a hash of the files they come from."""

    source: str
    digest: str
    splits: dict[str, list[Pair]]

    def as_text(self) -> Corpus:
        """The training pairs as text, which a tokenizer can be trained on."""

        def read() -> Iterator[str | None]:
            for source, target in self.splits["train"]:
                yield f"{source}\n"
                yield f"{target}\n"
            yield None

        return Corpus(self.source, self.digest, {"train": read})


def load_pairs(spec: Spec) -> PairData:
    """Loads the pairs under a path; missing splits are drawn from train, 5 % each, always the same."""
    files = [file for file in files_under(spec.path) if kind_of_file(file) == "pairs"]
    groups = by_split(files, spec.path) or {"train": files}
    found = {split: [pair for file in group for pair in _read(file)] for split, group in groups.items()}
    missing = [split for split in SPLITS if not found.get(split)]
    train = found.get("train", [])
    if "train" in missing or len(train) <= len(missing):
        raise ValueError(f"data spec {spec.text!r} has {len(train)} training pairs: give more than {len(missing)}")
    order = np.random.default_rng(0).permutation(len(train))
    share = max(1, int(_SHARE * len(train)))
    drawn = {split: np.sort(order[i * share : (i + 1) * share]) for i, split in enumerate(missing)}
    drawn["train"] = np.sort(order[len(missing) * share :])
    used = sorted(file for group in groups.values() for file in group)
    splits = found | {split: [train[i] for i in chosen] for split, chosen in drawn.items()}
    return PairData(spec.text, f"{digest_of(used, spec.path)}/{'+'.join(missing)}", splits)


def _read(file: Path) -> Iterator[Pair]:
    of_line = _of_tsv if suffix(file) == ".tsv" else _of_json
    for number, line in enumerate(lines(file), 1):
        if not line.strip():
            continue
        pair = of_line(line.rstrip("\r\n"))
        if pair is None or not all(text.strip() for text in pair):
            form = "source TAB target" if suffix(file) == ".tsv" else '{"source": "…", "target": "…"}'
            raise ValueError(f"{file}, line {number}: must be {form}, neither of them empty")
        yield pair


def _of_tsv(line: str) -> Pair | None:
    parts = line.split("\t")
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _of_json(line: str) -> Pair | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    source, target = (row.get(name) if isinstance(row, dict) else None for name in ("source", "target"))
    return (source, target) if isinstance(source, str) and isinstance(target, str) else None


class PairSet(Dataset[Sample]):
    """Samples of input_ids and labels, as the tokenizer encodes source and target; too long ones are cut.

    Args:
        longest: the largest number of tokens of a source, and of a target.
    """

    def __init__(self, pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerFast, longest: tuple[int, int]) -> None:
        self.pairs, self.tokenizer, self.longest = pairs, tokenizer, longest

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Sample:
        source, target = self.pairs[index]
        # "</s>" in a text is text
        options = {"truncation": True, "split_special_tokens": True}
        ids = self.tokenizer(source, max_length=self.longest[0], **options)["input_ids"]
        labels = self.tokenizer(text_target=target, max_length=self.longest[1], **options)["input_ids"]
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


class PaddedBatch:
    """Collate function that pads sources, with a mask, and targets, with labels that no loss counts."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, samples: list[Sample]) -> Sample:
        if not samples:
            raise ValueError("samples is empty: give at least one")
        ids = [sample["input_ids"] for sample in samples]
        return {
            "input_ids": _padded(ids, self.pad_id),
            "attention_mask": _padded([torch.ones_like(x) for x in ids], 0),
            "labels": _padded([sample["labels"] for sample in samples], _IGNORED),
        }


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value)


def prepare_pairs(
    data: PairData,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerFast | None,
    vocab_size: int,
    length: int,
    cache: DiskCache,
) -> Prepared:
    """Prepares pairs for a model with an encoder and a decoder; each gets half of ``length`` at most."""
    check_size("length", length, 8)
    found = find_tokenizer(tokenizer, data.as_text(), vocab_size, cache)
    longest = (length // 2, length - length // 2)
    sets = {split: PairSet(data.splits[split], found, longest) for split in SPLITS}
    collate = PaddedBatch(found.pad_token_id if found.pad_token_id is not None else 0)
    return Prepared(
        "seq2seq",
        train=sets["train"],
        validation=sets["validation"],
        test=sets["test"],
        collate=collate,
        eval_collate=collate,
        tokenizer=found,
        changes={"vocab_size": ids_of(found), **special_ids(found)},
        about={
            "source": data.source,
            "kind": "pairs",
            "content": data.digest,
            "splits": {split: {"samples": len(part)} for split, part in sets.items()},
            "tokenizer": {"vocab_size": ids_of(found), "trained_here": tokenizer is None},
            "preprocessing": {"length": length},
        },
    )
