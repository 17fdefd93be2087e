"""Checks before a run begins: a mistake is reported by name, and the run's folder stays unused."""

from __future__ import annotations

from typing import Any

import torch

from outeffhop.lab.data import Prepared
from outeffhop.lab.training.config import RunConfig, TrainConfig
from outeffhop.models.positions import positions_of
from outeffhop.outliers.tensors import NAMED, pick

__all__ = ["check_device", "check_run", "chosen_tensors", "misfit"]


def check_device(train: TrainConfig) -> None:
    """Checks that the device and the precision asked for are available here."""
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    if train.device == "cuda" and on_cpu:
        raise ValueError("train.device='cuda': there is no CUDA device here; leave it out or choose cpu")
    if train.precision == "fp16" and on_cpu:
        raise ValueError("train.precision='fp16' needs a GPU: choose bf16 or fp32 on a CPU")


def check_run(config: RunConfig, model: Any, prepared: Prepared) -> None:
    """Checks that the model of a resolved config, its data and its settings fit each other."""
    train, kind = config.train, type(model).__name__
    if len(prepared.train) < (train.batch_size or 1):
        raise ValueError(
            f"data={config.data!r} has {len(prepared.train)} training samples, fewer than "
            f"train.batch_size={train.batch_size}: choose a smaller batch, shorter samples or more data"
        )
    unfit = misfit(prepared, model.config)
    if unfit is not None:
        name, wanted, has = unfit
        theirs = f"changes.{name}={has!r}" if config.init is None else f"the model of init={config.init!r} {has!r}"
        raise ValueError(f"data={config.data!r} has {name}={wanted}, {theirs}: they must agree")
    longest = positions_of(model)
    if prepared.tokenizer is not None and longest is not None and (config.samples.length or 0) > longest:
        raise ValueError(f"samples.length={config.samples.length}: the model has {longest} positions")
    if train.gradient_checkpointing and not model.supports_gradient_checkpointing:
        raise ValueError(f"train.gradient_checkpointing=True: {kind} does not support it; leave it out")
    for name in ("outlier_tensors", "penalty_tensors"):
        chosen = str(getattr(train, name))
        try:
            pick(model, chosen_tensors(chosen))
        except ValueError as error:
            raise ValueError(f"train.{name}={chosen!r}: {error}") from None


def misfit(prepared: Prepared, config: Any) -> tuple[str, int, Any] | None:
    """The first field of a model's config that its data does not fit: its name, the data's value, the model's."""
    for name, wanted in prepared.changes.items():
        has = getattr(config, name, wanted)
        fits = wanted <= has if name in ("vocab_size", "num_labels") else wanted == has
        unused = name.endswith("_id")
        if isinstance(wanted, int) and not unused and not fits:
            return name, wanted, has
    return None


def chosen_tensors(chosen: str) -> str | list[str]:
    """``train.outlier_tensors`` or ``train.penalty_tensors`` as ``outeffhop.outliers.measure`` takes it."""
    return chosen if chosen in NAMED else [pattern.strip() for pattern in chosen.split(",")]
