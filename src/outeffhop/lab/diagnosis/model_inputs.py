"""What some models take beside a text or an image: both at once, the inputs of a decoder, a text with one end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from outeffhop.lab.data.samples import SPLITS, Collate, Prepared, Sample, Samples

__all__ = ["both", "ending_once", "has_two_inputs", "with_decoder_inputs"]

_IGNORED = -100


def has_two_inputs(model: Any) -> bool:
    """Whether a model compares texts with images, as CLIP and SigLIP do."""
    return all(hasattr(model, name) for name in ("get_text_features", "get_image_features"))


class _Both(Dataset[Sample]):
    """Each text with an image; as many as there are of the fewer."""

    def __init__(self, texts: Samples, images: Samples) -> None:
        self.texts, self.images = texts, images

    def __len__(self) -> int:
        return min(len(self.texts), len(self.images))

    def __getitem__(self, index: int) -> Sample:
        return {**self.texts[index], **self.images[index]}


def both(texts: Prepared, images: Prepared) -> Prepared:
    """Texts and images side by side. They do not belong to each other, which comparing outputs does not need."""
    train, validation, test = (_Both(getattr(texts, split), getattr(images, split)) for split in SPLITS)
    about = {
        "source": f"{texts.about['source']} with {images.about['source']}",
        "kind": "text and images",
        "text": texts.about,
        "images": images.about,
    }
    changes = {**images.changes, **texts.changes}
    return replace(texts, train=train, validation=validation, test=test, changes=changes, about=about)


def with_decoder_inputs(prepared: Prepared, config: Any) -> Prepared:
    """Pairs for a base model, whose decoder is given what it would have to say: the labels, one place later."""
    start = getattr(config, "decoder_start_token_id", None)
    padding = getattr(config, "pad_token_id", None)
    first = next((i for i in (start, getattr(config, "bos_token_id", None), padding) if isinstance(i, int)), 0)

    def change(batch: Sample) -> Sample:
        labels = batch.pop("labels")
        real = labels != _IGNORED
        said = torch.where(real, labels, padding if isinstance(padding, int) else 0)
        begins = torch.full_like(said[:, :1], first)
        batch["decoder_input_ids"] = torch.cat([begins, said[:, :-1]], 1)
        if not bool(real.all()):
            batch["decoder_attention_mask"] = torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], 1).long()
        return batch

    return _changed(prepared, change)


def ending_once(prepared: Prepared, config: Any) -> Prepared:
    """Texts whose only end token is the last one: heads of encoder-decoder models read the state at the end."""
    end: Any = getattr(config, "eos_token_id", None)

    def change(batch: Sample) -> Sample:
        ids: Tensor = batch["input_ids"].clone()
        for row in ids:
            others = row[row != end]
            if len(others):
                row[row == end] = others[0]
        ids[:, -1] = end
        return {**batch, "input_ids": ids}

    return prepared if not isinstance(end, int) else _changed(prepared, change)


def _changed(prepared: Prepared, change: Callable[[Sample], Sample]) -> Prepared:
    def collate(given: Collate) -> Collate:
        return lambda samples: change(dict(given(samples)))

    return replace(
        prepared,
        task="embedding",
        collate=collate(prepared.collate),
        eval_collate=collate(prepared.eval_collate),
    )
