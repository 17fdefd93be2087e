"""The result of a measurement: statistics per tensor and per head, and the paper's two numbers."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from outeffhop._dataclass_io import JsonReport

__all__ = ["Channel", "HeadStats", "OutlierReport", "Position", "TensorStats", "compare", "place_of"]


@dataclass(frozen=True)
class Position:
    """A value beyond 6σ, and the sample, token and channel it is in."""

    value: float
    sample: int
    token: int
    channel: int


@dataclass(frozen=True)
class Channel:
    """A channel with values beyond 6σ: how many, and their largest |x|."""

    channel: int
    count: int
    max_abs: float


@dataclass(frozen=True)
class TensorStats:
    """Statistics of one tensor over all samples; nan or infinite if activations were (see ``non_finite``).

    Attributes:
        name: of the module whose output it is, or whose input if the name ends with ``:input``.
        samples, tokens, width: how many samples and tokens were measured, and the features of a token.
        inf_norm: the paper's: max |x| per sample, averaged over samples.
        max_abs: the true maximum of |x|.
        token_inf_norm: max |x| per token, averaged over tokens.
        kurtosis: per sample over tokens and features, averaged over samples; 3 for a Gaussian. Constant samples have
            no kurtosis and are left out of the average; None if all are constant.
        token_kurtosis: per token over features, averaged over tokens.
        outliers: how many values are more than 6σ away from their sample's mean.
        values: how many values there are.
        non_finite: how many values are nan or infinite.
        positions: of the largest outliers, largest first.
        channels: those with the most outliers, most first.
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

        The layer is None outside all layers. The component of a layer's own output is "".
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
    """Statistics of the heads of one attention module, averaged over queries without padding.

    Attributes:
        name: of the module.
        queries: how many were measured.
        first_token: attention on the first token that is not padding, [H].
        special_tokens: attention on special tokens, [H]; None if the token ids, or which of them are special, are
            unknown.
        no_op: attention to nothing, [H]: 1 − γ, where γ is the sum of a query's probabilities.
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
    """The outliers of a model on some data; ``save`` and ``load`` keep it as JSON.

    Attributes:
        model: its class.
        method: its attention method, or its attention implementation if that is not one of ours.
        samples: how many were measured.
        chosen: which tensors were measured: "paper", "all" or patterns.
        special_ids: the ids counted as special tokens.
        tensors: in the model's order.
        attention: one entry per attention module, in the order they ran.
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
        """The same for kurtosis per token."""
        return _mean([t.token_kurtosis for t in self.tensors if t.in_kurtosis])

    @property
    def max_inf_norm(self) -> float:
        """The paper's: max |x| per sample, averaged over samples; then the largest over tensors."""
        return _max([t.inf_norm for t in self.tensors])

    @property
    def max_abs(self) -> float:
        """The true maximum of |x| over all tensors."""
        return _max([t.max_abs for t in self.tensors])

    @property
    def no_op(self) -> float | None:
        """1 − γ, averaged over all heads; None if no attention was measured."""
        found = [p for heads in self.attention for p in heads.no_op]
        return _mean(found) if found else None

    @property
    def non_finite(self) -> dict[str, int]:
        """How many values are nan or infinite, by tensor, for tensors that have any."""
        return {t.name: t.non_finite for t in self.tensors if t.non_finite}

    def worst(self, k: int = 10) -> list[TensorStats]:
        """The k worst tensors: those with non-finite values, then by inf norm."""

        def badness(t: TensorStats) -> tuple[bool, float]:
            return bool(t.non_finite), t.inf_norm if math.isfinite(t.inf_norm) else math.inf

        return sorted(self.tensors, key=badness, reverse=True)[:k]

    def table(self, k: int = 10) -> list[dict[str, Any]]:
        """The k worst tensors as rows, with the channels that have the most outliers."""
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
    """One row per report, with ratios to the first: ``max_inf_norm_ratio`` 0.1 means a tenth of its inf norm."""
    if not reports:
        raise ValueError("reports is empty: give at least one")
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
