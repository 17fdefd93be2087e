"""The model a run starts from: a new one, or a checkpoint converted to the method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)
from transformers.utils import logging

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.training.config import RunConfig
from outeffhop.lab.training.imitation import Teacher
from outeffhop.lab.training.recipes import new_config
from outeffhop.methods import METHODS, Method, SoftmaxN
from outeffhop.metrics import task_of
from outeffhop.models import SinkSchedule, convert, from_config, load_checkpoint, presets
from outeffhop.models.modules import has_attention, method_in
from outeffhop.models.sink_schedule import movable

__all__ = ["AUTO_CLASSES", "build", "first_model", "has_tokenizer", "load_teacher"]

AUTO_CLASSES = {  # task → the class that builds and loads its models, except our own forecaster
    "mlm": AutoModelForMaskedLM,
    "clm": AutoModelForCausalLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "classification": AutoModelForImageClassification,
    "embedding": AutoModel,
}

_BATCHES = 8  # of training data, to calibrate on


def build(config: RunConfig, changes: dict[str, Any]) -> PreTrainedModel:
    """The model of a resolved config, with the method's own sinks and gates.

    Args:
        changes: the fields of its config that the data decides.
    """
    logging.disable_progress_bar()  # transformers shows one for every file it reads or writes
    if config.init is not None:
        return _converted(load_checkpoint(config.init), Method.parse(config.method))
    if config.model in ("bert", "opt"):
        longest = presets.config(config.model, config.preset).max_position_embeddings
        changes = {**changes, "max_position_embeddings": max(longest, config.samples.length or 0)}
    if config.model in presets.MODELS:
        return presets.build(config.model, config.preset, config.method, **{**changes, **config.changes})
    plain = new_config(config, config.changes)
    own = {name: value for name, value in changes.items() if presets.is_field(plain, name)}
    if has_tokenizer(str(config.model)):
        own.pop("vocab_size", None)  # it may have more rows than its tokenizer has tokens
    found = new_config(config, {**own, **config.changes})
    try:
        return from_config(AUTO_CLASSES[str(config.task)], found, config.method)  # type: ignore[no-any-return]
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError) as error:
        why = (str(error).splitlines() or [""])[0]
        raise ValueError(f"model={config.model!r} cannot be built from its config: {why}") from error


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a folder has a tokenizer that transformers saved."""
    return any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def load_teacher(config: RunConfig, model: PreTrainedModel, device: torch.device) -> Teacher | None:
    """The model to imitate, in evaluation mode on the device; None if the run learns from labels."""
    if config.teacher is None:
        return None
    found: Any = load_checkpoint(config.teacher)
    task = task_of(found)
    if task != config.task:
        raise ValueError(f"teacher={config.teacher!r} is for {task}, the model for {config.task}: they must agree")
    for name in ("vocab_size", "num_labels", "hidden_size"):
        theirs, own = (getattr(each.config, name, None) for each in (found, model))
        decides = name == {"embedding": "hidden_size", "classification": "num_labels"}.get(task, "vocab_size")
        if decides and theirs != own:
            raise ValueError(f"teacher={config.teacher!r} has {name}={theirs}, the model {own}: they must agree")
    return Teacher(found.to(device))


def first_model(config: RunConfig, prepared: Prepared, device: torch.device) -> tuple[Any, SinkSchedule | None]:
    """The model to train, and the schedule that brings a converted checkpoint to the method's own sinks and gates.

    A checkpoint with softmax starts near the function it was trained for, calibrated on training data. Calibration
    runs the model many times, so it takes place on the device, and the model stays there.
    """
    steps = config.train.anneal_steps
    if config.init is None or not steps:
        return build(config, prepared.changes), None
    logging.disable_progress_bar()
    model: Any = load_checkpoint(config.init)
    method = Method.parse(config.method)
    if not _starts_near(model, method):
        return _converted(model, method), None
    size = min(config.train.batch_size or 1, 16)
    some = list(batches(prepared.train, prepared.eval_collate, size, limit=_BATCHES))
    convert(model.to(device), method, calibrate=some)
    return model, SinkSchedule(steps) if movable(method) else None


def _converted(model: PreTrainedModel, method: Method) -> PreTrainedModel:
    """A model that computes softmax in a way of its own is left as it is: others can load it as they did before."""
    untouched = has_attention(model) and method_in(model) is None
    return model if untouched and method == METHODS["vanilla"].method else convert(model, method)


def _starts_near(model: PreTrainedModel, method: Method) -> bool:
    """Whether calibration applies: from softmax to another method that is softmax with a sink."""
    vanilla = METHODS["vanilla"].method
    from_softmax = has_attention(model) and method_in(model) in (None, vanilla)
    return from_softmax and isinstance(method.normalizer, SoftmaxN) and method != vanilla
