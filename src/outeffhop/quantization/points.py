"""A quantizer at one place of a model: it observes in calibration, rounds when frozen, and can be measured."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outeffhop.quantization.observers import Observer, Seen
from outeffhop.quantization.quantizers import Grid, Uniform
from outeffhop.quantization.schemes import Scheme

__all__ = ["Point", "Power", "read_powers", "smoothing"]


class Power:
    """Signal and rounding error of a tensor, added up over batches.

    Attributes:
        count: how many numbers were added.
    """

    def __init__(self) -> None:
        self.count = 0
        self._read = _Sums()
        self._unread: list[tuple[int, Tensor]] = []  # numbers of each tensor, and what they show

    @torch.no_grad()
    def add(self, x: Tensor, rounded: Tensor) -> Power:
        """Adds a tensor and its rounded form. It makes a GPU compute, and does not wait for the result."""
        if not x.numel():
            return self
        values = x.float().reshape(-1, x.shape[-1] if x.dim() > 1 else 1)  # [tokens, channels]
        signal, noise = values.square(), (values - rounded.float().reshape(values.shape)).square()
        tokens = signal.sum(1).double(), noise.sum(1).double()
        channels = signal.sum(0).double(), noise.sum(0).double()
        shown = (
            values.sum(1).double().sum(),
            tokens[0].sum(),
            tokens[1].sum(),
            signal.max().sqrt().double(),
            _median_ratio(*tokens),
            _median_ratio(*channels),
        )
        self.count += x.numel()
        self._unread.append((x.numel(), torch.stack(shown)))
        return self

    @property
    def noise(self) -> float:
        """The sum of squared errors."""
        return self._sums.noise

    @property
    def largest(self) -> float:
        """The largest |x|."""
        return self._sums.largest

    @property
    def sqnr_db(self) -> float:
        """10 log₁₀ of signal over rounding error; inf if nothing was lost."""
        sums = self._sums
        if sums.noise == 0.0:
            return math.inf
        return 10.0 * math.log10(sums.signal / sums.noise) if sums.signal else -math.inf

    @property
    def typical_db(self) -> float:
        """The same for the median channel or the median token, whichever is lower; the mean over batches.

        An outlier's own power makes the plain ratio look good, while all other values lose precision. This shows it.
        """
        return self._sums.typical / self.count if self.count else math.inf

    @property
    def std(self) -> float:
        sums, count = self._sums, max(self.count, 1)
        mean = sums.total / count
        return math.sqrt(max(sums.signal / count - mean * mean, 0.0))

    @property
    def _sums(self) -> _Sums:
        read_powers([self])
        return self._read


@dataclass
class _Sums:
    total: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0
    typical: float = 0.0

    def add(self, count: int, shown: list[float]) -> None:
        total, signal, noise, largest, *ratios = shown
        self.total += total
        self.signal += signal
        self.noise += noise
        self.largest = max(self.largest, largest)
        self.typical += count * min(map(_decibels, ratios))


def _decibels(ratio: float) -> float:
    return 10.0 * math.log10(ratio) if 0.0 < ratio < math.inf else math.inf


def read_powers(powers: Iterable[Power]) -> None:
    """Reads what was added since the last time. A GPU has to wait once, and not once for each power."""
    unread: dict[torch.device, list[tuple[Power, int, Tensor]]] = {}
    for power in powers:
        for count, shown in power._unread:
            unread.setdefault(shown.device, []).append((power, count, shown))
        power._unread = []
    for parts in unread.values():
        read = torch.stack([shown for _, _, shown in parts]).tolist()
        for (power, count, _), numbers in zip(parts, read, strict=True):
            power._read.add(count, numbers)


def _median_ratio(signal: Tensor, noise: Tensor) -> Tensor:
    """The median of signal / noise where there is a signal; NaN if there is none, or if one of the ratios is NaN."""
    alive = signal > 0
    ratio = signal / noise
    lost = (alive & ratio.isnan()).any()
    # not nanmedian, which a GPU has to wait for
    ordered = torch.where(alive, ratio, torch.nan).sort().values  # NaN comes last
    middle = (alive.sum() - 1).clamp(min=0) // 2
    return torch.where(lost, torch.nan, ordered.index_select(0, middle[None])[0])


def smoothing(largest_input: Tensor, weight: Tensor, alpha: float = 0.5) -> Tensor:
    """SmoothQuant's factors s, which move what makes a Linear's input hard to quantize into its weight.

    x Wᵀ = (x / s)(W · s)ᵀ for any s > 0, one number per input channel. s_j = max|x_j|^α / max|W_j|^(1−α) leaves both
    sides about equally hard. The quantizer of the input divides by s, so no other module changes, and this also works
    for post-LayerNorm models, whose LayerNorms feed a residual as well.

    Args:
        largest_input: max |x_j| of each input channel, [in].
        weight: [out, in].
        alpha: 0 equalizes the channels of the weight, 1 those of the input.

    Returns:
        [in], 1 for a channel without input or without weight.
    """
    largest_weight = weight.float().abs().amax(0)
    inputs = largest_input.float().to(weight.device)
    alive = (inputs > 0) & (largest_weight > 0)
    factors = inputs.pow(alpha) / largest_weight.pow(1.0 - alpha)
    return torch.where(alive, factors, torch.ones_like(factors)).clamp(1e-5, 1e5)


class Point:
    """A quantizer with a name.

    Attributes:
        kind: "weight" or "activation".
        grid: None before ``freeze``, and if each token has its own.
        factors: what the tensor is multiplied by before rounding, for SmoothQuant: 1 / s for the input, s for the
            weight.
        dimensions: how many the tensor had that it saw last; None before.
    """

    def __init__(self, name: str, kind: str, spec: Uniform, scheme: Scheme, how: str) -> None:
        self.name, self.kind, self.spec = name, kind, spec
        self.grid: Grid | None = None
        self.factors: Tensor | None = None
        self.observer: Observer | None = None
        self.dimensions: int | None = None
        self._batch: int | None = None
        if spec.granularity != "token":
            self.observer = Observer(spec, how, scheme.momentum, scheme.percentile)

    def look(self, x: Tensor) -> Seen | None:
        """Looks at a tensor of a batch, or at its real tokens; None if it says nothing about a range."""
        if self.observer is None:
            return None
        return self.observer.look(x if self.factors is None else x.float() * self.factors)

    def take(self, seen: Seen, batch: int | None = None) -> None:
        """Updates the range with what ``look`` saw; a module that runs several times shows several of one batch."""
        again = batch is not None and batch == self._batch
        self._batch = batch
        if self.observer is not None:
            self.observer.take(seen, again)

    def smooth(self, weight_point: Point, weight: Tensor, alpha: float, input_axis: int) -> None:
        """Sets SmoothQuant's factors on both sides, from the range of each input channel."""
        low, high = self._seen()
        factors = smoothing(torch.maximum(-low, high), weight.movedim(input_axis, 1), alpha)
        self.factors = 1.0 / factors
        weight_point.factors = factors if input_axis == 1 else factors[:, None]

    def check(self) -> None:
        """Raises a ValueError if ``freeze`` would find no range."""
        if self.observer is not None:
            self._seen()

    def freeze(self) -> None:
        """Fixes the observed range."""
        if self.grid is not None or self.observer is None:
            return
        low, high = self._seen()
        if self.kind == "activation" and self.spec.granularity == "channel":
            # channels were observed for their factors; the smoothed tensor has one range
            scale = torch.ones_like(low) if self.factors is None else self.factors
            low, high = (low * scale).amin().reshape(1), (high * scale).amax().reshape(1)
            self.spec = replace(self.spec, granularity="tensor")
        self.grid = self.spec.grid(low, high)

    def _seen(self) -> tuple[Tensor, Tensor]:
        if self.observer is None or self.observer.low is None or self.observer.high is None:
            raise ValueError(
                f"{self.name} has no range: it saw only empty tensors in calibration, or none; "
                "calibrate on batches with data"
            )
        return self.observer.low, self.observer.high

    def __call__(self, x: Tensor) -> Tensor:
        """The rounded tensor, in its own dtype."""
        self.dimensions = x.dim()
        values = x if self.factors is None else x.float() * self.factors.to(x.device)
        if self.observer is None:  # each token has its own range
            # a token with NaN has no range: with any grid, NaN stays NaN
            grid = self.spec.grid(*(end.nan_to_num() for end in self.spec.minmax(values))) if x.numel() else None
        else:
            if self.grid is not None and self.grid.scale.device != x.device:
                self.grid = self.grid.to(x.device)
            grid = self.grid
        if grid is None:
            return x
        rounded = grid.fake(values)
        return rounded if self.factors is None else (rounded / self.factors.to(x.device)).to(x.dtype)
