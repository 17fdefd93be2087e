"""The settings of a mending, as a dataclass, as a YAML file and as command-line flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from outeffhop._dataclass_io import from_json_value
from outeffhop._io import to_plain

__all__ = ["MendConfig", "from_mend_yaml", "to_mend_yaml"]


@dataclass(frozen=True, kw_only=True)
class MendConfig:
    """How a checkpoint is mended.

    Attributes:
        checkpoint: folder of a run or of a saved model; it is never changed.
        data: what the model is fine-tuned and measured on, as for `outeffhop data`.
        out: folder for the mended model and its report; must be new or empty.
        method: auto keeps the architecture; any other is a method that the model is converted to.
        steps: optimizer steps.
        minutes: train for about this long instead of a number of steps; 10 by default.
        penalty: weight of the penalty on outliers in the loss; default: 0.02 for excess_range, half of it with a
            teacher.
        penalty_kind: excess_range (default), excess_size, log_tail, log_kurtosis or fourth_power; see
            train.penalty-kind.
        weight_bound: largest weight of a matrix, in its standard deviations, that is left in the end; 0: any.
        lr: highest learning rate; by default 3e-4 for text with labels, 2e-4 or less for others.
        teacher: checkpoint whose outputs are imitated instead of learning from labels; CHECKPOINT itself is allowed,
            and is the default for a model without a head.
        plain: also fine-tune without any remedy, to compare with; this takes as long again.
        batch_size: samples per step, and per batch that is measured.
        accumulate: number of parts in which a step is computed, to save memory.
        length: text: tokens per sample; by default 512 for causal models and 128 for others.
        tokenizer: folder of the tokenizer, if the checkpoint has none.
        batches: measure on at most this many batches.
        calibration_batches: batches of training data that ranges are found on.
        seeds: number of calibration draws.
        seed: of training.
        precision: fp32 or bf16 autocast.
        gradient_checkpointing: save memory at the cost of time.
        device: cpu or cuda; by default a GPU if there is one.
    """

    checkpoint: str
    data: str
    out: str
    method: str = "auto"
    steps: int | None = None
    minutes: float | None = None
    penalty: float | None = None
    penalty_kind: Literal["log_tail", "excess_range", "excess_size", "log_kurtosis", "fourth_power"] | None = None
    weight_bound: float = 16.0
    lr: float | None = None
    teacher: str | None = None
    plain: bool = False
    batch_size: int = 16
    accumulate: int = 1
    length: int | None = None
    tokenizer: str | None = None
    batches: int = 16
    calibration_batches: int = 16
    seeds: int = 1
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    gradient_checkpointing: bool = False
    device: Literal["cpu", "cuda"] | None = None

    def check(self) -> None:
        """Raises a ValueError that names a wrong value."""
        for name in ("steps", "batch_size", "accumulate", "length", "batches", "calibration_batches", "seeds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', '-')}={value}: must be at least 1")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise ValueError(f"minutes={self.minutes}: must be a positive number")
        if self.steps is not None and self.minutes is not None:
            raise ValueError(f"steps={self.steps} and minutes={self.minutes} exclude each other: leave out one of them")
        for name in ("checkpoint", "data", "out"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing")


def to_mend_yaml(config: MendConfig) -> str:
    import yaml

    text = yaml.safe_dump(to_plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)
    return f"# outeffhop mend: continue it with outeffhop resume FOLDER\n{text}"


def from_mend_yaml(path: Path) -> MendConfig:
    import yaml

    try:
        values: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return cast(MendConfig, from_json_value(MendConfig, values))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
