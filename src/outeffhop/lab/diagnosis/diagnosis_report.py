"""What a diagnosis found: outliers, the cost of 8 bits by every scheme, who is to blame, and what can be done."""

from __future__ import annotations

from dataclasses import dataclass

from outeffhop._dataclass_io import JsonReport
from outeffhop.lab.diagnosis.verdicts import is_enough, verdict
from outeffhop.outliers.outlier_report import HeadStats, OutlierReport

__all__ = ["Advice", "Blamed", "Culprits", "DiagnosisReport", "LeftOut", "REAL", "SchemeCost", "cost_of"]

REAL = "openvino"
"""The scheme of real execution in int8."""
_PARKED = 0.5  # a head with more of its attention than this on one token, or on special tokens, does little else


@dataclass(frozen=True)
class SchemeCost:
    """What one way to quantize costs.

    Attributes:
        scheme: a name of ``outeffhop.quantization.SCHEMES``, or ``REAL``.
        words: what is rounded to 8 bits, and how.
        metric: the task's metric of the quantized model, and of logits the share that "agree"; {} if there is none.
        sqnr_db: signal over error of the outputs.
        verdict: the same in words, by ``outeffhop.lab.diagnosis.verdicts``.
    """

    scheme: str
    words: str
    metric: dict[str, float]
    sqnr_db: float
    verdict: str

    @property
    def is_enough(self) -> bool:
        return is_enough(self.sqnr_db)


@dataclass(frozen=True)
class Blamed:
    """A tensor, or a layer.

    Attributes:
        name: as ``exclude`` of ``simulate`` and ``outeffhop quantize --exclude`` take it.
        alone_db: SQNR of the outputs if nothing else is rounded.
        typical_db: signal over rounding error of the tensor's median channel or token.
        largest, std: its largest |x|, and its standard deviation.
    """

    name: str
    alone_db: float
    typical_db: float
    largest: float
    std: float


@dataclass(frozen=True)
class LeftOut:
    """SQNR of the outputs with the first ``count`` of the blamed in floating point."""

    count: int
    sqnr_db: float


@dataclass(frozen=True)
class Culprits:
    """The tensors or layers to blame under one scheme, on a few samples.

    Attributes:
        scheme: its name.
        units: "tensors" or "layers".
        among: how many of them are quantized.
        sqnr_db: with all of them rounded.
        tensors: those that cost most when they alone are rounded, first.
        left_out: with 1, 2, 4, … of them in floating point.
    """

    scheme: str
    units: str
    among: int
    sqnr_db: float
    tensors: tuple[Blamed, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def remedy(self) -> LeftOut | None:
        """The fewest that make the scheme enough in floating point; None if it is already, or if none do."""
        if is_enough(self.sqnr_db):
            return None
        return next((left for left in self.left_out if is_enough(left.sqnr_db)), None)


@dataclass(frozen=True)
class Advice:
    """What can be done, and the command that does it, if one does."""

    text: str
    command: str | None = None


@dataclass(frozen=True)
class DiagnosisReport(JsonReport):
    """The diagnosis of a checkpoint; ``diagnosis.json``.

    Attributes:
        checkpoint: as it was named.
        model, method: its class, and the method of its attention.
        parameters: how many it has.
        task: what it was measured on.
        data: what on.
        builtin: whether that is built-in data, because none was named.
        samples, length: how many were measured; tokens per sample, None for other data than text.
        calibration_samples: that static ranges were found on.
        dtype, device: of the model.
        seconds: that the measurements took.
        full: the task's metric in floating point; {} if none is known.
        outliers: of its activations, and what its heads attend to.
        tokens: tensor → the token that its largest value is at, as text, if known.
        costs: one entry for each scheme.
        no_int8: why real int8 is not among them; "" if it is.
        culprits: for the schemes that are not as good as unchanged.
        advice: what can be done.
    """

    FORMAT = "outeffhop.diagnosis.1"

    checkpoint: str
    model: str
    method: str
    parameters: int
    task: str
    data: str
    builtin: bool
    samples: int
    length: int | None
    calibration_samples: int
    dtype: str
    device: str
    seconds: float
    full: dict[str, float]
    outliers: OutlierReport
    tokens: dict[str, str]
    costs: tuple[SchemeCost, ...]
    no_int8: str
    culprits: tuple[Culprits, ...]
    advice: tuple[Advice, ...]

    def cost(self, scheme: str) -> SchemeCost | None:
        return next((cost for cost in self.costs if cost.scheme == scheme), None)

    @property
    def parked(self) -> list[tuple[HeadStats, list[int]]]:
        """The heads, by attention module, that leave more than half of their attention on the first token, on special
        tokens or on nothing: they do little else."""
        found = []
        for each in self.outliers.attention:
            special = each.special_tokens or each.first_token
            idle = [max(some) > _PARKED for some in zip(each.first_token, special, each.no_op, strict=True)]
            if any(idle):
                found.append((each, [head for head, parked in enumerate(idle) if parked]))
        return found

    @property
    def heads(self) -> int:
        return sum(len(each.first_token) for each in self.outliers.attention)

    def __str__(self) -> str:
        lines = [f"{self.checkpoint}: {self.model} ({self.method}) on {self.data}, {self.samples} samples"]
        lines += [f"  {c.words}: {c.sqnr_db:.1f} dB, {c.verdict}" for c in self.costs]
        lines += [f"  {a.text}{'' if a.command is None else f': {a.command}'}" for a in self.advice]
        return "\n".join(lines)


def cost_of(scheme: str, words: str, found: dict[str, float]) -> SchemeCost:
    """The cost that a ``Comparison`` found."""
    rest = {name: value for name, value in found.items() if name not in ("sqnr_db", "loss")}
    return SchemeCost(scheme, words, rest, found["sqnr_db"], verdict(found["sqnr_db"]))
