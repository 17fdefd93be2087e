"""A checkpoint on its device, and data as its model takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outeffhop.data import TASKS, Prepared, prepare, task_of
from outeffhop.models.loading import load_checkpoint

__all__ = ["load", "prepared_for", "without_labels"]


def load(checkpoint: str, device: str | None) -> PreTrainedModel:
    """The model, on the device named or on a GPU where there is one."""
    model: Any = load_checkpoint(checkpoint)
    try:
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used here: {first}; 'cpu' can") from error


def prepared_for(
    model: PreTrainedModel, checkpoint: str, data: str, length: int, tokenizer: str | None
) -> tuple[Prepared, bool]:
    """The data as this model takes them, and whether it has a head that takes labels."""
    config: Any = model.config
    try:
        task, has_task = task_of(model), True
    except ValueError:  # a model without a head: the inputs of a task, without its labels
        task, has_task = {"pixel_values": "classification", "input_ids": "mlm"}.get(model.main_input_name, ""), False
        if task not in TASKS:
            raise
    fields: dict[str, Any] = {}
    if task in ("mlm", "clm"):
        longest = getattr(config, "max_position_embeddings", None) or length
        fields = {"tokenizer": _tokenizer_folder(checkpoint, tokenizer), "length": min(length, longest)}
    elif task == "classification":
        fields = {"image_size": config.image_size}
    else:
        fields = {"in_len": config.in_len, "out_len": config.out_len}
    prepared = prepare(data, task, **fields)
    for name, wanted in prepared.changes.items():
        has = getattr(config, name, wanted)
        fits = wanted <= has if name in ("vocab_size", "num_labels") else wanted == has
        unused = name.endswith("_id") or (name == "num_labels" and not has_task)
        if isinstance(wanted, int) and not unused and not fits:
            raise ValueError(f"data={data!r} has {name}={wanted}, the model of {checkpoint!r} {has}: they do not fit")
    return prepared, has_task


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def _tokenizer_folder(checkpoint: str, tokenizer: str | None) -> str:
    folder = Path(tokenizer or checkpoint)
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
        return str(folder)
    if tokenizer is not None:
        raise ValueError(f"tokenizer={tokenizer!r} is no folder with a tokenizer.json")
    raise ValueError(f"checkpoint {checkpoint!r} has no tokenizer: name the folder of its own with --tokenizer FOLDER")
