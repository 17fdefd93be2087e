"""Outliers of weights: a bound that closes in on the largest weights of a trained model.

An activation of 200 is often bred by one weight of 8 among weights of 0.05. When training has removed the activation,
that weight has lost its purpose, but it still decides the range in which all others are rounded: at a learning rate of
2e-4 it would need 40,000 steps to come down.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.pytorch_utils import Conv1D

__all__ = ["WeightBounds"]


class WeightBounds:
    """Holds the matrices of a model within so many standard deviations of their weights.

    The bound of a matrix starts at its largest weight, shrinks by the same factor in every step, and ends at ``times``
    its standard deviation at the start. Matrices that are within it already are left alone.

    Args:
        model: as it is before its first step.
        times: the bound in standard deviations; 8 bits keep 127·√12 / times of a deviation over the rounding error.
        steps: optimizer steps until it is reached.
    """

    def __init__(self, model: nn.Module, times: float, steps: int) -> None:
        self.steps = max(steps, 1)
        self.bounds: dict[str, tuple[float, float]] = {}  # parameter → its largest weight, and the bound at the end
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                weight = module.weight.detach().float()
                peak, wanted = float(weight.abs().max()), times * float(weight.std())
                if peak > wanted > 0:
                    self.bounds[f"{name}.weight"] = peak, wanted

    @torch.no_grad()
    def apply(self, model: nn.Module, step: int) -> None:
        """Clamps the weights to their bounds at a step."""
        done = min(step / self.steps, 1.0)
        for name, (peak, wanted) in self.bounds.items():
            bound = peak ** (1.0 - done) * wanted**done
            model.get_parameter(name).clamp_(-bound, bound)

    def callback(self, model: nn.Module) -> TrainerCallback:
        """For ``Trainer``: clamps after every optimizer step. ``model`` is the one inside any wrapper."""
        return _Callback(self, model)


class _Callback(TrainerCallback):
    def __init__(self, bounds: WeightBounds, model: nn.Module) -> None:
        self.bounds, self.model = bounds, model

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bounds.apply(self.model, state.global_step + 1)
