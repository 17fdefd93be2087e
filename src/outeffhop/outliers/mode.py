"""Evaluation mode for a while: models are measured in it, and are given back as they came."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode; afterwards each of its modules has the mode it had."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
