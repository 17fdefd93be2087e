"""The settings of a training run, as dataclasses, as a YAML file and as command-line flags.

The recipe of the model and its size (``outeffhop.lab.training.recipes``) fills in fields that are None. The
``config.yaml`` in a run's folder has all of them, with steps where epochs were given.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outeffhop._dataclass_io import from_json_value
from outeffhop._io import to_plain

__all__ = ["DataConfig", "TrainConfig", "RunConfig", "from_dict", "to_dict", "from_yaml", "to_yaml"]


@dataclass(frozen=True)
class DataConfig:
    """How data is turned into samples.

    Attributes:
        length: text: tokens per sample.
        vocab_size: text: size of the vocabulary if a tokenizer is trained.
        tokenizer: text: folder of a tokenizer, or hub:NAME; by default one is trained.
        image_size: images: side to resize to.
        augment: images: none, light or paper.
        label_smoothing: images: share of the target spread over all classes.
        in_len: series: rows of the past.
        out_len: series: rows to forecast.
        cache_dir: folder in which tokens are cached.
    """

    length: int | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    image_size: int | None = None
    augment: Literal["none", "light", "paper"] | None = None
    label_smoothing: float | None = None
    in_len: int | None = None
    out_len: int | None = None
    cache_dir: str | None = None


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained.

    Attributes:
        lr: highest learning rate.
        max_steps: optimizer steps.
        epochs: passes over the training data, instead of max_steps.
        batch_size: samples per step, over all devices and accumulation.
        accumulate: number of parts in which each device computes its share of a step; the update is the same.
        optimizer: adamw or adam.
        schedule: linear or cosine decay to min_lr, or halving every two epochs, five times.
        min_lr: learning rate at the end of linear and cosine.
        warmup_steps: steps from 0 to lr.
        weight_decay: not applied to biases, LayerNorms (in OPT only biases), gates and sinks.
        betas: moment decay rates of Adam.
        clip_norm: largest gradient norm; 0: no clipping.
        penalty: weight of a penalty on the outliers of outlier_tensors in the loss, after warmup_steps; 0: none.
        penalty_kind: log_tail, excess_range (nothing for short tails, more for long ones), excess_size (also
            where all values are large), log_kurtosis (which saturates beside one huge value) or fourth_power.
        penalty_tensors: what it is on, as for outlier_tensors, which is the default.
        weight_bound: largest weight of a matrix, in its standard deviations, from the middle of the run on; 0: any.
        anneal_steps: with --init, steps from softmax to the method's sinks and gates; a third of max_steps by default.
        patience: evaluations without improvement before training stops; 0: never.
        keep_best: save the model of the best evaluation instead of the last one; STanHop-Net does by default.
        eval_steps: steps between evaluations, or epoch; the last step is always evaluated.
        eval_batches: batches of the validation set to evaluate on; None: all.
        log_steps: steps between lines of metrics.jsonl.
        save_steps: steps between checkpoints, or epoch; the last step is always saved.
        keep: number of checkpoints to keep, besides the best one.
        outlier_steps: steps between measurements of outliers, or epoch; 0: only at the end.
        outlier_batches: batches of the validation set to measure outliers on.
        outlier_tensors: paper, paper+inputs (also of the MLPs' last projections), all, or patterns of module names
            separated by commas.
        seed: of weights, order of samples and masks.
        precision: fp32 (without TF32), bf16 or fp16 autocast.
        compile: use torch.compile.
        gradient_checkpointing: save memory at the cost of time.
        fsdp: shard weights over the processes of torchrun; otherwise each has a copy.
        timeout: seconds that processes of torchrun wait for each other; then the run ends and names the missing one.
        workers: processes that load data.
        device: cpu or cuda; by default a GPU if there is one.
        track: also log to tensorboard, trackio or wandb.
    """

    lr: float | None = None
    max_steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    optimizer: Literal["adamw", "adam"] | None = None
    schedule: Literal["linear", "cosine", "halving"] | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    clip_norm: float | None = None
    penalty: float = 0.0
    penalty_kind: Literal["log_tail", "excess_range", "excess_size", "log_kurtosis", "fourth_power"] = "log_tail"
    penalty_tensors: str | None = None
    weight_bound: float = 0.0
    anneal_steps: int | None = None
    patience: int | None = None
    keep_best: bool | None = None
    eval_steps: int | Literal["epoch"] | None = None
    eval_batches: int | None = None
    log_steps: int | None = None
    save_steps: int | Literal["epoch"] | None = None
    keep: int = 2
    outlier_steps: int | Literal["epoch"] | None = None
    outlier_batches: int = 4
    outlier_tensors: str = "paper"
    seed: int = 0
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    fsdp: bool = False
    timeout: int = 1800
    workers: int = 0
    device: Literal["cpu", "cuda"] | None = None
    track: Literal["none", "tensorboard", "trackio", "wandb"] = "none"


@dataclass(frozen=True)
class RunConfig:
    """A training run.

    Attributes:
        model: bert, opt, vit or stanhop, or a folder with a config.json to build from; opt by default.
        preset: size of the model, and of its recipe: tiny, small or paper.
        method: attention method, as listed by `outeffhop methods`.
        data: what to train on, as listed by `outeffhop data`.
        out: folder of the run; must be new or empty.
        init: folder of a checkpoint to start from instead of a new model; it is converted to the method.
        teacher: folder of a checkpoint whose outputs are imitated, instead of labels; without a head, init by default.
        task: what the model learns; by default what its architecture is for.
        changes: fields of the model's config to change, by name.
        train: how the model is trained.
        samples: how data is turned into samples.
    """

    model: str | None = None
    preset: Literal["tiny", "small", "paper"] = "tiny"
    method: str = "outeffhop"
    data: str = ""
    out: str = ""
    init: str | None = None
    teacher: str | None = None
    task: str | None = None
    changes: dict[str, int | float | bool | str] = field(default_factory=dict)
    train: TrainConfig = TrainConfig()
    samples: DataConfig = DataConfig()


def to_dict(config: Any) -> dict[str, Any]:
    """A config as JSON and YAML have it: nested mappings, lists for tuples."""
    return typing.cast(dict[str, Any], to_plain(dataclasses.asdict(config)))


def from_dict(values: Any) -> RunConfig:
    """The inverse of ``to_dict``; raises a ValueError that names an unknown field or a wrong value."""
    return typing.cast(RunConfig, from_json_value(RunConfig, values))


def from_yaml(path: str | Path) -> RunConfig:
    """Reads a config file; fields that it leaves out have their defaults."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config={str(path)!r} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        # the last five are what the parser raises for a tag that does not fit its value, or for too deep nesting
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"config={str(path)!r} is not YAML: {said}") from None
    try:
        return from_dict({} if values is None else values)
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None


def to_yaml(config: RunConfig) -> str:
    """The text of a config file; it begins with the command that runs it."""
    import yaml

    text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    return f"# outeffhop train --config THIS_FILE --out NEW_FOLDER\n{text}"
