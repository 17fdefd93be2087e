"""One training step of a model on made-up inputs, for what a step costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outeffhop.lab.paper.experiment import Settings
from outeffhop.lab.training import RunConfig
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import presets

__all__ = ["batch_of", "training_step"]


def batch_of(model: str, settings: Settings) -> int:
    """The recipe's batch, of at most 256 samples."""
    recipe = resolve(RunConfig(model=model, preset=settings.scale, data="made up"))
    return min(recipe.train.batch_size or 1, 4 if settings.quick else 256)


def training_step(model: str, method: str, settings: Settings) -> Callable[[], None]:
    """A function that does one step: forward, backward, AdamW; on a GPU in bf16, and it waits for the end."""
    inputs = _inputs(model, settings)
    torch.manual_seed(0)
    built: Any = presets.build(model, settings.scale, method)
    built.to(settings.device).train()
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    on_gpu = settings.device.startswith("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            loss = built(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()

    return step


def _inputs(model: str, settings: Settings) -> dict[str, Tensor]:
    """Random numbers of the right shape: a step costs the same with any data."""
    random, batch = torch.Generator().manual_seed(0), batch_of(model, settings)
    config: Any = presets.config(model, settings.scale)
    if model in ("bert", "opt"):
        length = resolve(RunConfig(model=model, preset=settings.scale, data="made up")).samples.length or 1
        ids = torch.randint(0, config.vocab_size, (batch, length), generator=random)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    elif model == "vit":
        pixels = torch.randn(batch, config.num_channels, config.image_size, config.image_size, generator=random)
        made = {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,), generator=random)}
    else:
        past, future = (
            torch.randn(batch, n, config.num_series, generator=random) for n in (config.in_len, config.out_len)
        )
        made = {"past_values": past, "future_values": future}
    return {name: value.to(settings.device) for name, value in made.items()}
