"""The optimizer and the learning rate schedule of the paper's recipes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from outeffhop.lab.training.config import TrainConfig

__all__ = ["make_optimizer", "make_schedule"]


def make_optimizer(model: nn.Module, train: TrainConfig, decay_norms: bool) -> Optimizer:
    """Adam or AdamW. Weight decay leaves out biases, a method's own parameters and, unless ``decay_norms``, norms."""
    norms = {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if "Norm" in type(module).__name__
        for own, _ in module.named_parameters(recurse=False)
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        ours = ".outeffhop." in name or ".state." in name or ".association." in name
        free = name.endswith("bias") or ours or (name in norms and not decay_norms)
        (plain if free else decayed).append(p)
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": train.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    kind: Any = torch.optim.Adam if train.optimizer == "adam" else torch.optim.AdamW
    on_cuda = all(p.device.type == "cuda" for p in (*decayed, *plain))
    groups = [g for g in groups if g["params"]]
    return kind(groups, lr=train.lr, betas=train.betas, fused=on_cuda)


def make_schedule(optimizer: Optimizer, train: TrainConfig, steps_per_epoch: int) -> LambdaLR:
    """Linear or cosine decay to ``min_lr`` after warm-up, or halving after every two epochs."""
    return LambdaLR(optimizer, _factor(train, steps_per_epoch))


def _factor(train: TrainConfig, steps_per_epoch: int) -> Callable[[int], float]:
    steps, warmup = train.max_steps or 1, train.warmup_steps or 0
    least = (train.min_lr or 0.0) / train.lr if train.lr else 0.0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min((step - warmup) / max(steps - warmup, 1), 1.0)
        if train.schedule == "cosine":
            return least + (1 - least) * 0.5 * (1 + math.cos(math.pi * done))
        if train.schedule == "halving":
            return 0.5 ** min(step // (2 * steps_per_epoch), 5)
        return least + (1 - least) * (1.0 - done)

    return factor
