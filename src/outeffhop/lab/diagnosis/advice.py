"""What the numbers of a diagnosis advise, with the command that does it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from outeffhop.lab.diagnosis.diagnosis_config import DiagnosisConfig
from outeffhop.lab.diagnosis.diagnosis_report import REAL, Advice, Culprits, SchemeCost
from outeffhop.quantization import SCHEMES

__all__ = ["advise"]

# the fewest restrictions first: where the whole model survives, its Linear layers do; static ranges cost no time
_ORDER = ("paper", "linear", "per-channel", "smoothquant", "per-token", "fp8")
_STATIC = ("paper", "per-channel")
_SAVED = ("linear", "per-channel", "per-token")  # what a checkpoint can hold
_OWN = "YOUR_DATA"


def advise(
    config: DiagnosisConfig, costs: Sequence[SchemeCost], culprits: Sequence[Culprits], *, saves: bool, mends: bool
) -> tuple[Advice, ...]:
    """What to do, the simplest first.

    Args:
        saves: whether ``outeffhop quantize --save`` can write such a model.
        mends: whether ``outeffhop mend`` serves it.
    """
    by_name = {cost.scheme: cost for cost in costs}
    found = _enough(config, [by_name[name] for name in _ORDER if name in by_name], saves)
    for each in culprits:
        if each.remedy is not None:
            found.append(_leave(config, each, each.remedy.count))
    lost = [by_name[name] for name in _STATIC if name in by_name and not by_name[name].is_enough]
    real = next((cost for cost in costs if cost.scheme == REAL and cost.is_enough), None)
    if real is not None:
        found.append(
            Advice(
                f"Run it in real int8 by OpenVINO: {_said(real)}.",
                f"{_command(config)} --int8 --out quantized",
            )
        )
    if lost and mends:
        data = shlex.quote(config.data or _OWN)
        found.append(
            Advice(
                f"Mend it: 8 bits for {lost[0].words}, leave its outputs {lost[0].verdict}. Some minutes of "
                f"fine-tuning against its outliers{_on_what(config)} make 8 bits cost less.",
                f"outeffhop mend {_named(config)} --data {data} --out mended{_tokenizer(config)}",
            )
        )
    elif lost:
        found.append(
            Advice(
                f"8 bits for {lost[0].words}, leave its outputs {lost[0].verdict}, and outeffhop mend does not serve "
                "this model."
            )
        )
    return tuple(found)


def _enough(config: DiagnosisConfig, costs: Sequence[SchemeCost], saves: bool) -> list[Advice]:
    """The simplest scheme that is enough, and the simplest of those that the outputs survive best."""
    simplest = next((cost for cost in costs if cost.is_enough), None)
    if simplest is None:
        best = max(costs, key=lambda cost: cost.sqnr_db)
        return [Advice(f"No scheme is enough. The best is 8 bits for {best.words}: {_said(best)}.")]
    whole = " Every tensor can be an integer." if simplest.scheme == "paper" else ""
    text = f"This scheme is enough: 8 bits for {simplest.words}: {_said(simplest)}.{whole}"
    found = [Advice(text, _quantize(config, simplest, saves))]
    top = max(costs, key=lambda cost: cost.sqnr_db).verdict
    better = next(cost for cost in costs if cost.verdict == top)
    if top != simplest.verdict:
        text = f"This scheme is better: 8 bits for {better.words}: {_said(better)}."
        found.append(Advice(text, _quantize(config, better, saves)))
    return found


def _said(cost: SchemeCost) -> str:
    return f"outputs are {cost.verdict} ({cost.sqnr_db:.1f} dB)"


def _quantize(config: DiagnosisConfig, cost: SchemeCost, saves: bool) -> str:
    keeps = "--save quantized" if saves and cost.scheme in _SAVED else "--out quantized"
    return f"{_command(config)} --scheme {cost.scheme} {keeps}"


def _leave(config: DiagnosisConfig, culprits: Culprits, count: int) -> Advice:
    names = [each.name for each in culprits.tensors[:count]]
    after = next(left.sqnr_db for left in culprits.left_out if left.count == count)
    kind = culprits.units if count > 1 else culprits.units.removesuffix("s")
    these = f"these {count} {kind}" if count > 1 else f"this {kind}"
    return Advice(
        f"Leave {these} of {culprits.among} in floating point: {', '.join(names)}. 8 bits for "
        f"{SCHEMES[culprits.scheme].what}, then leave {after:.1f} dB instead of {culprits.sqnr_db:.1f}.",
        f"{_command(config)} --scheme {culprits.scheme} --out quantized "
        f"--exclude {' '.join(shlex.quote(name) for name in names)}",
    )


def _command(config: DiagnosisConfig) -> str:
    task = f" --task {config.task}" if config.task else ""
    return f"outeffhop quantize {_named(config)} --data {shlex.quote(config.data or _OWN)}{task}{_tokenizer(config)}"


def _named(config: DiagnosisConfig) -> str:
    return shlex.quote(config.checkpoint or "CHECKPOINT")


def _tokenizer(config: DiagnosisConfig) -> str:
    return f" --tokenizer {shlex.quote(config.tokenizer)}" if config.tokenizer else ""


def _on_what(config: DiagnosisConfig) -> str:
    return ", on data like what it will see," if config.data is None else ""
