"""Measures of a tail that can be trained against: functions of a tensor with exact gradients, in few passes over it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["excess_range", "excess_size", "fourth_power", "log_kurtosis", "log_tail"]

_TINY = torch.finfo(torch.float32).tiny


def log_tail(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """log(mean x⁴ / (mean |x|)⁴) of each sample, averaged over samples: a Gaussian has log 7.4.

    Like the kurtosis it has no scale, but it does not saturate. Where one value outweighs all others together, the
    second moment in the kurtosis is that value's too: log kurtosis is at its maximum, log N, and has no gradient left.
    The mean size is hardly touched by one value among many.

    Args:
        x: [B, ..., d].
        keep: [B, T] for x [B, T, d]: False leaves a token out (padding).
    """
    return _tails(x, keep, 4).mean()


def excess_range(x: Tensor, keep: Tensor | None = None, free: float = 5.0) -> Tensor:
    """(r − free)₊² of each sample, averaged over samples, with r = ½ log(mean |x|⁸ / (mean |x|)⁸).

    The largest values rule the eighth moment, as they rule the range that 8 bits divide. A Gaussian has r = 3.2; one
    value among 300,000 raises it to 5 if it is 17 times the mean size. What lies below ``free`` costs nothing, and the
    worst tensors are pressed hardest.

    Args:
        x, keep: as for ``log_tail``.
        free: r up to which there is no penalty.
    """
    return (_tails(x, keep, 8) - free).relu().square().mean()


def excess_size(x: Tensor, keep: Tensor | None = None, free: float = 5.0, size: float = 10.0) -> Tensor:
    """``excess_range`` against a mean |x| of at most ``size``: it also presses tensors whose values are all large.

    The range of 8 bits does not mind a scale, and neither do layers behind a norm. The inf norm does.
    """
    return (_tails(x, keep, 8, size) - free).relu().square().mean()


def log_kurtosis(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """log(m₄ / m₂²) about the mean of each sample, averaged over samples: a Gaussian has log 3.

    Exact gradient: ∂/∂x = 4 [(c³ − m₃)/m₄ − c/m₂] / N with c = x − mean. Backward keeps ``x`` and a few numbers per
    sample. Moments are about the mean, in a second pass: sums of plain powers would cancel beside a large outlier.

    Args:
        x: [B, ..., d].
        keep: [B, T] for x [B, T, d]: False leaves a token out (padding).
    """
    return _LogKurtosis.apply(x, keep)  # type: ignore[no-any-return]


def fourth_power(x: Tensor, keep: Tensor | None = None, scale: float = 3.0) -> Tensor:
    """mean((x / scale)⁴): unlike the kurtosis it also minds the size of all values."""
    powers = (x.to(_dtype(x)) / scale) ** 4
    if keep is None:
        return powers.mean()
    mask = _spread(keep, x).to(powers.dtype)
    return (powers * mask).sum() / (mask.sum() * (powers.numel() / mask.numel())).clamp(min=1)


def _tails(x: Tensor, keep: Tensor | None, order: int, most: float = math.inf) -> Tensor:
    """4/order · log(mean |x|^order / min(mean |x|, most)^order) of each sample, [B]; 0 for a sample of zeros."""
    return _Tails.apply(x, keep, order, most)  # type: ignore[no-any-return]


class _Tails(torch.autograd.Function):
    """Exact gradient: ∂/∂x = 4 sign(x) [|x|^(order−1) / Σ|x|^order − 1 / Σ|x|], the second where mean |x| counts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor | None, order: int, most: float) -> Tensor:
        tails, unit, sums, powers = _fused(_tail, x)(x.detach(), keep, order, most)
        ctx.save_for_backward(x, keep, unit, sums, powers)
        ctx.order = order
        return tails

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, keep, unit, sums, powers = ctx.saved_tensors
        return _fused(_tail_gradient, x)(grad, x, keep, unit, sums, powers, ctx.order), None, None, None


