"""The result of Table 1: its tables, a figure, and a verdict on each claim."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, sqrt
from pathlib import Path
from statistics import mean

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper.experiment import Figure, Table, Values, Verdict
from outeffhop.lab.paper.ranking import judged, mean_std, shown, surplus
from outeffhop.lab.paper.trained_models import CHIEF
from outeffhop.lab.paper.training_runs import steps_said
from outeffhop.models import presets

__all__ = [
    "FIGURES",
    "Found",
    "conditions",
    "cut_verdict",
    "draw",
    "loss_verdict",
    "models_of",
    "seeds_said",
    "tables",
    "verdicts",
]

Found = dict[tuple[str, str], list[Values]]  # (model, method) → a value of each seed

FIGURES = [
    Figure(
        "methods",
        "Outliers and the loss of W8A8, by model and method",
        "Bars are our numbers, diamonds the paper's at its scale. Dots are single seeds, where there are several. "
        "Kurtosis and inf norm are on logarithmic scales.",
    )
]


def models_of(runs: Found) -> list[str]:
    """The models that are measured, in the paper's order."""
    return [model for model in published.NAMES if any(m == model for m, _ in runs)]


def tables(runs: Found, options: Mapping[str, list[Values]]) -> list[Table]:
    """``options``: what ``beyond`` has measured, by method."""
    found = [_summary(runs), *(_table(model, runs) for model in models_of(runs))]
    return [*found, _options(options)] if options else found


def conditions(runs: Found) -> Values:
    said = {"seeds": seeds_said(runs)}
    for model in models_of(runs):
        ours = [value for (m, _), values in runs.items() if m == model for value in values]
        numbers = dict.fromkeys("{data}: batches of {batch}, lr {lr:g}, {precision}".format(**run) for run in ours)
        steps = f"steps: {steps_said([run['steps'] for run in ours])}"
        said[published.NAMES[model]] = ", ".join(["; ".join(numbers), steps, *_samples_said(ours)])
    said["W8A8"] = "weights and activations per tensor, static; three calibration draws for every trained model"
    return said


def _samples_said(runs: list[Values]) -> list[str]:
    """The number of training samples; results that were kept before it was recorded do not have it."""
    counts = sorted({run["train_samples"] for run in runs if "train_samples" in run})
    where = "" if all("train_samples" in run for run in runs) else " where counted"
    return [f"of {' and '.join(f'{count:,}' for count in counts)} training samples{where}"] if counts else []


def seeds_said(runs: Found) -> str:
    """The number of seeds that all have, and which have more."""
    counts = [len(values) for values in runs.values()]
    if not counts:
        return "none"
    usual = min(counts)
    more = [f"{published.NAMES[m]} {method} {len(v)}" for (m, method), v in runs.items() if len(v) > usual]
    return f"{usual}; {', '.join(more)}" if more else f"{usual}"


def _unit(model: str) -> int:
    """Accuracies are given in percent."""
    return 100 if model == "vit" else 1


def _full(model: str, values: Values) -> float:
    """The chief metric in floating point."""
    return float(values["metrics"][CHIEF[model][0]]) * _unit(model)


def _w8a8(model: str, values: Values) -> float:
    return mean(map(float, values["w8a8"][CHIEF[model][0]])) * _unit(model)


def _loss(model: str, full: float, w8a8: float) -> float:
    """How much worse the metric is in W8A8."""
    return full - w8a8 if CHIEF[model][2] == "high" else w8a8 - full


def _seed_losses(model: str, values: list[Values]) -> list[float]:
    return [_loss(model, _full(model, v), _w8a8(model, v)) for v in values]


def _losses(model: str, values: list[Values]) -> list[float]:
    """Over seeds; over calibration draws if there is only one seed."""
    if len(values) != 1:
        return _seed_losses(model, values)
    draws = values[0]["w8a8"][CHIEF[model][0]]
    return [_loss(model, _full(model, values[0]), float(draw) * _unit(model)) for draw in draws]


