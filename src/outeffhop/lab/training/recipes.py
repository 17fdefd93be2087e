"""The recipe of each model and size: the paper's, ours for two CPU cores or one GPU, and that of fine-tuning."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from outeffhop._io import read_json
from outeffhop._naming import did_you_mean, known
from outeffhop.lab.data import Prepared
from outeffhop.lab.data.image_settings import image_fields
from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig, from_dict, to_dict
from outeffhop.lab.training.rundir import RunFolder
from outeffhop.methods import Method
from outeffhop.metrics import task_of
from outeffhop.models import presets
from outeffhop.models.asked_sizes import check_counts
from outeffhop.models.remote_code import refuse_code

__all__ = ["counts_epochs", "in_steps", "new_config", "paper_length", "resolve"]

# preset → the task it learns
_TASK_OF = {"bert": "mlm", "opt": "clm", "vit": "classification", "stanhop": "forecasting"}
# task → the preset whose recipe a new model of another architecture gets
_LIKE = {task: model for model, task in _TASK_OF.items()} | {"seq2seq": "opt", "embedding": "bert"}

_TEXT = dict(optimizer="adamw", clip_norm=1.0, min_lr=0.0, patience=0, keep_best=False)
_BERT = dict(_TEXT, weight_decay=0.01, betas=(0.9, 0.999), schedule="linear")
_OPT = dict(_TEXT, weight_decay=0.1, betas=(0.9, 0.95), schedule="linear")
_VIT = dict(
    optimizer="adamw",
    weight_decay=0.03,
    betas=(0.9, 0.999),
    schedule="cosine",
    min_lr=1e-5,
    clip_norm=0.0,
    patience=0,
    keep_best=False,
)
# the authors' script evaluates every epoch on the whole validation set, and forecasts with the best epoch's weights
_STANHOP = dict(
    optimizer="adam",
    weight_decay=0.0,
    betas=(0.9, 0.999),
    schedule="halving",
    warmup_steps=0,
    clip_norm=5.0,
    min_lr=0.0,
    patience=5,
    keep_best=True,
    eval_steps="epoch",
    log_steps=10,
    save_steps="epoch",
    outlier_steps="epoch",
)
_RARE = dict(eval_steps=1000, log_steps=50, save_steps=1000, outlier_steps=1000)
_OFTEN = dict(eval_steps=200, log_steps=10, save_steps=200, outlier_steps=200)

# "paper" is the paper's recipe; the others are ours, with settings for small OPT and BERT at which outliers emerge
_RECIPES: dict[tuple[str, str], dict[str, Any]] = {
    ("bert", "tiny"): dict(_BERT, lr=1e-3, batch_size=32, max_steps=2000, warmup_steps=200, **_OFTEN),
    ("bert", "small"): dict(_BERT, lr=5e-4, batch_size=256, max_steps=11800, warmup_steps=1000, **_RARE)
    | {"schedule": "cosine"},
    ("bert", "paper"): dict(_BERT, lr=1e-4, batch_size=256, max_steps=200_000, warmup_steps=10_000, **_RARE),
    ("opt", "tiny"): dict(_OPT, lr=4e-3, batch_size=16, max_steps=2000, warmup_steps=100, **_OFTEN),
    ("opt", "small"): dict(_OPT, lr=1e-3, batch_size=64, max_steps=4000, warmup_steps=200, **_RARE),
    ("opt", "paper"): dict(_OPT, lr=4e-4, batch_size=192, max_steps=125_000, warmup_steps=2000, **_RARE),
    ("vit", "tiny"): dict(_VIT, lr=1e-3, batch_size=64, max_steps=1000, warmup_steps=50, **_OFTEN),
    ("vit", "small"): dict(_VIT, lr=1e-3, batch_size=256, max_steps=8000, warmup_steps=500, **_RARE),
    # 150 epochs of ImageNet-1k in batches of 512 × 2 × 5, 10 of them warm-up
    ("vit", "paper"): dict(_VIT, lr=1e-3, batch_size=5120, max_steps=37_500, warmup_steps=2500, **_RARE),
    ("stanhop", "tiny"): dict(_STANHOP, lr=1e-3, batch_size=32, max_steps=1000),
    ("stanhop", "small"): dict(_STANHOP, lr=1e-3, batch_size=128, epochs=20),
    # patience ends it long before
    ("stanhop", "paper"): dict(_STANHOP, lr=1e-4, batch_size=128, epochs=100),
}

# a checkpoint is fine-tuned, whatever its size
_TUNED = dict(_OPT, lr=2e-4, batch_size=16, max_steps=1000, warmup_steps=50, **_OFTEN)
_TUNING: dict[str, dict[str, Any]] = {
    "mlm": dict(_TUNED, weight_decay=0.01, betas=(0.9, 0.999)),
    "clm": _TUNED,
    "seq2seq": _TUNED,
    # dropout and decay would pull it away from its teacher
    "embedding": dict(_TUNED, weight_decay=0.0),
    "classification": dict(_VIT, lr=1e-4, min_lr=0.0, batch_size=64, max_steps=1000, warmup_steps=50, **_OFTEN),
    "forecasting": dict(_STANHOP, lr=1e-4, batch_size=32, max_steps=1000),
}

_DEFAULT = "opt"  # the preset that is trained if nothing is named

_PERIODS = ("eval_steps", "save_steps", "outlier_steps")  # in steps, or "epoch"
_AT_LEAST_ONE = (
    "max_steps",
    "epochs",
    "batch_size",
    "accumulate",
    "eval_steps",
    "eval_batches",
    "log_steps",
    "save_steps",
    "keep",
    "outlier_batches",
    "timeout",
)


def resolve(config: RunConfig) -> RunConfig:
    """Fills in every open field from the recipe, and checks all of them. Epochs stay epochs until ``in_steps``."""
    config = from_dict(to_dict(config))  # a config made in Python is held to the same types as a file
    if not config.data:
        raise ValueError("data is missing: a spec such as builtin:text, or a path (`outeffhop data` lists them)")
    if config.task is not None:
        known("task", config.task, _TUNING)
    config = dataclasses.replace(
        config, init=_checkpoint("init", config.init), teacher=_checkpoint("teacher", config.teacher)
    )
    method = str(Method.parse(config.method))
    sizes = _model_config(config)
    task = _task(config, sizes)
    config = dataclasses.replace(config, task=task, model=_model_name(config, sizes), teacher=_teacher(config, task))
    train = _filled(config.train, _length(config.train, _recipe(config)))
    if config.init is None:
        train = _filled(train, {"anneal_steps": 0})
    elif train.max_steps is not None:
        train = _filled(train, {"anneal_steps": train.max_steps // 3})
    train = _filled(train, {"penalty_tensors": train.outlier_tensors})
    _check_train(train)
    return dataclasses.replace(config, method=method, train=train, samples=_samples(config, sizes))


def _length(given: TrainConfig, recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe, without its own length if the run has one in the other unit."""
    if given.epochs is not None and given.max_steps is not None:
        raise ValueError(
            f"train.epochs={given.epochs} and train.max_steps={given.max_steps} both give a length: leave one out"
        )
    other = "max_steps" if given.epochs is not None else "epochs" if given.max_steps is not None else None
    return {name: value for name, value in recipe.items() if name != other}


