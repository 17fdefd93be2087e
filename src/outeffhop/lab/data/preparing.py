"""From a spec to data that is ready for a model, in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outeffhop._naming import known
from outeffhop.lab.data import hub
from outeffhop.lab.data.corpus import load_text
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.data.image_files import load_images
from outeffhop.lab.data.images import prepare_images
from outeffhop.lab.data.pairs import load_pairs, prepare_pairs
from outeffhop.lab.data.samples import Prepared
from outeffhop.lab.data.series import load_series, prepare_series
from outeffhop.lab.data.specs import Spec, kind_of_path, parse, require_kind
from outeffhop.lab.data.tokens import prepare_text
from outeffhop.metrics import TASKS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["kind_of", "prepare"]


def prepare(
    spec: str | os.PathLike[str],
    task: str,
    *,
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerFast | None = None,
    vocab_size: int | None = None,
    length: int = 128,
    mask_probability: float = 0.15,
    image_size: int | None = None,
    num_channels: int | None = None,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    augment: str = "none",
    label_smoothing: float = 0.0,
    in_len: int = 48,
    out_len: int = 24,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Prepared:
    """Prepares data for a model: ``prepare("builtin:text", "mlm", length=128)``.

    The seed changes masks and augmentation, but not which samples are in which split.

    Args:
        spec: ``builtin:text``, ``builtin:images``, ``builtin:series``; a path; or ``hub:NAME[/CONFIG]``. Text of the
            hub can be joined, as in ``hub:A+B``.
        task: mlm, clm, seq2seq, classification, forecasting; or embedding, text or images without labels.
        tokenizer: text: a tokenizer, the folder of one or ``hub:NAME``; None trains a byte-level BPE on the
            training split.
        vocab_size: text: of the trained tokenizer; 1024 for builtin text, else 8192.
        length: text: tokens per block, including the special ones around it; seq2seq: half of them are the source's.
        mask_probability: mlm: share of the tokens to predict.
        image_size: images: side to resize to; by default that of the first image.
        num_channels: images: 3 makes colour images of grey ones; by default as in the images.
        mean, std: images: per channel in [0, 1]; by default those of the training images.
        augment: images: none, light or paper.
        label_smoothing: images: share of the target that is spread over all classes.
        in_len, out_len: series: rows of the past, and rows to forecast.
        cache_dir: folder in which tokens are cached; by default $OUTEFFHOP_CACHE, else ~/.cache/outeffhop.
        seed: of masks and augmentation.
    """
    known("task", task, TASKS)
    parsed = parse(spec)
    kind = kind_of(parsed, TASKS[task][0])
    require_kind(parsed, kind, task)
    small = 1024 if parsed.where == "builtin" else 8192
    if kind == "pairs":
        return prepare_pairs(
            load_pairs(parsed),
            tokenizer=tokenizer,
            vocab_size=vocab_size if vocab_size is not None else small,
            length=length,
            cache=DiskCache(cache_dir),
        )
    if kind == "text":
        return prepare_text(
            load_text(parsed),
            task,
            tokenizer=tokenizer,
            vocab_size=vocab_size if vocab_size is not None else small,
            length=length,
            mask_probability=mask_probability,
            cache=DiskCache(cache_dir),
            seed=seed,
        )
    if kind == "images":
        return prepare_images(
            load_images(parsed),
            task,
            image_size=image_size,
            num_channels=num_channels,
            mean=mean,
            std=std,
            augment=augment,
            label_smoothing=label_smoothing,
            seed=seed,
        )
    return prepare_series(load_series(parsed), in_len=in_len, out_len=out_len)


def kind_of(spec: Spec, wanted: Sequence[str] = ()) -> str:
    """text, pairs, images, series or bags; one of ``wanted`` if a path contains several kinds and any of these."""
    if spec.where == "builtin":
        return spec.name
    if spec.where == "hub":
        kinds = [hub.kind_of_rows(part, next(iter(hub.load(part).values()))) for part in spec.parts]
        if len(kinds) > 1 and set(kinds) != {"text"}:
            raise ValueError(f"data spec {spec.text!r} joins {', '.join(kinds)}: only text can be joined by +")
        return kinds[0]
    return kind_of_path(spec.path, wanted, spec.text)
