"""Describes the data of a spec without preparing it for a model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

from outeffhop._naming import known
from outeffhop.lab.data.bags import load_bags
from outeffhop.lab.data.corpus import Corpus, load_text, pieces
from outeffhop.lab.data.image_files import load_images
from outeffhop.lab.data.pairs import load_pairs
from outeffhop.lab.data.preparing import kind_of
from outeffhop.lab.data.samples import SPLITS
from outeffhop.lab.data.series import load_series
from outeffhop.lab.data.specs import Spec, parse, require_kind, tasks_of
from outeffhop.metrics import TASKS

__all__ = ["describe"]

_SAMPLES = 3
_WIDTH = 100  # characters to show of a sample


def describe(spec: str | os.PathLike[str], task: str | None = None) -> dict[str, Any]:
    """The kind of the data, its tasks, the sizes of its splits, and its first samples as short strings.

    Args:
        spec: as for ``prepare``, or an npz file of bags.
        task: raise a ValueError if the data does not fit this task.
    """
    parsed = parse(spec)
    kind = kind_of(parsed, () if task is None else TASKS[known("task", task, TASKS)][0])
    if task is not None:
        require_kind(parsed, kind, task)
    return {"spec": parsed.text, "kind": kind, "tasks": tasks_of(kind), **_DESCRIBED[kind](parsed)}


def _text(spec: Spec) -> dict[str, Any]:
    corpus = load_text(spec)
    counts = {split: corpus.count(split) for split in SPLITS}
    samples = [" ".join(text.split())[:_WIDTH] for text in islice(_beginnings(corpus), _SAMPLES)]
    splits = {split: {"documents": n, "characters": characters} for split, (n, characters) in counts.items()}
    return {"splits": splits, "samples": samples}


def _beginnings(corpus: Corpus) -> Iterator[str]:
    begins = True
    for text, ends in pieces(corpus.splits["train"]()):
        if begins:
            yield text
        begins = ends


def _pairs(spec: Spec) -> dict[str, Any]:
    data = load_pairs(spec)
    samples = [" → ".join(" ".join(text.split())[: _WIDTH // 2 - 2] for text in pair) for pair in data.splits["train"]]
    return {"splits": {split: {"samples": len(data.splits[split])} for split in SPLITS}, "samples": samples[:_SAMPLES]}


def _images(spec: Spec) -> dict[str, Any]:
    data = load_images(spec)
    train = data.splits["train"]
    samples = []
    for index in range(min(_SAMPLES, len(train))):
        image, label = train.images[index], data.classes[train.labels[index]]
        size = "×".join(map(str, image.shape))
        samples.append(f"{size}, class {label}, values {image.min()} to {image.max()}, mean {image.mean():.1f}")
    splits = {split: {"samples": len(data.splits[split])} for split in SPLITS}
    return {"splits": splits, "classes": data.classes, "samples": samples}


def _series(spec: Spec) -> dict[str, Any]:
    series = load_series(spec)
    samples = [
        f"{date}: " + ", ".join(f"{name} {value:.4g}" for name, value in zip(series.names, row, strict=True))
        for date, row in islice(zip(series.dates, series.values, strict=True), _SAMPLES)
    ]
    splits = {split: {"rows": rows} for split, rows in zip(SPLITS, series.rows, strict=True)}
    return {"splits": splits, "series": series.names, "samples": [sample[:_WIDTH] for sample in samples]}


def _bags(spec: Spec) -> dict[str, Any]:
    bags = load_bags(spec.text)
    samples = [
        f"{len(bag)} instances of {bag.shape[1]} features, label {label}"
        for bag, label in islice(zip(bags.instances, bags.labels.tolist(), strict=True), _SAMPLES)
    ]
    total = sum(len(bag) for bag in bags.instances)
    whole = {"bags": len(bags), "instances": total, "positive": int(bags.labels.sum())}
    return {"splits": {"all": whole}, "samples": samples}


_DESCRIBED = {"text": _text, "pairs": _pairs, "images": _images, "series": _series, "bags": _bags}
