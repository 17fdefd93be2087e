"""What a run is told: dataclasses, a YAML file, and command-line flags, three forms of one thing.

Fields left at None are filled in by the recipe of the model and its size (``outeffhop.lab.training.recipes``);
``config.yaml`` in a run's folder has every one of them.
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
    """How data is cut into samples.

    Attributes:
        length: text: tokens of a sample.
        vocab_size: text: of the tokenizer that is trained where none is given.
        tokenizer: text: folder of a tokenizer.
        image_size: images: side they are resized to.
        augment: images: none, light or paper.
        label_smoothing: images: share of the target spread over all classes.
        in_len: series: rows given.
        out_len: series: rows to forecast.
        cache_dir: where tokens are kept.
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
    """How it is trained.

    Attributes:
        lr: the highest learning rate.
        max_steps: optimizer steps.
        batch_size: samples of a step, over all devices and accumulation.
        accumulate: parts a device's share of a step is computed in; the update is the same.
        optimizer: adamw or adam.
        schedule: linear or cosine to min_lr, or halved after every two epochs, five times.
        min_lr: where linear and cosine end.
        warmup_steps: from 0 to lr.
        weight_decay: not on biases and LayerNorms (OPT: not on biases), gates and sinks.
        betas: of Adam.
        clip_norm: of the gradient; 0 is none.
        patience: evaluations without gain before it stops; 0 is none.
        eval_steps: between evaluations; the last step is always one.
        eval_batches: of the validation set; None is all.
        log_steps: between lines of metrics.jsonl.
        save_steps: between checkpoints; the last step is always one.
        keep: how many checkpoints stay.
        outlier_steps: between measurements of outliers; 0 is none but the last.
        outlier_batches: of the validation set.
        outlier_tensors: paper, all, or patterns of module names, separated by commas.
        seed: of weights, order, masks.
        precision: fp32 (without TF32), bf16 or fp16 autocast.
        compile: by torch.compile.
        gradient_checkpointing: trades time for memory.
        fsdp: shard weights over the processes of torchrun, which otherwise have a copy each.
        timeout: seconds that processes of torchrun wait for one of them before the run ends and names it.
        workers: processes that load data.
        device: cpu or cuda; a GPU where there is one.
        track: also to tensorboard, trackio or wandb.
    """

    lr: float | None = None
    max_steps: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    optimizer: Literal["adamw", "adam"] | None = None
    schedule: Literal["linear", "cosine", "halving"] | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    clip_norm: float | None = None
    patience: int | None = None
    eval_steps: int | None = None
    eval_batches: int | None = None
    log_steps: int | None = None
    save_steps: int | None = None
    keep: int = 2
    outlier_steps: int | None = None
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
        model: bert, opt, vit or stanhop.
        preset: its size: tiny, small or paper.
        method: of its attention, as in `outeffhop methods`.
        data: as in `outeffhop data`.
        out: the run's folder, which must not hold a run yet.
        init: folder of a checkpoint to go on from, instead of new weights; it is converted to the method.
        changes: fields of the model's config, by name.
        train: how it is trained.
        samples: how data is cut into samples.
    """

    model: Literal["bert", "opt", "vit", "stanhop"] = "opt"
    preset: Literal["tiny", "small", "paper"] = "tiny"
    method: str = "outeffhop"
    data: str = ""
    out: str = ""
    init: str | None = None
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
    """A config file; the fields it leaves out have their defaults."""
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"config={str(path)!r} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        # the last five are how the parser takes a tag that its value does not fit, or nesting without end
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"config={str(path)!r} is no YAML: {said}") from None
    try:
        return from_dict({} if values is None else values)
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None


def to_yaml(config: RunConfig) -> str:
    """A config file, that begins with the command that runs it."""
    import yaml

    text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    return f"# outeffhop train --config THIS_FILE --out NEW_FOLDER\n{text}"