def _table(model: str, runs: Found) -> Table:
    metric, better = CHIEF[model][1:]
    names = ("avg kurtosis", "max inf norm", f"FP {metric}", f"W8A8 {metric}")
    rows = []
    for method in published.METHODS:
        values, printed = runs.get((model, method), []), published.TABLE1[model, method]
        seen = [
            [float(v["kurtosis"]) for v in values],
            [float(v["inf_norm"]) for v in values],
            [_full(model, v) for v in values],
            [_w8a8(model, v) for v in values],
        ]
        ours = [mean_std(numbers) if numbers else None for numbers in seen]
        ours.append(f"{values[0]['parameters'] / 1e6:.3f}M" if values else None)
        size = presets.MODELS[model].paper_parameters[method.startswith("gated")]
        rows.append([method, *ours, *printed, f"{size:g}M"])
    papers = [f"paper: {name}" for name in names]
    return Table(
        published.NAMES[model],
        ["method", *names, "parameters", *papers, "paper: parameters"],
        rows,
        {
            name: side
            for pair in (names, papers)
            for name, side in zip(pair, ("low", "low", better, better), strict=True)
        },
    )


def _options(further: Mapping[str, list[Values]]) -> Table:
    """What ``beyond`` has measured, in the form of Table 1."""
    columns = ["avg kurtosis", "max inf norm", "FP perplexity", "W8A8 perplexity"]
    rows = []
    for method, values in further.items():
        seen = [
            [float(v["kurtosis"]) for v in values],
            [float(v["inf_norm"]) for v in values],
            [_full("opt", v) for v in values],
            [mean(map(float, v["rounded"]["W8A8"])) for v in values],
        ]
        rows.append([method, *map(mean_std, seen), f"{values[0]['parameters'] / 1e6:.3f}M"])
    return Table(
        "OPT with options beyond the paper",
        ["method", *columns, "parameters"],
        rows,
        dict.fromkeys(columns, "low"),
        note="Trained and measured like OPT above; the section Beyond the paper has more about them.",
    )


