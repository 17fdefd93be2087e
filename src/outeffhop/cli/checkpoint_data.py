"""A checkpoint on its device, and data as its model takes them. A run's folder stands for its model and its data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from outeffhop._io import check_folder
from outeffhop.lab.data import Prepared, prepare
from outeffhop.lab.training import RunFolder
from outeffhop.lab.training.checks import misfit
from outeffhop.metrics import TASKS, task_of
from outeffhop.models.checkpoint import load_checkpoint

__all__ = ["Source", "check", "load", "prepared_for", "without_labels"]


@dataclass(frozen=True)
class Source:
    """Where a model and its data come from.

    Attributes:
        checkpoint: the folder of the model itself.
        data: a spec.
        samples: how the data is cut, as ``outeffhop.lab.data.prepare`` has it.
    """

    checkpoint: str
    data: str
    samples: dict[str, Any]


def check(out: Path | None, **counts: int | None) -> None:
    """What would fail in the end is said in the beginning: counts below 1, a folder that cannot be written to."""
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ValueError(f"{name.replace('_', '-')}={value}: at least 1 is needed")
    if out is not None:
        check_folder(out)


def load(
    checkpoint: str, device: str | None, data: str | None, length: int | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Source]:
    """The model, on the device named or on a GPU where there is one; and its data, by default those of its run."""
    run, samples = RunFolder(checkpoint), {}
    if run.exists:
        config = run.config()
        last = run.model if run.finished else run.last_checkpoint()
        if last is None:
            raise ValueError(f"the run in {checkpoint!r} has no checkpoint yet")
        checkpoint, data = str(last), data or config.data
        # the seed decides which tokens of the validation set are masked
        samples = {
            "length": config.samples.length,
            "cache_dir": config.samples.cache_dir,
            "seed": config.train.seed,
        }
    if not Path(checkpoint).is_dir():
        raise ValueError(f"checkpoint {checkpoint!r} is not a folder: one of a run or of a saved model is needed")
    if data is None:
        raise ValueError(f"data is missing: {checkpoint!r} is no run that would name its own; for one: builtin:text")
    if length is not None:
        samples["length"] = length
    logging.disable_progress_bar()  # of loading, which is over in a moment
    model: Any = load_checkpoint(checkpoint, trust_remote_code=trust_remote_code)
    try:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used here: {first}; 'cpu' can") from error
    if model.device.type == "meta":
        raise ValueError(f"device={device!r} holds shapes alone, and nothing to measure: leave it out, or say cpu")
    return model, Source(checkpoint, data, {k: v for k, v in samples.items() if v is not None})


def prepared_for(model: PreTrainedModel, source: Source, tokenizer: str | None) -> tuple[Prepared, bool]:
    """The data as this model takes them, and whether it has a head that takes labels."""
    config: Any = model.config
    try:
        task, has_task = task_of(model), True
    except ValueError:  # a model without a head: the inputs of a task, without its labels
        task, has_task = {"pixel_values": "classification", "input_ids": "mlm"}.get(model.main_input_name, ""), False
        if task not in TASKS:
            raise
    fields = dict(source.samples)
    if task in ("mlm", "clm"):
        length = fields.get("length", 128)
        longest = getattr(config, "max_position_embeddings", None) or length
        if fields.get("length", 0) > longest:  # cut, the numbers would be of another length than was asked for
            raise ValueError(f"length={length}: the model of {source.checkpoint!r} has {longest} positions")
        fields |= {"tokenizer": _tokenizer_folder(source.checkpoint, tokenizer), "length": min(length, longest)}
    elif task == "classification":
        fields |= {"image_size": config.image_size}
    else:
        fields |= {"in_len": config.in_len, "out_len": config.out_len}
    prepared = prepare(source.data, task, **fields)
    unfit = misfit(prepared, config, has_task)
    if unfit is not None:
        name, wanted, has = unfit
        raise ValueError(
            f"data={source.data!r} has {name}={wanted}, the model of {source.checkpoint!r} {has}: they do not fit"
        )
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
