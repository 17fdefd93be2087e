"""The result beyond the paper: which combination loses least when it is rounded, at equal perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any, NamedTuple

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper.experiment import Figure, Table, Values, Verdict
from outeffhop.lab.paper.ranking import judged, mean_std, places, surplus
from outeffhop.lab.paper.training_runs import seeds_measured

__all__ = [
    "BITS",
    "FIGURES",
    "ROUNDED",
    "Candidate",
    "at_equal_perplexity",
    "candidates",
    "column",
    "conditions",
    "draw",
    "fold_verdict",
    "lower_verdict",
    "tables",
    "verdicts",
]

BITS = ("W8A8", "W4A8")
ROUNDED = tuple((bits, fold) for bits in BITS for fold in (False, True))
EQUAL = 0.02  # perplexities this close to the best count as equal: seeds of one method differ by as much

Found = Mapping[str, Sequence[Values]]  # method → a value of each seed


FIGURES = [
    Figure(
        "losses",
        "Perplexity, and what rounding adds to it",
        f"Shaded: within {100 * EQUAL:g} % of the best perplexity, which counts as equal. Hollow: folded LayerNorms.",
    )
]


class Candidate(NamedTuple):
    """A trained method, rounded in one way.

    Attributes:
        perplexity: in floating point, for each seed.
        losses: by how much rounding raises it, for each seed.
    """

    method: str
    folded: bool
    perplexity: Sequence[float]
    losses: Sequence[float]

    @property
    def is_papers(self) -> bool:
        return self.method in published.METHODS and not self.folded

    def __str__(self) -> str:
        return f"{self.method}{', folded' if self.folded else ''}"


def column(bits: str, fold: bool, what: str = "") -> str:
    """The name of a way of rounding, such as "W8A8, folded"; with ``what``, "W8A8 loss, folded"."""
    return " ".join(filter(None, (bits, what))) + (", folded" if fold else "")


def _perplexity(value: Values) -> float:
    return float(value["metrics"]["perplexity"])


def candidates(runs: Found, bits: str) -> list[Candidate]:
    return [
        Candidate(
            method,
            fold,
            [_perplexity(v) for v in values],
            [mean(map(float, v["rounded"][column(bits, fold)])) - _perplexity(v) for v in values],
        )
        for method, values in runs.items()
        for fold in (False, True)
    ]


def at_equal_perplexity(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those within ``EQUAL`` of the best mean perplexity, the lowest loss first; infinite losses are left out."""
    best = min((mean(c.perplexity) for c in candidates), default=math.inf)
    near = [c for c in candidates if mean(c.perplexity) <= (1 + EQUAL) * best and all(map(math.isfinite, c.losses))]
    return sorted(near, key=lambda c: mean(c.losses))


def _table(runs: Found, candidates: Mapping[str, Sequence[Candidate]]) -> Table:
    fields = {"avg kurtosis": "kurtosis", "max inf norm": "inf_norm"}
    rows = [
        [method, mean_std([_perplexity(v) for v in values])]
        + [mean_std([float(v[field]) for v in values]) for field in fields.values()]
        + [mean_std(c.losses, 3) for bits in BITS for c in candidates[bits] if (c.method, c.folded) == (method, False)]
        + [f"{values[0]['parameters'] / 1e6:.3f}M"]
        for method, values in runs.items()
    ]
    better = dict.fromkeys(["perplexity", *fields, *(column(bits, False, "loss") for bits in BITS)], "low")
    note = "Loss: by how much rounding raises the perplexity."
    return Table("OPT", ["method", *better, "parameters"], rows, better, note=note)


def _folded(candidates: Mapping[str, Sequence[Candidate]]) -> Table:
    names = [column(*how, "loss") for how in ROUNDED]
    losses = {(c.method, bits, c.folded): c.losses for bits in BITS for c in candidates[bits]}
    rows = [
        [method, *(mean_std(losses[method, bits, fold], 3) for bits, fold in ROUNDED)]
        for method in dict.fromkeys(method for method, _, _ in losses)
    ]
    note = "Folded: the scale and shift of LayerNorms are moved into the next layers first."
    return Table("With folded LayerNorms", ["method", *names], rows, dict.fromkeys(names, "low"), note=note)


def _lowest(candidates: Mapping[str, Sequence[Candidate]]) -> Table:
    rows: list[list[Any]] = []
    for bits in BITS:
        near = at_equal_perplexity(candidates[bits])
        first = [(str(c), mean_std(c.losses, 3), mean_std(c.perplexity)) for c in near[:3]]
        rows += [[bits, place, *row] for place, row in zip(places([loss for _, loss, _ in first]), first, strict=True)]
    tried = len(next(iter(candidates.values()), ()))
    return Table(
        "Lowest loss at equal perplexity",
        ["bits", "rank", "combination", "loss", "perplexity"],
        rows,
        group="bits",
        note=f"The first three of {tried} combinations whose perplexity is within {100 * EQUAL:g} % of the best.",
    )


def _rounded(candidates: Mapping[str, Sequence[Candidate]]) -> Table:
    """The choice if only the rounded model matters."""
    rows: list[list[Any]] = []
    for bits in BITS:
        sums = [(c, [p + loss for p, loss in zip(c.perplexity, c.losses, strict=True)]) for c in candidates[bits]]
        finite = [(c, after) for c, after in sums if all(map(math.isfinite, after))]
        first = [(str(c), mean_std(after)) for c, after in sorted(finite, key=lambda pair: mean(pair[1]))[:3]]
        rows += [[bits, place, *row] for place, row in zip(places([sum_ for _, sum_ in first]), first, strict=True)]
    return Table("Lowest perplexity once rounded", ["bits", "rank", "combination", "perplexity"], rows, group="bits")