def counts_epochs(train: TrainConfig) -> bool:
    """Whether a resolved config has a field that counts in epochs, so that its steps depend on the data."""
    return train.epochs is not None or any(getattr(train, name) == "epoch" for name in _PERIODS)


def in_steps(config: RunConfig, prepared: Prepared) -> RunConfig:
    """The resolved config with steps where it has epochs of its data."""
    train = config.train
    epoch = max(len(prepared.train) // (train.batch_size or 1), 1)
    if train.epochs is not None:
        steps = train.epochs * epoch
        train = _filled(dataclasses.replace(train, max_steps=steps, epochs=None), {"anneal_steps": steps // 3})
    periods: dict[str, Any] = {name: epoch for name in _PERIODS if getattr(train, name) == "epoch"}
    return dataclasses.replace(config, train=dataclasses.replace(train, **periods))


def _recipe(config: RunConfig) -> dict[str, Any]:
    if config.init is not None:
        return _TUNING[str(config.task)]
    like = config.model if config.model in presets.MODELS else _LIKE[str(config.task)]
    return _RECIPES[str(like), config.preset]


def _model_name(config: RunConfig, sizes: PreTrainedConfig) -> str:
    return sizes.model_type if config.init is not None else config.model or _DEFAULT


def _task(config: RunConfig, sizes: PreTrainedConfig) -> str:
    """The task that is asked for, or what the model's architecture learns."""
    if config.init is None and (config.model or _DEFAULT) in _TASK_OF:
        own = _TASK_OF[config.model or _DEFAULT]
    else:
        try:
            own = task_of(sizes)
        except ValueError as error:
            if config.task is not None and not sizes.architectures:
                return config.task
            given = f"init={config.init!r}" if config.init is not None else f"model={config.model!r}"
            raise ValueError(f"{given}: {error}") from None
    if config.task not in (None, own):
        raise ValueError(f"task={config.task!r}: this model learns {own}; leave it out")
    return own


def _teacher(config: RunConfig, task: str) -> str | None:
    if config.teacher is not None or task != "embedding":
        return config.teacher
    if config.init is None:
        raise ValueError("a new model without a head has nothing to learn from: give a teacher, or a model with a head")
    return config.init  # it is its own teacher


def paper_length(model: str) -> str:
    """How long the paper's recipe of a model trains at most, as text."""
    recipe = _RECIPES[model, "paper"]
    return f"{recipe['max_steps']:,} steps" if "max_steps" in recipe else f"{recipe['epochs']} epochs"


def _checkpoint(name: str, given: str | None) -> str | None:
    """The folder of the checkpoint itself: a finished run stands for its model."""
    if given is None:
        return None
    run = RunFolder(given)
    if not run.exists or (run.path / "config.json").is_file():  # a checkpoint may hold some other config.yaml
        return str(run.path)
    if not run.finished:
        raise ValueError(f"{name}={given!r} is an unfinished run: name one of its checkpoints, or finish it")
    return str(run.model)


def _model_config(config: RunConfig) -> Any:
    """The config of the model to train: from its preset, from a folder, or from the checkpoint it starts from."""
    if config.init is not None:
        if config.changes:
            raise ValueError(
                f"changes={config.changes!r} cannot be applied to init={config.init!r}: its weights have their sizes"
            )
        own = _read_config("init", config.init)
        named = presets.MODELS[config.model].config.model_type if config.model in presets.MODELS else config.model
        if named not in (None, own.model_type):
            raise ValueError(f"init={config.init!r} holds a {own.model_type}, not model={config.model!r}: leave it out")
        return own
    return new_config(config, config.changes)


def new_config(config: RunConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    """The config of a new model, from its preset or its folder, with other values in some fields."""
    name = config.model or _DEFAULT
    if name in presets.MODELS:
        given = presets.config(name, config.preset)
    elif Path(name).is_dir():
        given = _read_config("model", name)
    else:
        near = did_you_mean(name, presets.MODELS)
        raise ValueError(f"model={name!r} is neither a preset nor a folder with a config.json{near}")
    for field in changes:
        if not presets.is_field(given, field):
            raise ValueError(
                f"changes.{field} is not a field of {type(given).__name__}{did_you_mean(field, given.to_dict())}"
            )
    try:
        return (
            presets.config(name, config.preset, **changes)
            if name in presets.MODELS
            else _read_config("model", name, **changes)
        )
    # a field of another type, or fields that contradict each other
    except (StrictDataclassError, TypeError, AttributeError) as error:
        raise ValueError(f"changes={changes!r}: {' '.join(str(error).split())}") from None


def _read_config(name: str, folder: str, **changes: Any) -> PreTrainedConfig:
    file = Path(folder) / "config.json"
    refuse_code(file)
    content = None
    with suppress(ValueError):  # transformers says what is wrong with it
        content = read_json(file)
    check_counts(file, content)
    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **changes
        )
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        kind = "checkpoint folder" if name == "init" else "folder with a config.json"
        raise ValueError(f"{name}={folder!r} is not a {kind}: {first}") from None
    return found


def _samples(config: RunConfig, sizes: Any) -> DataConfig:
    task = config.task
    recipe: dict[str, Any] = {}
    if task in ("mlm", "clm", "seq2seq") or (task == "embedding" and hasattr(sizes, "vocab_size")):
        longest = getattr(sizes, "max_position_embeddings", None) or 512
        recipe = dict(length=min(512 if task == "clm" else 128, longest))
        recipe["vocab_size"] = sizes.vocab_size
    elif task in ("classification", "embedding"):
        side = sizes.image_size if config.init is None else image_fields(sizes, config.init)["image_size"]
        recipe = dict(image_size=side, augment="paper" if config.preset == "paper" else "none")
        recipe["label_smoothing"] = 0.1 if config.preset == "paper" else 0.0
    else:
        recipe = dict(in_len=sizes.in_len, out_len=sizes.out_len)
    samples = _filled(config.samples, recipe)
    longest = getattr(sizes, "max_position_embeddings", None)
    if config.init is not None and longest is not None and (samples.length or 0) > longest:
        raise ValueError(f"samples.length={samples.length}: init={config.init!r} has {longest} positions")
    return samples


def _filled(given: Any, recipe: dict[str, Any]) -> Any:
    return dataclasses.replace(given, **{k: v for k, v in recipe.items() if getattr(given, k) is None})


def _check_train(train: TrainConfig) -> None:
    for name in _AT_LEAST_ONE:
        value = getattr(train, name)
        if value not in (None, "epoch") and value < 1:
            raise ValueError(f"train.{name}={value}: must be at least 1")
    not_negative = ("lr", "weight_decay", "clip_norm", "penalty", "warmup_steps", "patience", "outlier_steps", "min_lr")
    for name in (*not_negative, "workers", "anneal_steps", "weight_bound"):
        value = getattr(train, name)
        if value not in (None, "epoch") and not 0 <= value < float("inf"):
            raise ValueError(f"train.{name}={value}: must be finite and not negative")
    if train.lr and train.schedule != "halving" and (train.min_lr or 0.0) > train.lr:
        raise ValueError(
            f"train.min_lr={train.min_lr} is above train.lr={train.lr}, so the rate would rise: lower min_lr as well"
        )
    if train.betas is not None and not all(0 <= beta < 1 for beta in train.betas):
        raise ValueError(f"train.betas={train.betas}: each must be at least 0 and below 1")
    if not 0 <= train.seed < 2**32:
        raise ValueError(f"train.seed={train.seed}: must be from 0 to 2³² − 1")
    if train.batch_size is not None and train.batch_size % train.accumulate:
        raise ValueError(
            f"train.batch_size={train.batch_size} is not divisible by train.accumulate={train.accumulate}: "
            "batch_size counts the samples of a whole step"
        )
