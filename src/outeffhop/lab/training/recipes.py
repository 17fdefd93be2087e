"""The recipe of each model and size: the paper's, and ours for two CPU cores or one GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

from outeffhop._naming import did_you_mean
from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig, from_dict, to_dict
from outeffhop.lab.training.rundir import RunFolder
from outeffhop.methods import Method
from outeffhop.models import presets
from outeffhop.models.remote_code import refuse_code

__all__ = ["TASK_OF", "paper_steps", "resolve"]

# model → the task it learns
TASK_OF = {"bert": "mlm", "opt": "clm", "vit": "classification", "stanhop": "forecasting"}

_TEXT = dict(optimizer="adamw", clip_norm=1.0, min_lr=0.0, patience=0)
_BERT = dict(_TEXT, weight_decay=0.01, betas=(0.9, 0.999), schedule="linear")
_OPT = dict(_TEXT, weight_decay=0.1, betas=(0.9, 0.95), schedule="linear")
_VIT = dict(
    optimizer="adamw", weight_decay=0.03, betas=(0.9, 0.999), schedule="cosine", min_lr=1e-5, clip_norm=0.0, patience=0
)
_STANHOP = dict(
    optimizer="adam",
    weight_decay=0.0,
    betas=(0.9, 0.999),
    schedule="halving",
    warmup_steps=0,
    clip_norm=5.0,
    min_lr=0.0,
    patience=5,
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
    ("stanhop", "tiny"): dict(_STANHOP, lr=1e-3, batch_size=32, max_steps=1000, **_OFTEN),
    ("stanhop", "small"): dict(_STANHOP, lr=1e-3, batch_size=128, max_steps=4000, **_OFTEN),
    # at most 100 epochs of ETTh1; patience ends it long before
    ("stanhop", "paper"): dict(_STANHOP, lr=1e-4, batch_size=128, max_steps=6600, **_OFTEN),
}

_AT_LEAST_ONE = (
    "max_steps",
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
    """Fills in every open field from the recipe, and checks all of them."""
    config = from_dict(to_dict(config))  # a config made in Python is held to the same types as a file
    if not config.data:
        raise ValueError("data is missing: a spec such as builtin:text, or a path (`outeffhop data` lists them)")
    if config.init is not None:
        config = dataclasses.replace(config, init=_checkpoint(config.init))
    method = str(Method.parse(config.method))
    train = _filled(config.train, _RECIPES[config.model, config.preset])
    anneal = 0 if config.init is None else (train.max_steps or 0) // 3
    train = _filled(train, {"anneal_steps": anneal})
    _check_train(train)
    return dataclasses.replace(config, method=method, train=train, samples=_samples(config, _model_config(config)))


def paper_steps(model: str) -> int:
    """The most steps that the paper's recipe of a model takes."""
    return int(_RECIPES[model, "paper"]["max_steps"])


def _checkpoint(init: str) -> str:
    """The folder of the checkpoint itself: a finished run stands for its model."""
    run = RunFolder(init)
    if not run.exists or (run.path / "config.json").is_file():  # a checkpoint may hold some other config.yaml
        return str(run.path)
    if not run.finished:
        raise ValueError(f"init={init!r} is an unfinished run: name one of its checkpoints, or finish it")
    return str(run.model)


def _model_config(config: RunConfig) -> Any:
    """The config of the model to train, from its preset or from the checkpoint it starts from."""
    preset: PreTrainedConfig = presets.config(config.model, config.preset)
    for name in config.changes:
        if not presets.is_field(preset, name):
            near = did_you_mean(name, preset.to_dict())
            raise ValueError(f"changes.{name} is not a field of {type(preset).__name__}{near}")
    if config.init is None:
        try:
            return presets.config(config.model, config.preset, **config.changes)
        # a field of another type, or fields that contradict each other
        except (StrictDataclassError, TypeError, AttributeError) as error:
            raise ValueError(f"changes={config.changes!r}: {' '.join(str(error).split())}") from None
    if config.changes:
        raise ValueError(
            f"changes={config.changes!r} cannot be applied to init={config.init!r}: its weights have their sizes"
        )
    refuse_code(Path(config.init) / "config.json")
    try:
        own: PreTrainedConfig = AutoConfig.from_pretrained(config.init, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"init={config.init!r} is not a checkpoint folder: {first}") from None
    if own.model_type != preset.model_type:
        raise ValueError(f"init={config.init!r} holds a {own.model_type}, not model={config.model!r}")
    return own


def _samples(config: RunConfig, sizes: Any) -> DataConfig:
    task = TASK_OF[config.model]
    recipe: dict[str, Any] = {}
    if task in ("mlm", "clm"):
        recipe = dict(length=min(128 if task == "mlm" else 512, sizes.max_position_embeddings))
        recipe["vocab_size"] = sizes.vocab_size
    elif task == "classification":
        recipe = dict(image_size=sizes.image_size, augment="paper" if config.preset == "paper" else "none")
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
        if value is not None and value < 1:
            raise ValueError(f"train.{name}={value}: must be at least 1")
    not_negative = ("lr", "weight_decay", "clip_norm", "penalty", "warmup_steps", "patience", "outlier_steps", "min_lr")
    for name in (*not_negative, "workers", "anneal_steps"):
        value = getattr(train, name)
        if value is not None and not 0 <= value < float("inf"):
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
