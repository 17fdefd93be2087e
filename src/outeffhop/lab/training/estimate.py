"""What a run will cost, before it is begun: parameters, work, time and memory.

The work of one step is counted, not guessed: forward and backward run on tensors without contents, which a counter
of floating point operations and one of saved activations watch. Time and memory that follow are estimates, and say so.
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
from outeffhop.lab.training.run import build

__all__ = ["Estimate", "estimate"]

# Of a large matrix product's speed, what a whole training step is taken to reach: an assumption, not a measurement.
_SHARE = 0.4


@dataclass(frozen=True)
class Estimate:
    """What a run will cost.

    Attributes:
        parameters: of the model, gates and sinks included.
        samples_per_step, tokens_per_step: tokens are None where data is no text.
        epochs: passes over the training set.
        flops_per_step: floating point operations of matrix products, forward and backward; those inside a fused
            attention kernel are not seen.
        seconds: of the whole run on this device, if it reaches 0.4 of the speed of a large matrix product.
        memory_mib: of weights, gradients, optimizer and saved activations on one device.
    """

    parameters: int
    samples_per_step: int
    tokens_per_step: int | None
    epochs: float
    flops_per_step: int
    seconds: float
    memory_mib: float


def estimate(config: RunConfig, prepared: Prepared) -> Estimate:
    """Of a resolved config and its data, on the device here; what could not be trained is refused as it is there."""
    train = config.train
    check_device(train)
    batch_size = train.batch_size or 1
    part = max(batch_size // train.accumulate, 1)
    sample = prepared.collate([prepared.train[0]])
    kept: dict[tuple[int, int], int] = {}

    def keep(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        kept[id(storage), storage.nbytes()] = storage.nbytes()
        held.append(storage)  # or its id might be given to another
        return saved

    held: list[Any] = []
    with nullcontext() if config.init else torch.device("meta"):  # a checkpoint's weights are read, and let go
        empty: Any = build(config, prepared.changes)
        check_run(config, empty, prepared)
        empty.to("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        # in evaluation mode: OPT asks a random number whether to drop a layer, and these tensors have no contents
        model: Any = empty.to_empty(device="cpu").eval()
        model.tie_weights()  # which ``to_empty`` has parted
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
            model(**inputs).loss.backward()
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
    """Floating point operations a second of a large matrix product here."""
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
