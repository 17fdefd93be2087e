"""8-bit floating point, e4m3: a sign, 4 bits of exponent, 3 of mantissa, and a scale that makes the range end at 448.

The error of a uniform grid is the same everywhere in its range. That of e4m3 is at most 6 % of each number, down to
2⁻⁶ times the scale. One outlier therefore costs the other numbers of a tensor less than in int8, and a tensor without
outliers more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outeffhop.quantization.quantizers import Grid, Uniform

__all__ = ["Float8", "Float8Grid"]

_LARGEST = int(torch.finfo(torch.float8_e4m3fn).max)  # 448


@dataclass(frozen=True)
class Float8(Uniform):
    """How a tensor is rounded to e4m3, before its range is known; it always has 8 bits and no zero point."""

    symmetric: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 8:
            raise ValueError(f"bits={self.bits}: fp8 has 8 bits; use another scheme for other bits")
        if not self.symmetric:
            raise ValueError("symmetric=False: a floating-point number has a sign and no zero point")

    @property
    def integers(self) -> tuple[int, int]:
        """The ends of e4m3, which happen to be integers: ±448."""
        return -_LARGEST, _LARGEST

    def __str__(self) -> str:
        return f"e4m3 per {self.granularity}"

    def grid(self, low: Tensor, high: Tensor) -> Grid:
        """e4m3 with the scale at which the larger of −low and high is 448."""
        found = super().grid(low, high)
        return Float8Grid(self, found.scale, found.zero_point)


@dataclass(frozen=True, eq=False)
class Float8Grid(Grid):
    """e4m3 whose range is known: x ≈ scale · q; the zero point is 0."""

    def quantize(self, x: Tensor) -> Tensor:
        """The stored numbers, float8_e4m3fn, in the shape of x. Values outside the range become its ends."""
        scale, _ = self._spread(x)
        # PyTorch turns numbers beyond 448 into NaN
        return (x.float() / scale).clamp(*self.spec.integers).to(torch.float8_e4m3fn)

    def dequantize(self, q: Tensor) -> Tensor:
        """The float32 values of stored numbers."""
        scale, _ = self._spread(q)
        return q.float() * scale

    def fake(self, x: Tensor) -> Tensor:
        """Each value rounded to the nearest number of e4m3: computed in float32, returned in the dtype of x.

        As with other grids, gradients pass through the rounding, and stop outside the range.
        """
        scale, _ = self._spread(x)
        near = (x.float() / scale).clamp(*self.spec.integers)
        rounded: Tensor = _Round.apply(near)  # type: ignore[no-untyped-call]
        return (rounded * scale).to(x.dtype)


class _Round(torch.autograd.Function):
    """Rounds to e4m3 in the forward pass; a gradient in e4m3 would be too coarse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad
