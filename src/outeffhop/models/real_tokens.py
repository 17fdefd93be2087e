"""Which tokens of a batch are real and which are padding, for each part of a model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RealTokens", "encoder_of", "first_tensor", "sides"]


class RealTokens:
    """The real tokens of the running batch: an encoder has other ones than the decoder behind it.

    It goes by the names of modules, so that it also holds when gradient checkpointing runs a part a second time.

    Attributes:
        encoder: the name of the encoder of a model that has a decoder as well; None in others.

    Args:
        look: read the masks, so that those without padding cost nothing; on a GPU that waits for the device.
    """

    def __init__(self, model: nn.Module, look: bool = True) -> None:
        found = encoder_of(model)
        self.encoder = next((name for name, module in model.named_modules() if found is module), None)
        self._look = look
        self.begin({})

    def begin(self, inputs: Mapping[str, Any]) -> None:
        """At the start of a forward with these keyword arguments."""
        self._encoded, self._decoded = sides(inputs, self.encoder is not None, self._look)
        self._output: Any = None  # a weak reference: copies of a model copy its hooks

    def at(self, name: str) -> Tensor | None:
        """[B, T], bool: False at padding of the part that a module belongs to; None without padding."""
        inside = self.encoder is not None and f"{name}.".startswith(f"{self.encoder}.")
        return self._encoded if inside else self._decoded

    def of(self, x: Tensor, name: str, given: Any = None) -> Tensor | None:
        """Which rows of [B, T, …], [B, H, T, D] or [B·T, …] are real; None if all are, or if there are no such rows.

        Args:
            name: of the module that has the tensor.
            given: what the module was given.
        """
        real = self._encoded if self.is_encoded(given) else self.at(name)
        if real is None or x.dim() < 2:
            return None
        if x.dim() == 2:
            return real.flatten() if x.shape[0] == real.numel() else None
        by_head = x.dim() == 4 and (x.shape[0], x.shape[2]) == real.shape
        if x.shape[:2] == real.shape:
            return None if by_head else real  # as many heads as tokens: either could be meant
        return real[:, None].expand(x.shape[:3]) if by_head else None

    def keys(self, cross: bool, name: str) -> Tensor | None:
        """[B, S], of the keys of a module of attention; ``cross``: they come from the encoder."""
        return self._encoded if cross else self.at(name)

    def encoder_returned(self, output: Any) -> None:
        x = first_tensor(output)
        self._output = None if x is None else weakref.ref(x)

    def is_encoded(self, x: Any) -> bool:
        """Whether this is what the encoder returned, which cross attention reads."""
        output = None if self._output is None else self._output()
        if output is None or not isinstance(x, Tensor):
            return False
        if x is output or torch.compiler.is_compiling():
            return x is output
        return x.shape == output.shape and x.data_ptr() == output.data_ptr()  # a view of it


def encoder_of(model: Any) -> nn.Module | None:
    """The encoder of a model that also has a decoder."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    found = model.get_encoder()
    return found if isinstance(found, nn.Module) and found is not model else None


def sides(inputs: Mapping[str, Any], two: bool, look: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """The real tokens of the encoder and of the decoder; of a model in one part, the same twice.

    Without inputs of its own, a decoder makes them of the labels or of the encoder's.
    """
    real = _real(inputs.get("attention_mask"), look)
    if not two:
        return real, real
    mask, labels = inputs.get("decoder_attention_mask"), inputs.get("labels")
    if mask is not None:
        return real, _real(mask, look)
    if isinstance(labels, Tensor) and labels.dim() == 2:
        return real, _real(labels != -100, look)
    return real, None if "decoder_input_ids" in inputs else real


def _real(mask: Any, look: bool) -> Tensor | None:
    """[B, T], bool; None if the mask is not of tokens or, if looked at, has no padding."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    return None if look and bool(mask.bool().all()) else mask.bool()


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in what a module returned."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None
