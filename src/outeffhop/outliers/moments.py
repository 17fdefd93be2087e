"""Statistics of one activation tensor in one batch: inf norms, kurtosis, and the values beyond 6σ.

A tensor [B, T, d] is reduced token by token while it is in the CPU cache: to sums of powers about a point near each
token's mean, and to its extremes. Everything else follows in float64 from these [B, T] numbers. Moments of whole
samples come from shifting the sums of every token to the sample's mean; padding is left out. Only tokens that contain
a value beyond 6σ are read again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["SIGMAS", "BatchStats", "Scratch", "batch_stats"]

# An outlier is a value more than this many standard deviations away from its sample's mean.
SIGMAS = 6.0


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one tensor in one batch. All on the CPU, float64 or int64.

    Attributes:
        inf_norm: max |x| of each sample, [B].
        kurtosis: of each sample over its tokens and features, [B]; nan if the sample is constant.
        token_inf_norm: max |x| of each token that counts, [N].
        token_kurtosis: of each token over its features, [N]; nan if the token is constant.
        values: how many numbers were measured.
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


class Scratch:
    """Memory for intermediate tensors that is reused from one activation to the next.

    Allocating it each time would take several times as long as the computation itself.
    """

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def two_like(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors of x's shape with arbitrary content, valid until the next call."""
        held, size = self._held, x.numel()
        if held is None or held.shape[1] < size or held.dtype != x.dtype or held.device != x.device:
            held = self._held = torch.empty(2, size, dtype=x.dtype, device=x.device)
        first, second = held[:, :size].reshape(2, *x.shape)
        return first, second


def batch_stats(x: Tensor, counts: Tensor | None = None, scratch: Scratch | None = None) -> BatchStats:
    """Statistics of one tensor.

    Args:
        x: [B, T, d], any floating-point dtype and device; B, T, d ≥ 1.
        counts: [B, T], bool: False leaves a token out (padding). Samples without any token are left out.
        scratch: memory to reuse between calls.
    """
    width = x.shape[-1]
    # numpy from here on: for arrays this small, calls into torch would take longer than the computation
    keep = np.ones(x.shape[:2], dtype=bool) if counts is None else counts.cpu().numpy()
    sums = np.where(keep, _token_sums(x, scratch or Scratch()).numpy(), 0.0)  # [7, B, T]
    centre, s1, s2, s3, s4, low, high = sums
    size = np.maximum(np.abs(high), np.abs(low))  # propagates nan
    samples = keep.any(1)
    with np.errstate(all="ignore"):  # nan and inf in the data are passed on and reported
        # about the sample's mean: Σ(x − μ)⁴ = Σ over tokens of Σ(c + δ)⁴, c = x − centre, δ = centre − μ
        number = np.maximum(width * keep.sum(1), 1).astype(np.float64)
        mean = np.where(keep, width * centre + s1, 0.0).sum(1) / number
        delta = centre - mean[:, None]
        delta2 = delta * delta
        m2 = np.where(keep, s2 + 2 * delta * s1 + width * delta2, 0.0).sum(1) / number
        fourth = s4 + 4 * delta * s3 + 6 * delta2 * s2 + 4 * delta * delta2 * s1 + width * delta2 * delta2
        m4 = np.where(keep, fourth, 0.0).sum(1) / number
        constant = np.where(keep, high, -np.inf).max(1) == np.where(keep, low, np.inf).min(1)
        kurtosis = np.where(constant, np.nan, m4 / (m2 * m2))

        # about the token's own mean
        e, t2, t3, t4 = s1 / width, s2 / width, s3 / width, s4 / width
        e2 = e * e
        variance = t2 - e2
        token = (t4 - 4 * e * t3 + 6 * e2 * t2 - 3 * e2 * e2) / (variance * variance)
        token = np.where(high == low, np.nan, token)

        distance = SIGMAS * np.sqrt(m2)
        far = (high - mean[:, None] > distance[:, None]) | (mean[:, None] - low > distance[:, None])
    non_finite = 0
    if not np.isfinite(size).all():
        bad = ~x.isfinite()
        non_finite = int((bad if counts is None else bad & counts.to(x.device)[..., None]).sum())
    reach = keep & far
    where, outliers = _beyond(x, *(torch.from_numpy(t) for t in (reach, mean, distance)))
    return BatchStats(
        inf_norm=torch.from_numpy(size.max(1)[samples]),
        kurtosis=torch.from_numpy(kurtosis[samples]),
        token_inf_norm=torch.from_numpy(size[keep]),
        token_kurtosis=torch.from_numpy(token[keep]),
        values=width * int(keep.sum()),
        non_finite=non_finite,
        width=width,
        where=where,
        outliers=outliers,
    )


def _token_sums(x: Tensor, scratch: Scratch) -> Tensor:
    """For each token: a point near its mean, Σc, Σc², Σc³, Σc⁴ about it, min and max.  [7, B, T], float64, CPU"""
    if x.dtype != torch.float64:
        x = x.float()
    high, low, centre = x.amax(-1), x.amin(-1), x.mean(-1)
    # in units of the largest distance: the fourth power of a float32 overflows at 10⁹ and vanishes at 10⁻⁹
    unit = torch.maximum(high - centre, centre - low)
    unit = torch.where(unit == 0, 1.0, unit)
    c, square = scratch.two_like(x)
    torch.sub(x, centre[..., None], out=c).div_(unit[..., None])
    torch.mul(c, c, out=square)
    sums = [c.sum(-1), square.sum(-1), torch.linalg.vecdot(square, c), torch.linalg.vecdot(square, square)]
    small = torch.stack([centre, *sums, low, high, unit]).cpu().double()
    small[1:5] *= small[7] ** torch.arange(1, 5)[:, None, None]
    return small[:7]


def _beyond(x: Tensor, reach: Tensor, mean: Tensor, distance: Tensor) -> tuple[Tensor, Tensor]:
    """Where x is more than ``distance`` away from ``mean``, both per sample, among the tokens in ``reach``."""
    samples, tokens = reach.nonzero(as_tuple=True)
    # on x's device until the end: heavy tails select many rows that contain few outliers
    at, mean, distance = (t.to(x.device) for t in (samples, mean, distance))
    rows = x[at, tokens.to(x.device)].double()  # [R, d]
    row, channel = ((rows - mean[at, None]).abs() > distance[at, None]).nonzero(as_tuple=True)
    values, row, channel = (t.cpu() for t in (rows[row, channel], row, channel))
    return torch.stack([samples[row], tokens[row], channel]), values
