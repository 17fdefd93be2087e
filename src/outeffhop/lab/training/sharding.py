"""FSDP: a model's weights sharded over the processes of torchrun, on GPUs or (gloo) CPUs."""

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
    """Shards a model in place; the weights of each transformer block are gathered only while it is computed.

    This uses PyTorch's own FSDP on every device: accelerate silently skips FSDP on CPUs.
    """
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    dtype = _PRECISION.get(precision)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    blocks = set(model._no_split_modules or ())
    # weights used in two places (embedding and head) are sharded with the whole model
    every = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    shared = {i for i, count in Counter(every).items() if count > 1}
    for module in list(model.modules()):
        if type(module).__name__ in blocks and not any(id(p) in shared for p in module.parameters()):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Sharded(nn.Module):
    """A sharded model for ``Trainer.model_wrapped``: Trainer takes it as wrapped already, and adds no DDP."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)
