"""What a run is told: dataclasses, a YAML file, and command-line flags, three forms of one thing.

Fields left at None are filled in by the recipe of the model and its size (``outeffhop.lab.training.recipes``);
``config.yaml`` in a run's folder has every one of them.
"""

from __future__ import annotations

import dataclasses
import reprlib
import types
import typing
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from outeffhop._naming import did_you_mean

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
    out = dataclasses.asdict(config)
    betas = out.get("train", out).get("betas")
    if betas is not None:
        out.get("train", out)["betas"] = list(betas)
    return out


def from_dict(values: Any, kind: type[Any] = RunConfig, at: str = "") -> Any:
    """The inverse of ``to_dict``; a key or a value that cannot be is refused by its name."""
    if not isinstance(values, dict):
        raise ValueError(f"{at or 'the config'} is {_shown(values)}: a mapping of names to values is needed")
    hints = typing.get_type_hints(kind)
    made = {}
    for key, value in values.items():
        if key not in hints:
            name = _shown(key).strip("'")
            raise ValueError(f"{at}{name} is unknown{did_you_mean(key, hints)} There are: {', '.join(hints)}")
        hint_type = hints[key]
        if dataclasses.is_dataclass(hint_type):
            made[key] = from_dict(value, hint_type, f"{at}{key}.")  # type: ignore[arg-type]
        else:
            made[key] = _read(f"{at}{key}", value, hint_type)
    return kind(**made)


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
        return typing.cast(RunConfig, from_dict({} if values is None else values))
    except ValueError as error:
        raise ValueError(f"config={str(path)!r}: {error}") from None


def to_yaml(config: RunConfig) -> str:
    """A config file, that begins with the command that runs it."""
    import yaml

    text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
    return f"# outeffhop train --config THIS_FILE --out NEW_FOLDER\n{text}"


def _read(name: str, value: Any, hint: Any) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        found = _fits(value, option)
        if found is not None or (option is type(None) and value is None):
            return found
    raise ValueError(f"{name}={_shown(value)}: {' or '.join(map(_spell, options))} is needed")


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 2, 80, 80


def _shown(value: Any) -> str:
    """The value, or its beginning: by its anchors a small YAML file may stand for more than any memory holds."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python does not write out a whole number of thousands of digits
        return f"a {type(value).__name__}"


def _fits(value: Any, option: Any) -> Any:
    """The value as the option has it, or None."""
    origin = typing.get_origin(option)
    if origin is Literal:
        return value if value in typing.get_args(option) and not isinstance(value, bool) else None
    if origin is tuple:
        parts = [_fits(v, float) for v in value] if isinstance(value, list | tuple) else []
        whole = len(parts) == len(typing.get_args(option)) and None not in parts
        return tuple(parts) if whole else None
    if origin is dict or option is dict:
        # the values of "changes", the one mapping there is
        plain = isinstance(value, dict) and all(
            isinstance(k, str) and isinstance(v, int | float | str) for k, v in value.items()
        )
        return {k: _number_or_text(v) for k, v in value.items()} if plain else None
    if option is float:
        if isinstance(value, str):
            found = _number_or_text(value)
            return None if isinstance(found, str) else found
        try:
            return float(value) if _is_number(value) else None
        except OverflowError:  # a whole number beyond 1e308
            return None
    if option is int:
        return value if isinstance(value, int) and not isinstance(value, bool) else None
    if option in (bool, str):
        return value if isinstance(value, option) else None
    return None


def _number_or_text(value: Any) -> Any:
    """YAML reads 4e-4, without a dot, as a string; as a flag it is a number."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spell(option: Any) -> str:
    if option is type(None):
        return "nothing"
    if typing.get_origin(option) is Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    names = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        dict: "a mapping of names to numbers or text",
    }
    origin = typing.get_origin(option) or option
    return names.get(origin, "a list of two numbers")
