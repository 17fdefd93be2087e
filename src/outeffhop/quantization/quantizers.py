"""Uniform quantizers: a grid of 2 to 16 bits, for a whole tensor, each channel or each token.

A grid covers a range [low, high], widened to contain 0, so that 0 (padding, the output of a ReLU, a masked weight) is
exact. Its integer form (q, scale, zero_point) and its simulated form agree:
``grid.fake(x) == grid.dequantize(grid.quantize(x))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from outeffhop._naming import known

__all__ = ["GRANULARITIES", "Uniform", "Grid", "read_grids"]

GRANULARITIES = ("tensor", "channel", "token")

# Scales are normal float32 numbers, and so is twice the end of a range.
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max / 2


@dataclass(frozen=True)
class Uniform:
    """How a tensor is quantized, before its range is known.

    Attributes:
        bits: 2 to 16.
        symmetric: integers ±(2^(bits−1) − 1) and zero point 0; else 0 … 2^bits − 1 with a zero point.
        granularity: one grid for the "tensor", for each "channel" (index along ``axis``) or each "token"
            (index along all dimensions except the last).
        axis: the axis of the channels.
    """

    bits: int = 8
    symmetric: bool = False
    granularity: str = "tensor"
    axis: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 2 <= self.bits <= 16:
            raise ValueError(f"bits={self.bits!r}: must be an integer from 2 to 16")
        known("granularity", self.granularity, GRANULARITIES)

    @property
    def integers(self) -> tuple[int, int]:
        """The smallest and the largest integer."""
        return (1 - 2 ** (self.bits - 1), 2 ** (self.bits - 1) - 1) if self.symmetric else (0, 2**self.bits - 1)

    def __str__(self) -> str:
        return f"{'symmetric' if self.symmetric else 'asymmetric'} per {self.granularity}"

    def rows(self, x: Tensor) -> Tensor:
        """The tensor as [grids, elements of each]; [1, n] for one grid."""
        if self.granularity == "token":
            return x.reshape(-1, x.shape[-1])
        if self.granularity == "channel":
            return x.movedim(self.axis, 0).flatten(1) if x.dim() > 1 else x[:, None]
        return x.reshape(1, -1)

    def minmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The range of each grid's elements, float32 [grids], without gradients, as fake_quantize needs it."""
        if not x.numel():
            raise ValueError(f"the tensor has shape {tuple(x.shape)}: without elements there is no range")
        if x.dim() == 0 and self.granularity != "tensor":
            raise ValueError(f"the tensor is a single number, without {self.granularity}s: use granularity='tensor'")
        x = x.detach()
        # not of rows, which may be a copy
        if self.granularity == "tensor":
            low, high = (end.reshape(1) for end in x.aminmax())
        elif self.granularity == "channel" and x.dim() == 1:
            low, high = x, x
        else:  # aminmax of a dimension takes ten times as long on a CPU
            token, last = self.granularity == "token", x.dim() - 1
            dims = [last] if token else [i for i in range(last + 1) if i != self.axis % (last + 1)]
            low, high = x.amin(dims).flatten(), x.amax(dims).flatten()
        return low.float(), high.float()

    def grid(self, low: Tensor, high: Tensor) -> Grid:
        """The grid over [low, high], each [grids], widened to contain 0."""
        # in double: high − low overflows float32 if the range is as wide as float32 itself
        low = low.double().clamp(-_LARGEST, 0.0)
        high = high.double().clamp(0.0, _LARGEST)
        smallest, largest = self.integers
        wide = 2.0 * torch.maximum(-low, high) if self.symmetric else high - low
        scale = (wide / (largest - smallest)).clamp(min=_SMALLEST).float()
        scale = torch.where(wide == 0.0, torch.ones_like(scale), scale)  # all zeros
        zero = torch.zeros_like(low) if self.symmetric else torch.round(-low / scale.double())
        return Grid(self, scale, zero.clamp(smallest, largest).int())


