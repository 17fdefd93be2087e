"""Verdicts on Table 1: its averages over twelve pairs, its one exception, and three claims about every pair.

A pair is a model and a method, with softmax and with softmax1.
"""

from __future__ import annotations

from math import isfinite
from statistics import mean

from outeffhop.lab.paper import published
from outeffhop.lab.paper.experiment import Values, Verdict, VerdictWord
from outeffhop.lab.paper.ranking import judged, mean_std, surplus
from outeffhop.lab.paper.table1_numbers import FIELDS, Found, change, cut, full, losses, models_of, percent, seed_losses
from outeffhop.lab.paper.trained_models import CHIEF

__all__ = ["cut_verdict", "exception_verdict", "loss_verdict", "outlier_verdict", "quality_verdict", "verdicts"]

AS_GOOD = 0.02  # a metric that is worse by less than this share counts as unchanged: seeds differ by as much

Pair = tuple[list[Values], list[Values]]  # the seeds without softmax1, and those with it


def verdicts(runs: Found) -> list[Verdict]:
    """On the averages and the exception, then on each pair of each model that is measured."""
    pairs = _pairs(runs)
    found = [
        cut_verdict("kurtosis", published.CLAIMED_KURTOSIS_CUT, pairs),
        cut_verdict("inf_norm", published.CLAIMED_INF_NORM_CUT, pairs),
        exception_verdict(pairs),
    ]
    for model in models_of(runs):
        for method, _ in published.PAIRS:
            pair = pairs.get((model, method))
            found.append(outlier_verdict(model, method, pair))
            if pair is not None:
                found += [loss_verdict(model, method, pair), quality_verdict(model, method, pair)]
    return found


def _pairs(runs: Found) -> dict[tuple[str, str], Pair]:
    """Model and method of each pair that is measured on both sides."""
    return {
        (model, old): (runs[model, old], runs[model, new])
        for model in published.NAMES
        for old, new in published.PAIRS
        if (model, old) in runs and (model, new) in runs
    }


def _name(model: str, method: str) -> str:
    return f"{published.NAMES[model]}, {method}"


def _seeds(pair: Pair) -> int:
    return min(map(len, pair))


def cut_verdict(field: str, claimed: float, pairs: dict[tuple[str, str], Pair]) -> Verdict:
    """Confirmed by a reduction as large as claimed, not seen if it is smaller, contradicted by an increase."""
    claim = (
        f"softmax1 lowers the {FIELDS[field]} by {100 * claimed:.0f} % on average over twelve pairs (four models, "
        "each vanilla, clipped and gated)"
    )
    wanted = len(published.NAMES) * len(published.PAIRS)
    if len(pairs) < wanted:
        return Verdict(claim, "not measured", f"{len(pairs)} of {wanted} pairs are measured")
    cuts = {key: cut(*pair, field) for key, pair in pairs.items()}
    each = "; ".join(
        f"{published.NAMES[model]} {', '.join(percent(cuts[model, method]) for method, _ in published.PAIRS)}"
        for model in published.NAMES
    )
    got = mean(cuts.values())
    if not isfinite(got):
        return Verdict(claim, "not measured", f"not every number is finite: {each}")
    numbers = f"{percent(got)} on average ({each}); the paper's own table gives {percent(published.cut(field))}"
    seeds = min(map(_seeds, pairs.values()))
    smaller = 0 < round(got, 2) < claimed  # to whole percents, as the paper rounds its own 21.9 %
    return Verdict(claim, "not seen" if smaller else judged(got, 0.0, seeds), numbers, seeds)


