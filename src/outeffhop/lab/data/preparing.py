"""One call from a spec to data ready for a model, whichever way it came."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from outeffhop._naming import known
from outeffhop.lab.data import hub
from outeffhop.lab.data.corpus import load_text
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.data.image_files import load_images
from outeffhop.lab.data.images import prepare_images
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
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    augment: str = "none",
    label_smoothing: float = 0.0,
    in_len: int = 48,
    out_len: int = 24,
    cache_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> Prepared:
    """Data ready for one model: ``prepare("builtin:text", "mlm", length=128)``.

    What is in which split never depends on the seed: it decides masks and augmentation only.

    Args:
        spec: ``builtin:text``, ``builtin:images``, ``builtin:series``; a path; or ``hub:NAME[/CONFIG]``.
        task: mlm, clm, classification or forecasting.
        tokenizer: text: a tokenizer or the folder of one; None trains a byte-level BPE on the training split.
        vocab_size: text: of the tokenizer trained; 1024 for builtin text, 8192 for other.
        length: text: tokens of a block, the special ones around it included.
        mask_probability: mlm: share of the tokens to guess.
        image_size: images: side to resize to; None keeps that of the first picture.
        mean, std: images: of each channel in [0, 1]; None measures them on the training pictures.
        augment: images: none, light or paper.
        label_smoothing: images: share of the target spread over all classes.
        in_len, out_len: series: rows given and rows to forecast.
        cache_dir: where tokens are kept; None is $OUTEFFHOP_CACHE, else ~/.cache/outeffhop.
        seed: of masks and augmentation.
    """
    known("task", task, TASKS)
    parsed = parse(spec)
    kind = kind_of(parsed, TASKS[task][0])
    require_kind(parsed, kind, task)
    if kind == "text":
        return prepare_text(
            load_text(parsed),
            task,
            tokenizer=tokenizer,
            vocab_size=vocab_size if vocab_size is not None else 1024 if parsed.where == "builtin" else 8192,
            length=length,
            mask_probability=mask_probability,
            cache=DiskCache(cache_dir),
            seed=seed,
        )
    if kind == "images":
        return prepare_images(
            load_images(parsed),
            image_size=image_size,
            mean=mean,
            std=std,
            augment=augment,
            label_smoothing=label_smoothing,
            seed=seed,
        )
    return prepare_series(load_series(parsed), in_len=in_len, out_len=out_len)


def kind_of(spec: Spec, wanted: str | None = None) -> str:
    """text, images, series or bags; ``wanted`` where a path holds several kinds and this is one of them."""
    if spec.where == "builtin":
        return spec.name
    if spec.where == "hub":
        found = hub.load(spec)
        return hub.kind_of_rows(spec, next(iter(found.values())))
    return kind_of_path(spec.path, wanted, spec.text)