@dataclass(frozen=True, eq=False)
class Grid:
    """A quantizer whose range is known: x ≈ scale · (q − zero_point).

    Attributes:
        spec: bits, symmetry, granularity.
        scale: float32 [grids].
        zero_point: int32 [grids].
    """

    spec: Uniform
    scale: Tensor
    zero_point: Tensor

    def to(self, device: torch.device) -> Grid:
        return replace(self, scale=self.scale.to(device), zero_point=self.zero_point.to(device))

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and the largest value that any grid represents."""
        smallest, largest = self.spec.integers
        low = self.scale.double() * (smallest - self.zero_point)
        high = self.scale.double() * (largest - self.zero_point)
        return float(low.min()), float(high.max())

    def quantize(self, x: Tensor) -> Tensor:
        """The integers, int32, in the shape of x. Values outside the range become its ends."""
        scale, zero = self._spread(x)
        return (torch.round(x.float() * (1.0 / scale)) + zero).clamp(*self.spec.integers).int()

    def dequantize(self, q: Tensor) -> Tensor:
        """The float32 values of integers of any integer dtype."""
        scale, zero = self._spread(q)
        return (q.int() - zero).float() * scale  # int32: bytes would overflow

    def fake(self, x: Tensor) -> Tensor:
        """Each value rounded to the nearest point of the grid: computed in float32, returned in the dtype of x.

        NaN stays NaN, although integers have none.
        """
        values = x.float()
        if torch.is_grad_enabled() and values.requires_grad:
            return self._differentiable(values).to(x.dtype)
        factors = self._factors
        if self.spec.granularity != "tensor":
            factors = tuple(self._shaped(each, x) for each in factors)
        inverse, low, high, scale, zero = factors
        # few passes, one new tensor, and nothing that a GPU has to wait for; + 0: integers know no −0
        steps = (values * inverse).round_()
        if x.is_cpu and self.spec.granularity != "channel":  # PyTorch would not vectorize a function of three tensors
            steps = steps.clamp_min_(low).clamp_max_(high).mul_(scale).add_(0.0)
        else:
            steps = torch.addcmul(zero, steps.clamp_(low, high), scale, out=steps)
        return steps.to(x.dtype)

    def _differentiable(self, values: Tensor) -> Tensor:
        """The same with a gradient, which passes through the rounding and stops outside the range."""
        smallest, largest = self.spec.integers
        scale, zero = self._spread(values)
        # PyTorch counts steps in int64: infinite or huge values would overflow to the wrong end
        near = values.clamp(scale * (smallest - zero - 1), scale * (largest - zero + 1))
        if self.spec.granularity == "tensor":
            out = torch.fake_quantize_per_tensor_affine(near, self.scale[0], self.zero_point[0], smallest, largest)
        else:
            token = self.spec.granularity == "token"
            flat = self.spec.rows(near) if token else near
            axis = 0 if token else self.spec.axis % values.dim()
            out = torch.fake_quantize_per_channel_affine(flat, self.scale, self.zero_point, axis, smallest, largest)
        return torch.where(values.isnan(), values, out.reshape(values.shape))

    @cached_property
    def _factors(self) -> tuple[Tensor, ...]:
        """1 / scale, the fewest and most steps from 0, the scale, and 0: float32 [grids], or [] if there is one."""
        smallest, largest = self.spec.integers
        fewest, most = (smallest - self.zero_point).float(), (largest - self.zero_point).float()
        found = 1.0 / self.scale, fewest, most, self.scale, torch.zeros_like(self.scale)
        return tuple(each[0] for each in found) if self.spec.granularity == "tensor" else found

    def _spread(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point in shapes that broadcast to their elements."""
        return self._shaped(self.scale, x), self._shaped(self.zero_point, x)

    def _shaped(self, each: Tensor, x: Tensor) -> Tensor:
        """A number for each grid, in a shape that broadcasts to the elements of x."""
        if self.spec.granularity == "tensor":
            return each[0]
        if self.spec.granularity == "token":
            return each.reshape(*x.shape[:-1], 1)
        sizes = [1] * x.dim()
        sizes[self.spec.axis] = -1
        return each.reshape(sizes)


def read_grids(grids: Mapping[str, Grid]) -> dict[str, Grid]:
    """The same grids on the CPU, with one wait for each device, and not one for each number that is read."""
    found: dict[str, Grid] = {}
    for device in {grid.scale.device for grid in grids.values()}:
        there = {name: grid for name, grid in grids.items() if grid.scale.device == device}
        # float64 holds both exactly
        parts = [part.double() for grid in there.values() for part in (grid.scale, grid.zero_point)]
        read = torch.cat(parts).cpu().split([len(part) for part in parts])
        for (name, grid), scale, zero in zip(there.items(), read[::2], read[1::2], strict=True):
            found[name] = replace(grid, scale=scale.float(), zero_point=zero.int())
    return found
