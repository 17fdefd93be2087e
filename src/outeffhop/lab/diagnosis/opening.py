"""A checkpoint on its device, and data in the form its model takes. A run's folder names both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from outeffhop._io import check_folder
from outeffhop.lab.data import Prepared
from outeffhop.lab.diagnosis.checkpoint_config import CheckpointConfig
from outeffhop.lab.diagnosis.fitting import check_runs, prepared_for
from outeffhop.lab.training import RunFolder
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.models.finding import find_checkpoint

__all__ = ["Source", "open_checkpoint", "placed"]


@dataclass(frozen=True)
class Source:
    """Where a model and its data come from.

    Attributes:
        checkpoint: the folder or the GGUF file of the model itself; "" for a model in memory.
        data: a spec; None for built-in data that fits the model.
        samples: how the data is cut into samples, as for ``outeffhop.lab.data.prepare``.
    """

    checkpoint: str
    data: str | None
    samples: dict[str, Any] = field(default_factory=dict)


def open_checkpoint(
    config: CheckpointConfig,
    counts: Mapping[str, int] = MappingProxyType({}),
    *,
    out: str | os.PathLike[str] | None = None,
    builtin: bool = False,
) -> tuple[PreTrainedModel, Source, Prepared]:
    """The model on its device, where it and its data come from, and the data.

    What would fail at the end is said first: a count below 1, a folder that cannot be written to, or a model that
    does not run on such data.

    Args:
        counts: further counts that must be at least 1, by name.
        out: the folder that will be written to, if any.
        builtin: serve built-in data if none is named; by default that is an error.
    """
    config.check(counts)
    if out is not None:
        check_folder(out)
    source = _source(config)
    if source.data is None and not builtin:
        raise ValueError(
            f"data is missing, and {config.checkpoint!r} is not a run that names its own; try builtin:text"
        )
    logging.disable_progress_bar()  # loading takes a moment only
    loaded = load_checkpoint(source.checkpoint, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
    model = placed(loaded, config.device)
    prepared = prepared_for(model, source.checkpoint, source.data, source.samples, config.tokenizer, config.task)
    check_runs(model, source.checkpoint, prepared)
    return model, source, prepared


def _source(config: CheckpointConfig) -> Source:
    """The checkpoint itself, and its data, by default those of its run."""
    checkpoint, data = config.checkpoint, config.data
    run, samples = RunFolder(checkpoint), {}
    if run.exists:
        ran = run.config()
        last = run.model if run.finished else run.last_checkpoint()
        if last is None:
            raise ValueError(f"the run in {checkpoint!r} has no checkpoint yet")
        checkpoint, data = str(last), data or ran.data
        # the seed decides which tokens of the validation set are masked
        samples = {"length": ran.samples.length, "cache_dir": ran.samples.cache_dir, "seed": ran.train.seed}
    found = find_checkpoint(checkpoint, trust_remote_code=config.trust_remote_code)
    if config.length is not None:
        samples["length"] = config.length
    return Source(str(found), data, {name: value for name, value in samples.items() if value is not None})


def placed(model: Any, device: str | None) -> PreTrainedModel:
    """The model on the named device, or else on a GPU if there is one."""
    try:
        model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"device={device!r} cannot be used here: {first}; use cpu") from error
    if model.device.type == "meta":
        raise ValueError(f"device={device!r} holds shapes only, so nothing can be measured there: use cpu")
    return model  # type: ignore[no-any-return]


def name_of(checkpoint: str) -> str:
    """What a checkpoint is called: the last part of its path, with that above it if it is merely "model"."""
    path = Path(checkpoint.removeprefix("hub:"))
    named = path.resolve() if path.name in ("", ".", "..") else path
    return f"{named.parent.name}/{named.name}" if named.name == "model" and named.parent.name else named.name
