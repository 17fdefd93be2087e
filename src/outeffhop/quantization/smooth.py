"""SmoothQuant: what makes a Linear's input hard to quantize moves into its weight, channel by channel.

x Wᵀ = (x / s)(W · s)ᵀ for any s > 0, one number per input channel. s_j = max|x_j|^α / max|W_j|^(1−α)
leaves both sides about equally hard. The division belongs to the step that quantizes the input, so that
no other module changes and post-LayerNorm models, whose LayerNorms feed a residual as well, are served too.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["smoothing"]


def smoothing(largest_input: Tensor, weight: Tensor, alpha: float = 0.5) -> Tensor:
    """The factors s.

    Args:
        largest_input: max |x_j| of each input channel, [in].
        weight: [out, in].
        alpha: 0 makes all channels of the weight alike, 1 all those of the input.

    Returns:
        [in], 1 for a channel without input or without weight.
    """
    largest_weight = weight.float().abs().amax(0)
    inputs = largest_input.float().to(weight.device)
    alive = (inputs > 0) & (largest_weight > 0)
    factors = inputs.pow(alpha) / largest_weight.pow(1.0 - alpha)
    return torch.where(alive, factors, torch.ones_like(factors)).clamp(1e-5, 1e5)
