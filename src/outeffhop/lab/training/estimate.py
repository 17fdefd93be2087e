"""What a run will cost: parameters, operations, time and memory.

The operations of one step are counted: forward and backward run on fake tensors, which have shapes and no contents,
while floating point operations and saved activations are recorded. Time and memory are estimates derived from these.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from outeffhop.lab.data import Prepared
from outeffhop.lab.training.checks import check_device, check_run
from outeffhop.lab.training.config import RunConfig
from outeffhop.lab.training.starting_model import build

__all__ = ["Estimate", "estimate"]

# The share of a large matrix product's speed that a training step is assumed to reach; not measured.
_SHARE = 0.4


@dataclass(frozen=True)
class Estimate:
    """What a run will cost.

    Attributes:
        parameters: of the model, gates and sinks included.
        samples_per_step, tokens_per_step: tokens are None for data other than text.
        epochs: passes over the training set.
        flops_per_step: floating point operations of matrix products, forward and backward, without those inside a
            fused attention kernel.
        seconds: for the whole run on this device, at 0.4 of the speed of a large matrix product.
        memory_mib: for weights, gradients, optimizer and saved activations on one device.
    """

    parameters: int
    samples_per_step: int
    tokens_per_step: int | None
    epochs: float
    flops_per_step: int
    seconds: float
    memory_mib: float


def estimate(config: RunConfig, prepared: Prepared) -> Estimate:
    """The cost of a resolved config on this device; raises for what ``train`` would refuse."""
    train = config.train
    check_device(train)
    batch_size = train.batch_size or 1
    part = max(batch_size // train.accumulate, 1)
    sample = prepared.collate([prepared.train[0]])
    kept: dict[tuple[int, int], int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[id(storage), storage.nbytes()] = storage.nbytes()
        held.append(storage)  # its id could be reused otherwise
        return saved

    held: list[Any] = []
    with nullcontext() if config.init else torch.device("meta"):  # a checkpoint's weights are read, and dropped
        empty: Any = build(config, prepared.changes)
        check_run(config, empty, prepared)
        empty.to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        # in evaluation mode: OPT draws a number to decide whether to drop a layer, and fake tensors have no values
        model: Any = empty.to_empty(device="cpu").eval()
        model.tie_weights()  # to_empty has untied them
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False
        weights = {id(p.untyped_storage()) for p in model.parameters()}
        inputs = {
            name: torch.zeros((part, *value.shape[1:]), dtype=value.dtype)
            for name, value in sample.items()
            if name != "soft_labels"
        }
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
            found = model(**inputs)
            (found.loss if found.get("loss") is not None else found[0].float().mean()).backward()
        count = sum(p.numel() for p in model.parameters())
    flops = counter.get_total_flops() * train.accumulate
    bytes_saved = sum(size for (key, _), size in kept.items() if key not in weights)
    halves = 0.5 if train.precision != "fp32" else 1.0
    steps = train.max_steps or 1
    return Estimate(
        parameters=count,
        samples_per_step=batch_size,
        tokens_per_step=batch_size * (config.samples.length or 0) if prepared.tokenizer is not None else None,
        epochs=steps * batch_size / len(prepared.train),
        flops_per_step=flops,
        seconds=steps * flops / (_speed(train.precision, train.device) * _SHARE),
        memory_mib=(count * 16 + bytes_saved * halves) / 2**20,
    )


def _speed(precision: str, device: str | None) -> float:
    """Floating point operations per second of a large matrix product on this device."""
    on = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = 4096 if on == "cuda" else 512
    x = torch.randn(size, size, device=on, dtype=dtype)
    x @ x
    begin, rounds = time.perf_counter(), 0
    while time.perf_counter() - begin < 0.3:
        y = x @ x
        if on == "cuda":
            float(y[0, 0])  # waits for it
        rounds += 1
    return 2 * size**3 * rounds / (time.perf_counter() - begin)
