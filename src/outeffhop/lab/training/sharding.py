"""FSDP: the weights of a model spread over the processes of torchrun, on GPUs or (gloo) CPUs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

__all__ = ["shard", "Sharded"]

_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


def shard(model: Any, device: torch.device, precision: str) -> None:
    """In place: every transformer block is gathered while it is at work, and no longer.

    accelerate leaves FSDP out on CPUs without a word, hence PyTorch's own here, on every device alike.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    dtype = _PRECISION.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    blocks = set(model._no_split_modules or ())
    # weights that two places share (embedding and head) stay with the whole
    every = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    shared = {i for i, count in Counter(every).items() if count > 1}
    for module in list(model.modules()):
        if type(module).__name__ in blocks and not any(id(p) in shared for p in module.parameters()):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Sharded(nn.Module):
    """A sharded model as Trainer sees it: wrapped already, and not to be wrapped for DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