def draw(candidates: Mapping[str, Sequence[Candidate]], folder: Path) -> None:
    """A row for each method: its perplexity, and what each way of rounding adds."""
    methods = list(dict.fromkeys(c.method for c in candidates[BITS[0]]))
    names = [fill(method, 36) for method in methods]
    figure, _ = drawing.new(9, 1.6 + 0.4 * max(len(methods), 3), columns=3)
    whole, *rounded = figure.axes
    for axis in figure.axes:
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.set_yticks(range(len(methods)), names if axis is whole else [""] * len(methods), fontsize=9)
    whole.set_title("perplexity", fontsize=10)
    marks: dict[str, Any] = {}
    plain = [c for c in candidates[BITS[0]] if not c.folded]
    if plain:
        best = min(mean(c.perplexity) for c in plain)
        marks[f"within {100 * EQUAL:g} % of the lowest perplexity"] = whole.axvspan(
            best, (1 + EQUAL) * best, color="#0072B2", alpha=0.12, linewidth=0
        )
    for c in plain:
        whole.scatter(c.perplexity, [methods.index(c.method)] * len(c.perplexity), color=drawing.colour(c.method), s=36)
    for axis, bits in zip(rounded, BITS, strict=True):
        axis.set_title(f"{bits} loss", fontsize=10)
        for c in candidates[bits]:
            colour = drawing.colour(c.method)
            losses = [loss if loss > 0 else math.nan for loss in c.losses]  # only a positive loss has a logarithm
            row = methods.index(c.method) + (0.18 if c.folded else -0.18)
            label = "LayerNorms folded first" if c.folded else "as trained"
            marks[label] = {"ls": "", "marker": "o", "mec": "#444444", "mfc": "none" if c.folded else "#444444"}
            axis.scatter(
                losses, [row] * len(losses), s=30, edgecolors=colour, facecolors="none" if c.folded else colour
            )
        drawing.logarithmic(axis, "x")
    drawing.legend(figure, marks)
    drawing.save(figure, folder, "losses")


def tables(runs: Found, candidates: Mapping[str, Sequence[Candidate]]) -> list[Table]:
    return [_lowest(candidates), _rounded(candidates), _table(runs, candidates), _folded(candidates)]


def verdicts(candidates: Mapping[str, Sequence[Candidate]], missing: Sequence[str]) -> list[Verdict]:
    """``missing`` are those of the paper's methods that are not measured yet."""
    lower = [lower_verdict(bits, candidates[bits], missing) for bits in BITS]
    return [*lower, *(fold_verdict(bits, candidates[bits]) for bits in BITS)]


def lower_verdict(bits: str, candidates: Sequence[Candidate], missing: Sequence[str] = ()) -> Verdict:
    """The best new combination against the best of the paper's, both at equal perplexity.

    ``missing`` are those of the paper's methods that are not measured yet.
    """
    claim = f"{bits}: a combination beyond the paper's loses less than its methods do, at equal perplexity"
    if missing:
        return Verdict(claim, "not measured", f"the paper's methods {', '.join(missing)} are not measured yet")
    near = at_equal_perplexity(candidates)
    old, new = [c for c in near if c.is_papers], [c for c in near if not c.is_papers]
    if not old or not new:
        none = "of the paper's methods" if not old else "of the new combinations"
        return Verdict(claim, "not measured", f"none {none} is within {100 * EQUAL:g} % of the best perplexity")
    gain = surplus(old[0].losses, new[0].losses)
    numbers = (
        f"{new[0]} loses {mean_std(new[0].losses, 3)}, the lowest of {len(new)}; "
        f"{old[0]} loses {mean_std(old[0].losses, 3)}, the lowest of {len(old)}"
    )
    seeds = min(len(new[0].losses), len(old[0].losses))
    if seeds == 1:
        numbers += "; one trained model each"
    return Verdict(claim, judged(gain, 0.0, seeds), numbers, seeds)


def fold_verdict(bits: str, candidates: Sequence[Candidate]) -> Verdict:
    """Compares the perplexity of every rounded model with and without folding, in logarithms because it varies much."""
    claim = f"{bits}: folding LayerNorm's scale into the next layers lowers the loss"
    plain = {c.method: c for c in candidates if not c.folded}
    pairs = [
        (p + before, p + after)
        for c in candidates
        if c.folded and c.method in plain
        for p, before, after in zip(c.perplexity, plain[c.method].losses, c.losses, strict=True)
    ]
    cuts = [math.log(a) - math.log(b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    if not cuts:
        return Verdict(claim, "not measured", "no model is rounded both ways")
    gain = surplus(cuts, [0.0])
    change = 100 * (math.exp(-mean(cuts)) - 1)
    numbers = f"{bits} perplexity changes by {change:+.2g} % on average over {len(cuts)} models".replace("-", "−")
    lower = sum(cut > 0 for cut in cuts)
    return Verdict(claim, judged(gain, 0.0, len(cuts)), f"{numbers}; lower in {lower} of them", len(cuts))


def conditions(runs: Found) -> Values:
    said: Values = {"seeds": seeds_measured(runs.values())}
    text = "{data}: {steps} steps of {batch}, lr {lr:g}, {precision}"
    said["OPT"] = "; ".join(dict.fromkeys(text.format(**run) for values in runs.values() for run in values))
    said["W8A8, W4A8"] = "weights and activations per tensor, static; three calibration draws for every trained model"
    return said
