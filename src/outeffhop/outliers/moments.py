"""Statistics of one activation tensor in one batch: inf norms, kurtosis, and the values beyond 6σ.

A tensor [B, T, d] is reduced to a few numbers per token, some tokens at a time: to sums of powers about a point near
each token's mean, and to its extremes. Everything else follows in float64 from these [B, T] numbers. Moments of whole
samples come from shifting the sums of every token to the sample's mean; padding is left out. Only tokens that contain
a value beyond 6σ are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SIGMAS", "BatchStats", "Scratch", "batch_stats", "stats_of_each"]

Array = np.ndarray[Any, np.dtype[np.float64]]

# An outlier is a value more than this many standard deviations away from its sample's mean.
SIGMAS = 6.0
# Numbers reduced together on the CPU: 2 MB of float32, so that the intermediate tensors stay in a cache of a few MB.
_TOGETHER = 2**19
# On a GPU: so that they take little of its memory.
_TOGETHER_ON_GPU = 2**24
# Distances from the centre whose fourth powers float32 can sum; further ones are measured in units of the largest.
_NEAREST, _FURTHEST = 1e-7, 1e8


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one tensor in one batch, in float64. The outliers are on the CPU.

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

    inf_norm: Array
    kurtosis: Array
    token_inf_norm: Array
    token_kurtosis: Array
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
        first, second = held[:, :size].view(2, *x.shape)
        return first, second


def batch_stats(x: Tensor, counts: Tensor | None = None, scratch: Scratch | None = None) -> BatchStats:
    """Statistics of one tensor.

    Args:
        x: [B, T, d], any floating-point dtype and device; B, T, d ≥ 1.
        counts: [B, T], bool: False leaves a token out (padding). Samples without any token are left out.
        scratch: memory to reuse between calls.
    """
    b, t, width = x.shape
    library = _library(x)
    sums: Any = _token_sums(x, scratch or Scratch()).view(7, b, t)
    # for arrays as small as a CPU's, calls into torch would take longer than the computation
    sums = sums.numpy() if library is np else sums
    keep = None if counts is None else counts.cpu().numpy()
    with np.errstate(all="ignore"):  # nan and inf in the data are passed on and reported
        on_device = keep if library is np or counts is None else counts.to(x.device)
        found = _moments(sums, on_device, width, library)
    if library is torch:  # one copy of all: a GPU has to wait for each
        whole = torch.cat([part.double().flatten() for part in found]).cpu().numpy()
        ends = np.cumsum([part.numel() for part in found])[:-1]
        found = tuple(part.reshape(one.shape) for part, one in zip(np.split(whole, ends), found, strict=True))
    size, token, kurtosis, lower, upper, far = found
    far = far.astype(bool)
    samples = None if keep is None else keep.any(1)
    non_finite = 0
    if not np.isfinite(size).all():
        bad = ~x.isfinite()
        non_finite = int((bad if counts is None else bad & counts.to(x.device)[..., None]).sum())
    where, outliers = _beyond(x, far, lower, upper)
    return BatchStats(
        inf_norm=size.max(1) if keep is None else size.max(1)[samples],
        kurtosis=kurtosis if keep is None else kurtosis[samples],
        token_inf_norm=size.reshape(-1) if keep is None else size[keep],
        token_kurtosis=token.reshape(-1) if keep is None else token[keep],
        values=width * (b * t if keep is None else int(keep.sum())),
        non_finite=non_finite,
        width=width,
        where=where,
        outliers=outliers,
    )


def stats_of_each(xs: Sequence[Tensor], counts: Tensor | None, scratch: Scratch) -> list[BatchStats]:
    """``batch_stats`` of several tensors of one shape and dtype, as if they were samples of one batch.

    On a GPU this takes little longer than one of them.
    """
    count, b = len(xs), len(xs[0])
    if count == 1:
        return [batch_stats(xs[0], counts, scratch)]
    found = batch_stats(torch.cat(list(xs)), None if counts is None else counts.repeat(count, 1), scratch)
    if found.non_finite:  # of which one?
        return [batch_stats(x, counts, scratch) for x in xs]
    # each has the same samples and tokens that count
    inf_norm, kurtosis = found.inf_norm.reshape(count, -1), found.kurtosis.reshape(count, -1)
    of_tokens = found.token_inf_norm.reshape(count, -1), found.token_kurtosis.reshape(count, -1)
    # in the order of samples, so in that of tensors
    each = torch.bincount(found.where[0] // b, minlength=count).tolist()
    found.where[0] %= b
    stats = []
    for i, (where, outliers) in enumerate(zip(found.where.split(each, 1), found.outliers.split(each), strict=True)):
        stats.append(
            BatchStats(
                inf_norm=inf_norm[i],
                kurtosis=kurtosis[i],
                token_inf_norm=of_tokens[0][i],
                token_kurtosis=of_tokens[1][i],
                values=found.values // count,
                non_finite=0,
                width=found.width,
                where=where,
                outliers=outliers,
            )
        )
    return stats


def _library(x: Tensor) -> Any:
    """What computes with the sums of tokens: numpy on a CPU, torch where the sums would have to be copied first."""
    return np if x.device.type == "cpu" else torch


def _moments(sums: Any, keep: Any, width: int, library: Any) -> tuple[Any, ...]:
    """Of tokens [B, T]: size and kurtosis; of samples [B]: kurtosis, the bounds at 6σ; of tokens: which lie beyond.

    Args:
        sums: [7, B, T], of numpy or torch, as the library says.
        keep: [B, T], bool, or None.
    """
    if keep is not None:  # padding contributes nothing to any sum, also where it holds nan
        sums = library.where(keep, sums, 0.0)
    centre, s1, s2, s3, s4, low, high = sums
    size = library.maximum(library.abs(high), library.abs(low))  # propagates nan
    number = width * (centre.shape[1] if keep is None else keep.sum(1).clip(min=1))  # [B]
    mean = (width * centre + s1).sum(1) / number
    # about the sample's mean: Σ(x − μ)⁴ = Σ over tokens of Σ(c + δ)⁴, c = x − centre, δ = centre − μ
    delta = centre - mean[:, None]
    if keep is not None:
        delta = library.where(keep, delta, 0.0)
    weight = width if keep is None else width * keep
    m2 = ((weight * delta + 2 * s1) * delta + s2).sum(1) / number
    m4 = ((((weight * delta + 4 * s1) * delta + 6 * s2) * delta + 4 * s3) * delta + s4).sum(1) / number
    kurtosis = m4 / (m2 * m2)

    # about the token's own mean, which is −e away from the centre
    e, t2 = s1 / -width, s2 / width
    e2 = e * e
    variance = t2 - e2
    token = (((6 * t2 - 3 * e2) * e + s3 * (4 / width)) * e + s4 / width) / (variance * variance)
    token = library.where(high == low, library.nan, token)  # constant

    distance = SIGMAS * library.sqrt(m2)
    lower, upper = mean - distance, mean + distance  # [B]
    far = (high > upper[:, None]) | (low < lower[:, None])
    top, bottom = high, low
    if keep is not None:
        far = far & keep
        top, bottom = library.where(keep, high, -library.inf), library.where(keep, low, library.inf)
    kurtosis = library.where(library.amax(top, 1) == library.amin(bottom, 1), library.nan, kurtosis)
    return size, token, kurtosis, lower, upper, far


def _token_sums(x: Tensor, scratch: Scratch) -> Tensor:
    """For each token: a point near its mean, Σc, Σc², Σc³, Σc⁴ about it, min and max.  [7, B·T], float64"""
    rows = x.detach().flatten(0, 1)  # [B·T, d]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = torch.empty(8, len(rows), dtype=dtype, device=x.device)
    step = max(1, (_TOGETHER if x.device.type == "cpu" else _TOGETHER_ON_GPU) // x.shape[-1])
    for part, found in zip(rows.split(step), sums.split(step, 1), strict=True):
        _reduce(part.to(dtype), found, scratch)
    small = sums.double()
    unit = small[7]
    if x.device.type != "cpu" or bool((unit != 1).any()):
        small[1:5] *= unit ** torch.arange(1, 5, device=x.device)[:, None]
    return small[:7]


def _reduce(x: Tensor, out: Tensor, scratch: Scratch) -> None:
    """The sums of rows [N, d] about their centre, in units of ``out[7]``, into ``out`` [8, N]."""
    centre, s1, s2, s3, s4, low, high, unit = out
    torch.amax(x, -1, out=high)
    torch.amin(x, -1, out=low)
    torch.mean(x, -1, out=centre)
    c, power = scratch.two_like(x)
    torch.sub(x, centre[:, None], out=c)
    furthest = torch.maximum(high - centre, centre - low)
    unit.fill_(1)
    if _needs_units(furthest):
        sums_well = (furthest <= _FURTHEST) & (furthest >= _NEAREST)
        unit.copy_(furthest.masked_fill(sums_well | (furthest == 0), 1))
        c.div_(unit[:, None])
    torch.sum(c, -1, out=s1)
    torch.mul(c, c, out=power)
    torch.sum(power, -1, out=s2)
    torch.linalg.vector_norm(power, 2, -1, out=s4).square_()
    torch.sum(c.mul_(power), -1, out=s3)


def _needs_units(furthest: Tensor) -> bool:
    """Whether a row lies too near its centre or too far from it. A GPU would have to wait for the answer: yes there."""
    if furthest.device.type != "cpu":
        return True
    least, most = furthest.aminmax()
    return not (float(least) >= _NEAREST and float(most) <= _FURTHEST)


def _beyond(x: Tensor, far: Any, lower: Array, upper: Array) -> tuple[Tensor, Tensor]:
    """Where x is below ``lower`` or above ``upper``, both per sample, among the tokens in ``far``."""
    samples, tokens = map(torch.from_numpy, far.nonzero())
    if not len(samples):
        return torch.empty(3, 0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    # on x's device until the end: heavy tails select many rows that contain few outliers
    at = samples.to(x.device)
    rows = x.detach()[at, tokens.to(x.device)]  # [R, d]
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if rows.dtype == torch.float32:
        lower, upper = -_rounded_down(-lower), _rounded_down(upper)
    least, most = (torch.from_numpy(bound).to(rows)[at, None] for bound in (lower, upper))  # [R, 1]
    row, channel = ((rows < least) | (rows > most)).nonzero(as_tuple=True)
    values, row, channel = (found.cpu() for found in (rows[row, channel].double(), row, channel))
    return torch.stack([samples[row], tokens[row], channel]), values


def _rounded_down(bound: Array) -> Array:
    """The largest float32 that is not above: for a float32 x it decides ``x > bound`` as the bound itself does."""
    with np.errstate(over="ignore"):
        nearest = bound.astype(np.float32)
    above = nearest.astype(np.float64) > bound
    return np.where(above, np.nextafter(nearest, np.float32(-np.inf)), nearest).astype(np.float64)
