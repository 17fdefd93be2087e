"""Several Linear layers with the same input as one product, as torch.nn.MultiheadAttention packs its projections.

The layers stay separate modules, so that each can be replaced, adapted, hooked, quantized or saved by its name. Their
weights are joined at each call, which costs a copy of them. Once the input has more rows than a weight, that is less
than what it saves: reading the input once per layer, and adding up the layers' gradients of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.ops.torch_state import is_exporting, only_its_forward

__all__ = ["project"]

_PLAIN = (Tensor, nn.Parameter)


def project(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output of each layer for its input [..., size]. Neighbours with the same input are one product."""
    outputs: list[Tensor] = []
    first = 0
    for end in range(1, len(layers) + 1):
        if end < len(layers) and inputs[end] is inputs[first]:
            continue
        alike, x = layers[first:end], inputs[first]
        outputs += _together(alike, x) if _can_join(alike, x) else [layer(x) for layer in alike]
        first = end
    return outputs


def _together(layers: Sequence[Any], x: Tensor) -> Sequence[Tensor]:
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    return nn.functional.linear(x, weight, bias).split([layer.weight.shape[0] for layer in layers], -1)


def _can_join(layers: Sequence[Any], x: Tensor) -> bool:
    """Whether the layers do nothing but multiply by weights of one kind, and joining these pays."""
    if len(layers) == 1 or not all(type(layer) is nn.Linear for layer in layers):
        return False
    first = layers[0].weight
    if x.numel() < first.numel() or is_exporting():  # an exported graph keeps the names of its layers
        return False
    if not all(map(only_its_forward, layers)):
        return False
    for layer in layers:
        weight, bias = layer.weight, layer.bias
        if type(weight) not in _PLAIN or (bias is not None and type(bias) not in _PLAIN):
            return False  # quantized, or spread over devices
        if (weight.dtype, weight.device, weight.shape[1]) != (first.dtype, first.device, first.shape[1]):
            return False
        if (bias is None) != (layers[0].bias is None):
            return False
    return True