def draw(runs: Found, folder: Path) -> None:
    """A row of panels for each model: kurtosis, inf norm, loss of W8A8; a bar for each method."""
    models = models_of(runs)
    figure, _ = drawing.new(10, 2.1 * len(models), columns=3, rows=len(models))
    titles = ("avg kurtosis", "max inf norm", "W8A8 loss: {}")
    for i, axis in enumerate(figure.axes):
        model, column = models[i // 3], i % 3
        for at, method in enumerate(published.METHODS):
            values, printed = runs.get((model, method), []), published.TABLE1[model, method]
            seen = [[v["kurtosis"] for v in values], [v["inf_norm"] for v in values], _losses(model, values)][column]
            theirs = (printed.kurtosis, printed.inf_norm, _loss(model, printed.full, printed.w8a8))[column]
            if seen and all(map(isfinite, seen)):
                axis.barh(at, mean(seen), color=drawing.colour(method), height=0.62)
            elif seen:
                axis.text(0.02, at, "not finite", transform=axis.get_yaxis_transform(), va="center", fontsize=7)
            if len(values) > 1:
                axis.plot(seen, [at] * len(seen), "o", color="#BBBBBB", markeredgecolor="#444444", markersize=4)
            axis.plot(theirs, at, "D", color="white", markeredgecolor="#444444", markersize=5.5)
        axis.set_yticks(
            range(len(published.METHODS)), published.METHODS if column == 0 else [""] * len(published.METHODS)
        )
        axis.set_ylim(len(published.METHODS) - 0.4, -0.6)
        axis.tick_params(labelsize=8)
        axis.set_title(f"{published.NAMES[model]}, {titles[column].format(CHIEF[model][1])}", fontsize=9)
        if column < 2:
            axis.set_xlim(
                1, 1.2 * axis.get_xlim()[1]
            )  # bars on a logarithmic scale need a start: the smallest possible kurtosis
            drawing.logarithmic(axis, "x")
        else:
            axis.axvline(0, color="#888888", linewidth=0.8)
    drawing.save(figure, folder, "methods")


def _summary(runs: Found) -> Table:
    columns = ["model", "kurtosis", "inf norm", "W8A8 loss, vanilla", "W8A8 loss, OutEffHop"]
    rows = []
    for model in models_of(runs):
        old, new = runs.get((model, "vanilla"), []), runs.get((model, "outeffhop"), [])
        before, after = published.TABLE1[model, "vanilla"], published.TABLE1[model, "outeffhop"]
        ours = [_percent(_cut(old, new, field)) if old and new else None for field in ("kurtosis", "inf_norm")]
        losses = [mean_std(_losses(model, values), 3) if values else None for values in (old, new)]
        printed = [_percent(1 - getattr(after, f) / getattr(before, f)) for f in ("kurtosis", "inf_norm")]
        rows.append(
            [
                published.NAMES[model],
                *ours,
                *losses,
                *printed,
                *(shown(_loss(model, p.full, p.w8a8), 3) for p in (before, after)),
            ]
        )
    return Table(
        "OutEffHop against vanilla",
        [*columns, *(f"paper: {c}" for c in columns[1:])],
        rows,
        note="Kurtosis and inf norm: change from vanilla to OutEffHop. W8A8 loss: by how much the model's metric is "
        "worse in W8A8 than in floating point; ± over seeds, or over calibration draws if only one seed is measured.",
    )


def _cut(old: list[Values], new: list[Values], field: str) -> float:
    return 1 - mean(float(v[field]) for v in new) / mean(float(v[field]) for v in old)


def _percent(cut: float) -> str:
    return f"{-100 * cut:+.1f} %".replace("-", "−")


def verdicts(runs: Found) -> list[Verdict]:
    """On the paper's headline claims, and on W8A8 for each model."""
    both = [m for m in published.NAMES if (m, "vanilla") in runs and (m, "outeffhop") in runs]
    cuts = {
        field: [_cut(runs[m, "vanilla"], runs[m, "outeffhop"], field) for m in both]
        for field in ("kurtosis", "inf_norm")
    }
    whole = len(both) == len(published.NAMES)
    found = [
        cut_verdict(
            "average kurtosis", cuts["kurtosis"], published.CLAIMED_KURTOSIS_CUT, published.cut("kurtosis"), whole
        ),
        cut_verdict(
            "maximum infinity norm", cuts["inf_norm"], published.CLAIMED_INF_NORM_CUT, published.cut("inf_norm"), whole
        ),
    ]
    for model in models_of(runs):
        pair = [runs.get((model, m), []) for m in ("vanilla", "outeffhop")]
        alone = all(len(values) == 1 for values in pair)
        # calibration draws of one model do not show how seeds differ, so they are not compared with several seeds
        old, new = ((_losses if alone else _seed_losses)(model, values) for values in pair)
        verdict = loss_verdict(
            published.NAMES[model], CHIEF[model][1], old, new, _chance(model, *pair) if alone else 0.0
        )
        if alone:
            verdict = replace(verdict, numbers=f"{verdict.numbers}, over calibration draws of one trained model each")
        found.append(verdict)
    return found


def _chance(model: str, old: list[Values], new: list[Values]) -> float:
    """The standard error of an accuracy difference that comes from the choice of images; draws do not show it."""
    if CHIEF[model][0] != "accuracy":
        return 0.0
    return 100 * sqrt(sum(p * (1 - p) / v["samples"] for v in (*old, *new) for p in [v["metrics"]["accuracy"]]))


def cut_verdict(what: str, cuts: list[float], claimed: float, printed: float, whole: bool = True) -> Verdict:
    """Confirmed by a reduction as large as claimed, not seen if it is smaller, contradicted by an increase."""
    claim = f"OutEffHop reduces the {what} by {100 * claimed:.0f} % on average over four models"
    if not cuts or not whole:
        return Verdict(claim, "not measured", f"{len(cuts)} of {len(published.NAMES)} models are measured")
    got = mean(cuts)
    each = ", ".join(map(_percent, cuts))
    if not isfinite(got):
        return Verdict(claim, "not measured", f"not every number is finite: {each}")
    numbers = f"{_percent(got)} on average ({each}); the paper's own table gives {_percent(printed)}"
    return Verdict(claim, "confirmed" if got >= claimed else "not seen" if got > 0 else "contradicted", numbers)


def loss_verdict(name: str, metric: str, old: list[float], new: list[float], chance: float = 0.0) -> Verdict:
    """A difference does not count if it is within two standard errors over seeds or draws, or within ``chance``."""
    claim = f"{name}: OutEffHop loses less {metric} in W8A8 than vanilla"
    if metric != "top-1 accuracy":
        claim = f"{name}: {metric} rises less in W8A8 with OutEffHop than with vanilla"
    if not old or not new:
        return Verdict(claim, "not measured", "")
    numbers = f"{mean_std(new, 3)} against {mean_std(old, 3)}"
    gain = surplus(old, new)
    return Verdict(claim, judged(gain, chance), f"{numbers}; up to {chance:.2g} may be chance" if chance else numbers)