def exception_verdict(pairs: dict[tuple[str, str], Pair]) -> Verdict:
    """Confirmed if outliers rise in that pair and fall in all others, each time by more than chance."""
    but = published.EXCEPTION
    claim = f"softmax1 lowers outliers in every pair; the only exception is {_name(*but)}"
    wanted = len(published.NAMES) * len(published.PAIRS)
    if len(pairs) < wanted:
        return Verdict(claim, "not measured", f"{len(pairs)} of {wanted} pairs are measured")
    words = {key: outlier_verdict(*key, pair).verdict for key, pair in pairs.items()}
    others = {word for key, word in words.items() if key != but}
    word: VerdictWord = "not seen"
    if words[but] == "contradicted" and others == {"confirmed"}:
        word = "confirmed"
    elif words[but] == "confirmed" or "contradicted" in others:
        word = "contradicted"
    seeds = min(map(_seeds, pairs.values()))
    higher = [_name(*key) for key, pair in pairs.items() if min(cut(*pair, field) for field in FIELDS) < 0]
    there = " and ".join(percent(cut(*pairs[but], field)) for field in FIELDS)
    numbers = f"kurtosis and norm change there by {there}; on average one of them is higher with softmax1 in "
    return Verdict(claim, "not seen" if seeds == 1 else word, numbers + (", ".join(higher) or "no pair"), seeds)


def outlier_verdict(model: str, method: str, pair: Pair | None) -> Verdict:
    """Confirmed if both numbers fall by more than two standard errors over seeds, contradicted if one rises so."""
    claim = f"{_name(model, method)}: softmax1 lowers kurtosis and max inf norm"
    if pair is None:
        return Verdict(claim, "not measured", "")
    sides = {field: [[float(v[field]) for v in side] for side in pair] for field in FIELDS}
    numbers = ", ".join(
        f"{name} {mean_std(sides[field][1], 3)} against {mean_std(sides[field][0], 3)}"
        for field, name in (("kurtosis", "kurtosis"), ("inf_norm", "norm"))
    )
    if not all(isfinite(x) for both in sides.values() for side in both for x in side):
        return Verdict(claim, "not measured", f"not every number is finite: {numbers}")
    gains = [surplus(*both) for both in sides.values()]
    seeds = _seeds(pair)
    return Verdict(claim, judged(min(gains), 0.0, seeds), numbers, seeds)


def loss_verdict(model: str, method: str, pair: Pair) -> Verdict:
    """A difference within two standard errors over seeds does not count."""
    metric = CHIEF[model][1]
    claim = f"{_name(model, method)}: W8A8 raises {metric} less with softmax1"
    if CHIEF[model][2] == "high":
        claim = f"{_name(model, method)}: W8A8 costs less {metric} with softmax1"
    alone = all(len(side) == 1 for side in pair)
    # calibration draws of one model do not show how seeds differ, so they are not compared with several seeds
    old, new = ((losses if alone else seed_losses)(model, side) for side in pair)
    numbers = f"{mean_std(new, 3)} against {mean_std(old, 3)}"
    if alone:
        numbers += ", over calibration draws of one trained model each"
    if not all(map(isfinite, (*old, *new))):
        return Verdict(claim, "not measured", f"not every number is finite: {numbers}")
    seeds = _seeds(pair)
    return Verdict(claim, judged(surplus(old, new), 0.0, seeds), numbers, seeds)


def quality_verdict(model: str, method: str, pair: Pair) -> Verdict:
    """Contradicted if the metric is worse by more than ``AS_GOOD`` and by more than two standard errors."""
    metric = CHIEF[model][1]
    claim = f"{_name(model, method)}: {metric} in floating point is as good with softmax1, within {AS_GOOD:.0%}"
    old, new = ([full(model, v) for v in side] for side in pair)
    higher = change(model, *pair)
    worse = -higher if CHIEF[model][2] == "high" else higher
    numbers = f"{mean_std(new)} against {mean_std(old)}"
    if not isfinite(worse):
        return Verdict(claim, "not measured", f"not every number is finite: {numbers}")
    seeds = _seeds(pair)
    word: VerdictWord = "confirmed" if worse <= AS_GOOD else "contradicted" if surplus(old, new) else "not seen"
    return Verdict(claim, "not seen" if seeds == 1 else word, numbers, seeds)
