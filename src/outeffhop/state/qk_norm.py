"""QK-norm: queries and keys are scaled to unit root mean square, so scores do not grow with their length."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["QkNorm", "HeadRMSNorm"]

_EPS = 1e-6


class HeadRMSNorm(nn.Module):
    """x / rms(x) over the channels of each head, times a learned factor per head; [..., H, L, D] → the same.

    The factor is one number per head, not one per channel, so it commutes with rotary positions: the attention
    function of a rotary model receives queries and keys already rotated.

    Args:
        num_heads: H; None: no factor.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        num_heads: int | None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        weight = None if num_heads is None else nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        unit = nn.functional.rms_norm(x, x.shape[-1:], eps=_EPS)
        return unit if self.weight is None else unit * self.weight[:, None, None]


class QkNorm(nn.Module):
    """The norms of queries and keys. Only the queries have a factor, since scores depend only on the product of both.

    With scores scaled by 1/√D, a score of head h is g_h·√D·cos(q, k); g_h starts at 1.
    """

    def __init__(
        self, num_heads: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.query = HeadRMSNorm(num_heads, device=device, dtype=dtype)
        self.key = HeadRMSNorm(None)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[B, H, L, D] and [B, G, S, D] → the same."""
        return self.query(query), self.key(key)