def _tail(x: Tensor, keep: Tensor | None, order: int, most: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tails [B], and of each sample [B, 1, ...] its largest size, and Σ|x| and Σ|x|^order in that unit.

    In another unit the powers of a float32 would overflow beside large values or vanish beside small ones. Σ|x| is
    infinite where it does not count.
    """
    dims = tuple(range(1, x.dim()))
    values, count = _counted(x, keep)
    unit = values.abs().amax(dims, keepdim=True)
    alive = unit > 0  # a sample of zeros has no tail and no gradient
    unit = torch.where(alive, unit, 1)
    values = (values / unit).abs()
    sums = values.sum(dims, keepdim=True)
    powers = _power(values, order).sum(dims, keepdim=True)
    sums, powers = torch.where(alive, sums, torch.inf), torch.where(alive, powers, torch.inf)
    mean = sums / count
    counts = mean * unit <= most
    ratio = torch.log(powers / count) - order * torch.log(torch.where(counts, mean, most / unit))
    return torch.where(alive, ratio, 0).flatten() * (4 / order), unit, torch.where(counts, sums, torch.inf), powers


def _tail_gradient(
    grad: Tensor, x: Tensor, keep: Tensor | None, unit: Tensor, sums: Tensor, powers: Tensor, order: int
) -> Tensor:
    each = 4 * grad.reshape(unit.shape) / unit
    values = x.to(_dtype(x)) / unit
    size = values.abs()
    out = _power(size, order).div_(size.clamp_(min=_TINY))  # |x|^(order − 1): no sign is lost where it is 0
    out = out.div_(powers).sub_(1 / sums).mul_(values.sign_()).mul_(each)
    return (out if keep is None else out.mul_(_spread(keep, x))).to(x.dtype)


def _power(values: Tensor, order: int) -> Tensor:
    """Of an order that is a power of 2, in a tensor of its own."""
    out = values * values
    while order > 2:
        out, order = out.square_(), order // 2
    return out


def _fused(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """The function, on a GPU compiled by itself: two reads of a tensor and one write take the place of a dozen."""
    if not x.is_cuda or torch.compiler.is_compiling() or not find_spec("triton"):
        return function
    return _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


class _LogKurtosis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor | None) -> Tensor:
        mean, unit, count, m2, m3, m4 = _moments(x.detach(), keep)
        ctx.save_for_backward(x, keep, mean, unit, count, m2, m3, m4)
        return (torch.log(m4) - 2 * torch.log(m2)).mean()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, keep, mean, unit, count, m2, m3, m4 = ctx.saved_tensors
        each = 4 * grad / (x.shape[0] * count * unit)
        c = _centred(x, keep, mean, unit)
        # in place: two tensors of this size, not six
        out = (c * c).mul_(each / m4).sub_(each / m2).mul_(c).sub_(each * m3 / m4)
        if keep is not None:
            out.mul_(_spread(keep, x))
        return out.to(x.dtype), None


def _moments(x: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
    """Mean, unit, the numbers counted, and moments 2, 3 and 4 about the mean in that unit, of each sample: [B, 1, ...].

    The unit is the mean size, since the fourth power of a float32 overflows at 10⁹ and vanishes at 10⁻⁹. The kurtosis
    does not depend on it. A constant sample counts as one of kurtosis 1 without a gradient.
    """
    dims = tuple(range(1, x.dim()))
    x, count = _counted(x, keep)
    mean = x.sum(dims, keepdim=True) / count
    unit = torch.linalg.vector_norm(x, 1, dims, keepdim=True) / count
    unit = torch.where(unit > 0, unit, 1)
    c = _centred(x, keep, mean, unit)
    square = c * c
    m2 = square.sum(dims, keepdim=True) / count
    m3 = c.mul_(square).sum(dims, keepdim=True) / count
    m4 = square.mul_(square).sum(dims, keepdim=True) / count
    alive = m4 > 0
    return mean, unit, torch.where(alive, count, torch.inf), torch.where(alive, m2, 1), m3, torch.where(alive, m4, 1)


def _counted(x: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    """The values, 0 where a token does not count, and how many count in each sample: [B, 1, ...]."""
    dims = tuple(range(1, x.dim()))
    x = x.to(_dtype(x))
    if keep is None:
        return x, x.new_full((x.shape[0], *[1] * len(dims)), x[0].numel())
    mask = _spread(keep, x).to(x.dtype)
    return x * mask, (mask.sum(dims, keepdim=True) * (x[0].numel() / mask[0].numel())).clamp(min=1)


def _centred(x: Tensor, keep: Tensor | None, mean: Tensor, unit: Tensor) -> Tensor:
    """(x − mean) / unit where it counts, 0 elsewhere; always a tensor of its own."""
    c = (x.to(_dtype(x)) - mean).div_(unit)
    return c if keep is None else c.mul_(_spread(keep, x))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _spread(keep: Tensor, x: Tensor) -> Tensor:
    return keep.to(torch.bool).reshape(*keep.shape, *[1] * (x.dim() - keep.dim()))
