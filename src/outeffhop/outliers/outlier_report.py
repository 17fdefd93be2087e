"""What a measurement gives: per tensor, per head, and the paper's two numbers; to JSON and back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from outeffhop._dataclass_io import JsonReport

__all__ = ["Channel", "HeadStats", "OutlierReport", "Position", "TensorStats", "compare", "place_of"]


@dataclass(frozen=True)
class Position:
    """A value beyond 6σ: in which sample, at which of its tokens, in which channel."""

    value: float
    sample: int
    token: int
    channel: int


@dataclass(frozen=True)
class Channel:
    """A channel that carries values beyond 6σ: how many, and the largest |x| of them."""

    channel: int
    count: int
    max_abs: float


@dataclass(frozen=True)
class TensorStats:
    """One tensor over all samples. Numbers are nan or infinite where activations were: see ``non_finite``.

    Attributes:
        name: of the module; ``:input`` behind it says that this is what the module is given.
        samples, tokens, width: how many samples and tokens were measured, and the features of a token.
        inf_norm: max |x| per sample, the mean over samples; the paper's.
        max_abs: the true maximum of |x|.
        token_inf_norm: max |x| per token, the mean over tokens.
        kurtosis: of a sample over tokens and features, the mean over samples; a Gaussian has 3. None where every
            sample is constant. Constant samples and tokens have none and are not in the means.
        token_kurtosis: of a token over its features, the mean over tokens.
        outliers: how many values are farther than 6σ from their sample's mean.
        values: of how many.
        non_finite: how many values are nan or infinite.
        positions: of the largest outliers, largest first.
        channels: those with most outliers, most first.
        in_kurtosis: whether it counts in the report's average kurtosis.
    """

    name: str
    samples: int
    tokens: int
    width: int
    inf_norm: float
    max_abs: float
    token_inf_norm: float
    kurtosis: float | None
    token_kurtosis: float | None
    outliers: int
    values: int
    non_finite: int
    positions: tuple[Position, ...]
    channels: tuple[Channel, ...]
    in_kurtosis: bool

    @property
    def place(self) -> tuple[str, int | None, str]:
        """Stack, layer and component: ``bert.encoder.layer.3.output.dense`` is (bert.encoder.layer, 3, output.dense).

        Outside all layers the layer is None; a layer's own output has the component "".
        """
        return place_of(self.name)


def place_of(tensor: str) -> tuple[str, int | None, str]:
    """``TensorStats.place`` of a tensor's name."""
    found = re.fullmatch(r"(.*?)\.?(?<![^.])(\d+)((?:\.|:|$).*)", tensor)
    if found is None:
        return "", None, tensor
    return found[1], int(found[2]), found[3].removeprefix(".")


@dataclass(frozen=True)
class HeadStats:
    """The heads of one attention module, each number a mean over its queries, padding left out.

    Attributes:
        name: of the module.
        queries: how many were measured.
        first_token: attention on the first token that is not padding, [H].
        special_tokens: attention on special tokens, [H]; None where the ids of tokens, or which are special, are
            not known.
        no_op: 1 − γ, γ the sum of a query's probabilities: attention to nothing, [H].
        max_probability: the largest probability of a query, [H].
    """

    name: str
    queries: int
    first_token: tuple[float, ...]
    special_tokens: tuple[float, ...] | None
    no_op: tuple[float, ...]
    max_probability: tuple[float, ...]


@dataclass(frozen=True)
class OutlierReport(JsonReport):
    """The outliers of a model on some data.

    Attributes:
        model: its class.
        method: its attention method, or another attention implementation.
        samples: how many were measured.
        chosen: "paper", "all" or patterns: which tensors.
        special_ids: the ids counted as special tokens.
        tensors: in the model's order.
        attention: per attention module, in the order they ran.
    """

    FORMAT = "outeffhop.outliers.1"
    DERIVED = ("summary",)

    model: str
    method: str
    samples: int
    chosen: str | tuple[str, ...]
    special_ids: tuple[int, ...]
    tensors: tuple[TensorStats, ...]
    attention: tuple[HeadStats, ...]

    @property
    def avg_kurtosis(self) -> float:
        """The paper's: kurtosis per sample, averaged over samples, then over tensors."""
        return _mean([t.kurtosis for t in self.tensors if t.in_kurtosis])

    @property
    def avg_token_kurtosis(self) -> float:
        """The same with kurtosis per token."""
        return _mean([t.token_kurtosis for t in self.tensors if t.in_kurtosis])

    @property
    def max_inf_norm(self) -> float:
        """The paper's: max |x| per sample, averaged over samples; the largest of all tensors."""
        return _max([t.inf_norm for t in self.tensors])

    @property
    def max_abs(self) -> float:
        """The true maximum of |x| over all tensors."""
        return _max([t.max_abs for t in self.tensors])

    @property
    def no_op(self) -> float | None:
        """1 − γ, the mean over all heads; None where no attention was seen."""
        found = [p for heads in self.attention for p in heads.no_op]
        return _mean(found) if found else None

    @property
    def non_finite(self) -> dict[str, int]:
        """Tensor → how many of its values are nan or infinite, of those that have any."""
        return {t.name: t.non_finite for t in self.tensors if t.non_finite}

    def worst(self, k: int = 10) -> list[TensorStats]:
        """The k worst tensors: those with non-finite values, then by inf norm."""

        def badness(t: TensorStats) -> tuple[bool, float]:
            return bool(t.non_finite), t.inf_norm if math.isfinite(t.inf_norm) else math.inf

        return sorted(self.tensors, key=badness, reverse=True)[:k]

    def table(self, k: int = 10) -> list[dict[str, Any]]:
        """The k worst tensors as rows, with the channels that carry their outliers."""
        return [
            {
                "tensor": t.name,
                "inf_norm": t.inf_norm,
                "max_abs": t.max_abs,
                "kurtosis": t.kurtosis,
                "token_kurtosis": t.token_kurtosis,
                "outliers": t.outliers,
                "share": t.outliers / t.values if t.values else math.nan,
                "channels": [c.channel for c in t.channels[:3]],
                "non_finite": t.non_finite,
            }
            for t in self.worst(k)
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """The report in a few numbers."""
        return {
            "model": self.model,
            "method": self.method,
            "samples": self.samples,
            "avg_kurtosis": self.avg_kurtosis,
            "avg_token_kurtosis": self.avg_token_kurtosis,
            "max_inf_norm": self.max_inf_norm,
            "max_abs": self.max_abs,
            "outliers": sum(t.outliers for t in self.tensors),
            "values": sum(t.values for t in self.tensors),
            "no_op": self.no_op,
            "non_finite": self.non_finite,
        }


def compare(reports: dict[str, OutlierReport]) -> list[dict[str, Any]]:
    """One row per report, with ratios to the first: 0.1 in ``max_inf_norm_ratio`` is a tenth of its inf norm."""
    if not reports:
        raise ValueError("reports is empty: at least one is needed")
    rows: list[dict[str, Any]] = []
    for name, report in reports.items():
        row = {"name": name, **report.summary}
        first = rows[0] if rows else row
        ratios = {f"{key}_ratio": _ratio(row[key], first[key]) for key in _COMPARED}
        rows.append(row | ratios)
    return rows


_COMPARED = ("avg_kurtosis", "avg_token_kurtosis", "max_inf_norm", "max_abs")


def _mean(values: list[float | None] | list[float]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else math.nan


def _max(values: list[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan
