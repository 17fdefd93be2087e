"""How many steps of a run fit into some minutes: a few are taken and timed."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from outeffhop.lab.data import Prepared
from outeffhop.lab.training.checks import chosen_tensors
from outeffhop.lab.training.config import RunConfig
from outeffhop.lab.training.imitation import inputs_of
from outeffhop.lab.training.optimization import make_optimizer
from outeffhop.lab.training.starting_model import first_model, load_teacher
from outeffhop.outliers import OutlierPenalty

__all__ = ["steps_in"]

_TIMED = 3  # after one that also fills caches


def steps_in(minutes: float, config: RunConfig, prepared: Prepared) -> int:
    """The number of steps of a resolved config that take about so many minutes on this device; at least 1."""
    train = config.train
    device = torch.device(train.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model, _ = first_model(config, prepared, device)
    teacher = load_teacher(config, model, device)
    model.to(device).train()
    if train.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    chosen = chosen_tensors(str(train.penalty_tensors))
    penalty = OutlierPenalty(model, train.penalty, kind=train.penalty_kind, tensors=chosen)
    optimizer = make_optimizer(model, train, decay_norms=False)
    size = train.batch_size or 1
    seconds = []
    for turn in range(1 + _TIMED):
        begin = time.perf_counter()
        for part in range(train.accumulate):
            first = (turn * size + part * size // train.accumulate) % len(prepared.train)
            rows = [prepared.train[(first + i) % len(prepared.train)] for i in range(size // train.accumulate)]
            batch = {name: value.to(device) for name, value in prepared.collate(rows).items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
                _loss(model, batch, teacher, penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return max(1, int(minutes * 60 / statistics.median(seconds[1:])))


def _loss(model: Any, batch: Any, teacher: Any, penalty: OutlierPenalty) -> Any:
    if teacher is None:
        return model(**{name: value for name, value in batch.items() if name != "soft_labels"}).loss
    return teacher.loss(model(**inputs_of(batch, model)), batch) + penalty.term()
