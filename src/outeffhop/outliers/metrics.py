"""The numbers of one activation tensor in one batch: inf norms, kurtosis, and the values beyond 6σ.

A tensor [B, T, d] is read token by token, a few times while it is in the cache: sums of powers about a point near
each token's mean, and its extremes. All else follows in float64 from these [B, T] numbers: moments of whole samples
by shifting every token's sums to the sample's mean, and padding by leaving tokens out. Only tokens that hold a value
beyond 6σ are read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SIGMAS", "BatchStats", "batch_stats"]

# A value farther than this many standard deviations from its sample's mean is an outlier.
SIGMAS = 6.0


@dataclass(frozen=True)
class BatchStats:
    """What one batch says of one tensor. All on the CPU, float64 or int64.

    Attributes:
        inf_norm: max |x| of each sample, [B].
        kurtosis: of each sample over its tokens and features, [B]; nan where the sample is constant.
        token_inf_norm: max |x| of each token that counts, [N].
        token_kurtosis: of each token over its features, [N]; nan where the token is constant.
        values: how many numbers were looked at.
        non_finite: how many of them are nan or infinite.
        width: d.
        where: sample, token and channel of each value beyond 6σ, [3, K].
        outliers: these values, [K].
    """

    inf_norm: Tensor
    kurtosis: Tensor
    token_inf_norm: Tensor
    token_kurtosis: Tensor
    values: int
    non_finite: int
    width: int
    where: Tensor
    outliers: Tensor


def batch_stats(x: Tensor, counts: Tensor | None = None) -> BatchStats:
    """The numbers of one tensor.

    Args:
        x: [B, T, d], any floating-point dtype and device; B, T, d ≥ 1.
        counts: [B, T], bool: False leaves a token out (padding). Samples without any token are left out whole.
    """
    width = x.shape[-1]
    sums = _token_sums(x)  # [7, B, T]
    keep = torch.ones(x.shape[:2], dtype=torch.bool) if counts is None else counts.cpu()
    sums = torch.where(keep, sums, 0.0)
    centre, s1, s2, s3, s4, low, high = sums
    size = torch.maximum(high.abs(), low.abs())  # propagates nan
    samples = keep.any(1)

    # about the sample's mean: Σ(x − μ)⁴ = Σ over tokens of Σ(c + δ)⁴, c = x − centre, δ = centre − μ
    number = (width * keep.sum(1)).clamp(min=1).double()
    mean = torch.where(keep, width * centre + s1, 0.0).sum(1) / number
    delta = centre - mean[:, None]
    m2 = torch.where(keep, s2 + 2 * delta * s1 + width * delta**2, 0.0).sum(1) / number
    fourth = s4 + 4 * delta * s3 + 6 * delta**2 * s2 + 4 * delta**3 * s1 + width * delta**4
    m4 = torch.where(keep, fourth, 0.0).sum(1) / number
    constant = high.masked_fill(~keep, -torch.inf).amax(1) == low.masked_fill(~keep, torch.inf).amin(1)
    kurtosis = torch.where(constant, torch.nan, m4 / m2**2)

    # about the token's own mean
    e, t2, t3, t4 = s1 / width, s2 / width, s3 / width, s4 / width
    token = (t4 - 4 * e * t3 + 6 * e**2 * t2 - 3 * e**4) / (t2 - e**2) ** 2
    token = torch.where(high == low, torch.nan, token)

    non_finite = 0
    if not size.isfinite().all():
        bad = ~x.isfinite()
        non_finite = int((bad if counts is None else bad & counts.to(x.device)[..., None]).sum())
    sigma = m2.sqrt()[:, None]
    reach = keep & ((high - mean[:, None] > SIGMAS * sigma) | (mean[:, None] - low > SIGMAS * sigma))
    where, outliers = _beyond(x, reach, mean, SIGMAS * sigma[:, 0])
    return BatchStats(
        inf_norm=size.amax(1)[samples],
        kurtosis=kurtosis[samples],
        token_inf_norm=size[keep],
        token_kurtosis=token[keep],
        values=width * int(keep.sum()),
        non_finite=non_finite,
        width=width,
        where=where,
        outliers=outliers,
    )


def _token_sums(x: Tensor) -> Tensor:
    """Of each token: a point near its mean, Σc, Σc², Σc³, Σc⁴ about it, min and max.  [7, B, T], float64, CPU"""
    if x.dtype != torch.float64:
        x = x.float()
    high, low, centre = x.amax(-1), x.amin(-1), x.mean(-1)
    # in units of the largest distance, or the fourth power of a float32 would overflow at 10⁹ and vanish at 10⁻⁹
    unit = torch.maximum(high - centre, centre - low)
    unit = torch.where(unit == 0, 1.0, unit)
    c = x.sub(centre[..., None]).div_(unit[..., None])
    square = c * c
    sums = [c.sum(-1), square.sum(-1), torch.linalg.vecdot(square, c), torch.linalg.vecdot(square, square)]
    small = torch.stack([centre, *sums, low, high, unit]).cpu().double()
    small[1:5] *= small[7] ** torch.arange(1, 5)[:, None, None]
    return small[:7]


def _beyond(x: Tensor, reach: Tensor, mean: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Where x is farther than ``distance`` from ``mean``, both per sample, among the tokens of ``reach``."""
    samples, tokens = reach.nonzero(as_tuple=True)
    rows = x[samples.to(x.device), tokens.to(x.device)].cpu().double()  # [R, d]
    row, channel = ((rows - mean[samples, None]).abs() > distance[samples, None]).nonzero(as_tuple=True)
    return torch.stack([samples[row], tokens[row], channel]), rows[row, channel]
