"""A loss that is not finite: when it happened, and what broke."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LossWatch", "NotFinite", "broken_weights", "what_broke"]


class NotFinite(RuntimeError):
    """Training cannot continue: the loss or the weights are not finite."""


class LossWatch:
    """The first step whose loss was not finite, kept on the device: only reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._step = torch.full((), -1, dtype=torch.long, device=device)

    def see(self, loss: Tensor, step: int) -> None:
        first = ~torch.isfinite(loss) & (self._step < 0)
        self._step = torch.where(first, torch.full_like(self._step, step), self._step)

    def bad_step(self) -> int | None:
        step = int(self._step)
        return None if step < 0 else step


def broken_weights(model: nn.Module) -> list[str]:
    """The names of weights that are not finite."""
    return [name for name, p in model.named_parameters() if not _finite(p)]


def what_broke(model: nn.Module, inputs: dict[str, Tensor] | None) -> str:
    """What is not finite: weights, else data, else the first activations in a forward pass with these inputs."""
    weights = broken_weights(model)
    if weights:
        return f"weights not finite: {', '.join(weights[:5])}"
    if inputs is None:
        return "only the loss"
    data = [name for name, value in inputs.items() if not _finite(value)]
    if data:
        return f"the data: {', '.join(data)} is not finite"
    modules = _broken_outputs(model, inputs)
    return f"activations not finite, first in {', '.join(modules[:3])}" if modules else "only the loss"


def _broken_outputs(model: nn.Module, inputs: dict[str, Tensor]) -> list[str]:
    """The names of modules whose outputs are not finite, in the order they are computed."""
    found: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def look(_: nn.Module, __: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and not _finite(first):
                found.append(name)

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(torch.isfinite(value).all())
