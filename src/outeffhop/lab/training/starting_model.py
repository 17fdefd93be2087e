"""The model a run starts from: a new one, or a checkpoint converted to the method."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.training.config import RunConfig
from outeffhop.methods import METHODS, Method, SoftmaxN
from outeffhop.models import SinkSchedule, convert, load_checkpoint, presets
from outeffhop.models.modules import has_attention, method_in
from outeffhop.models.sink_schedule import movable

__all__ = ["build", "first_model"]

_BATCHES = 8  # of training data, to calibrate on


def build(config: RunConfig, changes: dict[str, Any]) -> PreTrainedModel:
    """The model of a resolved config, with the method's own sinks and gates.

    Args:
        changes: the fields of its config that the data decides.
    """
    logging.disable_progress_bar()  # transformers shows one for every file it reads or writes
    if config.init is not None:
        return convert(load_checkpoint(config.init), config.method)
    if config.model in ("bert", "opt"):
        longest = presets.config(config.model, config.preset).max_position_embeddings
        changes = {**changes, "max_position_embeddings": max(longest, config.samples.length or 0)}
    return presets.build(config.model, config.preset, config.method, **{**changes, **config.changes})


def first_model(config: RunConfig, prepared: Prepared) -> tuple[Any, SinkSchedule | None]:
    """The model to train, and the schedule that brings a converted checkpoint to the method's own sinks and gates.

    A checkpoint with softmax starts near the function it was trained for, calibrated on training data.
    """
    steps = config.train.anneal_steps
    if config.init is None or not steps:
        return build(config, prepared.changes), None
    logging.disable_progress_bar()
    model = load_checkpoint(config.init)
    method = Method.parse(config.method)
    if not _starts_near(model, method):
        return convert(model, method), None
    size = min(config.train.batch_size or 1, 16)
    some = list(batches(prepared.train, prepared.eval_collate, size, limit=_BATCHES))
    convert(model, method, calibrate=some)
    return model, SinkSchedule(steps) if movable(method) else None


def _starts_near(model: PreTrainedModel, method: Method) -> bool:
    """Whether calibration applies: from softmax to another method that is softmax with a sink."""
    vanilla = METHODS["vanilla"].method
    from_softmax = has_attention(model) and method_in(model) in (None, vanilla)
    return from_softmax and isinstance(method.normalizer, SoftmaxN) and method != vanilla
