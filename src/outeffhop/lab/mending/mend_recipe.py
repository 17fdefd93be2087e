"""The recipe of a mending: which method a model gets, and how it is fine-tuned."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from transformers import AutoConfig

from outeffhop.lab.mending.mend_config import MendConfig
from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig
from outeffhop.lab.training.recipes import resolve
from outeffhop.methods import METHODS
from outeffhop.models.config_entry import method_of
from outeffhop.models.stanhop import StanhopConfig

__all__ = ["minutes_of", "recipe", "with_steps"]

_MINUTES = 10.0
_RATES = {  # by task
    "clm": 3e-4,
    "mlm": 3e-4,
    "seq2seq": 3e-4,
    "classification": 1e-4,
    "forecasting": 1e-4,
    "embedding": 2e-4,
}
# kind of the penalty → its weight beside the loss, and the tensors it is on
_PENALTIES = {
    "log_tail": (0.1, "paper"),
    "excess_range": (0.02, "paper+inputs"),
    "excess_size": (0.02, "paper+inputs"),
    "log_kurtosis": (0.1, "paper"),
    "fourth_power": (0.1, "paper"),
}
_PENALTY: Literal["excess_range"] = "excess_range"
_IMITATING = 0.5  # of the weight, beside the smaller loss of a model that imitates a teacher


def recipe(config: MendConfig, *, plain: bool = False) -> RunConfig:
    """The run that mends, resolved, with its number of steps still to be found; or the one it is compared with.

    Args:
        plain: without any remedy: no other method and no penalty.
    """
    kept = plain or config.method == "auto"
    given: dict[str, Any] = dict(
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seed=config.seed,
        precision=config.precision,
        gradient_checkpointing=config.gradient_checkpointing,
        device=config.device,
        eval_batches=config.batches,
        outlier_batches=min(config.batches, 4),
        keep=1,
        keep_best=False,  # by the metric alone the best step may be one that still has its outliers
        patience=0,
        max_steps=config.steps,
        lr=config.lr,
        penalty=config.penalty or 0.0,
        penalty_kind=config.penalty_kind or _PENALTY,
        weight_bound=0.0 if plain else config.weight_bound,
    )
    resolved = resolve(
        RunConfig(
            method="vanilla" if kept else config.method,
            data=config.data,
            init=config.checkpoint,
            teacher=config.teacher,
            train=TrainConfig(**given),
            samples=DataConfig(length=config.length, tokenizer=config.tokenizer),
        )
    )
    weight, tensors = _PENALTIES[resolved.train.penalty_kind]
    if resolved.teacher is not None:
        weight *= _IMITATING
    return dataclasses.replace(
        resolved,
        method=_own_method(str(resolved.init)) if kept else resolved.method,
        train=dataclasses.replace(
            resolved.train,
            lr=_RATES[str(resolved.task)] if config.lr is None else config.lr,
            penalty=0.0 if plain else weight if config.penalty is None else config.penalty,
            penalty_tensors=tensors,
        ),
    )


def _own_method(checkpoint: str) -> str:
    """The method of a checkpoint: what our measurements support is to keep it, and to leave the rest to the penalty."""
    found: Any = AutoConfig.from_pretrained(checkpoint, local_files_only=True, trust_remote_code=False)
    if isinstance(found, StanhopConfig):
        return str(found.method)
    return str(method_of(found) or METHODS["vanilla"].method)


def minutes_of(config: MendConfig) -> float | None:
    """How long to train, if a number of steps was not given."""
    return None if config.steps is not None else config.minutes or _MINUTES


def with_steps(run: RunConfig, steps: int, out: str) -> RunConfig:
    """The run with a number of steps and a folder: everything that is done now and then depends on the number."""
    train = dataclasses.replace(
        run.train,
        max_steps=steps,
        warmup_steps=max(1, steps // 20),
        anneal_steps=steps // 3,
        eval_steps=max(1, steps // 4),
        save_steps=max(1, min(100, steps // 4)),
        outlier_steps=max(1, steps // 8),
        log_steps=max(1, min(10, steps // 20)),
    )
    return dataclasses.replace(run, train=train, out=out)
