"""Quantization schemes by name: "W8A8" is the paper's; "W4A8 per-token" and "W8A8 smoothquant" are alternatives.

"fp8" rounds what the paper's scheme quantizes to 8-bit floating point. "W8A8KV8" also quantizes keys and values as a KV
cache holds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from outeffhop._naming import did_you_mean, known
from outeffhop.quantization.float8 import Float8
from outeffhop.quantization.observers import RANGES
from outeffhop.quantization.quantizers import Uniform

__all__ = ["Scheme", "SCHEMES", "PLACEMENTS"]

PLACEMENTS = ("paper", "linear")


@dataclass(frozen=True)
class Scheme:
    """What is quantized and where, and how ranges are found.

    Attributes:
        name: one of ``SCHEMES``.
        weights, activations: their quantizers; with activations per token, each token has its own range.
        weight_range, activation_range: one of ``observers.RANGES``.
        placement: "paper" (see ``placement.py``) or "linear".
        alpha: how much of the difficulty SmoothQuant moves from activations to weights; None for no SmoothQuant.
        momentum, percentile: settings of the activations' range estimators.
        kv_bits: bits of keys and values as a KV cache holds them; None leaves them as they are. They have the
            activations' granularity and range.
    """

    name: str
    weights: Uniform
    activations: Uniform
    weight_range: str = "minmax"
    activation_range: str = "running"
    placement: str = "paper"
    alpha: float | None = None
    momentum: float = 0.9
    percentile: float = 99.999
    kv_bits: int | None = None

    def __post_init__(self) -> None:
        known("placement", self.placement, PLACEMENTS)
        known("weight_range", self.weight_range, RANGES)
        known("activation_range", self.activation_range, RANGES)
        if self.kv_bits is not None:
            replace(self.activations, bits=self.kv_bits)  # checks them
        if self.weights.granularity == "token":
            raise ValueError("weights.granularity='token': weights have no tokens; use 'tensor' or 'channel'")
        if self.activations.granularity == "channel":
            raise ValueError(
                "activations.granularity='channel': these cannot be summed in integers; use 'tensor' or 'token'"
            )
        if self.alpha is not None:
            if not 0.0 <= self.alpha <= 1.0:
                raise ValueError(f"alpha={self.alpha}: must be in [0, 1]")
            if self.placement != "linear" or self.dynamic or self.activation_range != "minmax":
                raise ValueError(
                    f"alpha={self.alpha}: SmoothQuant moves the range of Linear inputs into the weights; it needs "
                    "placement='linear' and activations per tensor with activation_range='minmax'"
                )

    @property
    def dynamic(self) -> bool:
        """Whether activation ranges are computed as the model runs, without calibration."""
        return self.activations.granularity == "token"

    @property
    def floating(self) -> bool:
        """Whether weights or activations are rounded to 8-bit floating point instead of integers."""
        return isinstance(self.weights, Float8) or isinstance(self.activations, Float8)

    @property
    def bits(self) -> str:
        cache = "" if self.kv_bits is None else f"KV{self.kv_bits}"
        return f"W{self.weights.bits}A{self.activations.bits}{cache}"

    @property
    def words(self) -> str:
        """The bits, what is rounded, and how: "W8A8 of Linear layers, static per tensor"."""
        return f"{self.bits} of {self.what}"

    @property
    def what(self) -> str:
        """What is rounded, and how: "Linear layers, static per tensor"."""
        where = "everything" if self.placement == "paper" else "Linear layers"
        if self.floating:
            where += f" in {self.weights.bits}-bit floating point"
        if self.alpha is not None:
            how = "SmoothQuant"
        elif self.dynamic:
            how = "dynamic per token"
        elif self.weights.granularity == "channel":
            how = "static, weights per channel"
        else:
            how = "static per tensor"
        return f"{where}, {how}"

    def __str__(self) -> str:
        return f"{self.bits} {self.name}"

    @classmethod
    def parse(cls, text: str | Scheme) -> Scheme:
        """Reads bits, a name or both: ``"W8A8"``, ``"smoothquant"``, ``"w4a8 per-token"``, ``"W8A8KV8"``."""
        if isinstance(text, Scheme):
            return text
        if not isinstance(text, str):
            raise TypeError(f"scheme={text!r} is a {type(text).__name__}: must be text such as 'W8A8 per-token'")
        bits = [word for word in text.split() if _BITS.fullmatch(word)] or ["W8A8"]
        names = [word for word in text.split() if not _BITS.fullmatch(word)] or ["paper"]
        name = next((word for word in names if word not in SCHEMES), names[0])
        if name not in SCHEMES or len(bits) + len(names) > 2:
            near = "." if name in SCHEMES else did_you_mean(name, SCHEMES)
            raise ValueError(
                f"scheme={text!r} is unknown{near} Give bits such as W8A8 or W8A8KV8 and a name. "
                f"Available: {', '.join(SCHEMES)}"
            )
        weights, activations, cache = _BITS.fullmatch(bits[0]).groups()  # type: ignore[union-attr]
        scheme = SCHEMES[name]
        return replace(
            scheme,
            weights=replace(scheme.weights, bits=int(weights)),
            activations=replace(scheme.activations, bits=int(activations)),
            kv_bits=None if cache is None else int(cache),
        )

    def with_range(self, activation_range: str | None = None) -> Scheme:
        return self if activation_range is None else replace(self, activation_range=activation_range)


_BITS = re.compile(r"[wW](\d+)[aA](\d+)(?:[kK][vV](\d+))?")
_WEIGHTS = Uniform(symmetric=True)
_WEIGHT_ROWS = Uniform(symmetric=True, granularity="channel")
_ACTIVATIONS = Uniform()

SCHEMES: dict[str, Scheme] = {
    # static, per tensor: what the paper reports
    "paper": Scheme("paper", _WEIGHTS, _ACTIVATIONS),
    # the same quantizers, only on Linear inputs and weights
    "linear": Scheme("linear", _WEIGHTS, _ACTIVATIONS, placement="linear"),
    # a grid for each row of weights, as most programs that run int8 have; activations stay static, per tensor
    "per-channel": Scheme("per-channel", _WEIGHT_ROWS, _ACTIVATIONS, placement="linear"),
    "per-token": Scheme(
        "per-token",
        _WEIGHT_ROWS,
        Uniform(granularity="token"),
        placement="linear",
    ),
    "smoothquant": Scheme(
        "smoothquant", _WEIGHTS, _ACTIVATIONS, activation_range="minmax", placement="linear", alpha=0.5
    ),
    # where the paper quantizes, in 8-bit floating point
    "fp8": Scheme("fp8", Float8(), Float8()),
}
"""The schemes by name: the paper's, and its rivals."""
