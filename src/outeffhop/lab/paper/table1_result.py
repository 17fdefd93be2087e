"""The result of Table 1: its tables and a figure. table1_verdicts.py has the verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from statistics import mean
from typing import Any

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper.experiment import Figure, Table, Values
from outeffhop.lab.paper.ranking import mean_std, shown
from outeffhop.lab.paper.table1_numbers import (
    FIELDS,
    Found,
    change,
    cut,
    full,
    loss,
    losses,
    models_of,
    percent,
    split_of,
    w8a8,
)
from outeffhop.lab.paper.trained_models import CHIEF
from outeffhop.lab.paper.training_runs import steps_said
from outeffhop.models import presets

__all__ = ["FIGURES", "conditions", "draw", "seeds_said", "tables"]

FIGURES = [
    Figure(
        "methods",
        "Outliers and the loss of W8A8, by model and method",
        "Bars: ours; dots: single seeds; diamonds: the paper's, at its scale. Kurtosis and inf norm on logarithmic "
        "scales.",
    )
]


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
        split = f"measured on the {' and '.join(sorted({split_of(model, run) for run in ours}))} split"
        said[published.NAMES[model]] = ", ".join(["; ".join(numbers), steps, *_samples_said(ours), split])
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


def _table(model: str, runs: Found) -> Table:
    metric, better = CHIEF[model][1:]
    names = ("avg kurtosis", "max inf norm", f"FP {metric}", f"W8A8 {metric}")
    measured = [value for (m, _), values in runs.items() if m == model for value in values]
    float8 = [f"FP8 {metric}"] if any("fp8" in value for value in measured) else []
    rows = []
    for method in published.METHODS:
        values, printed = runs.get((model, method), []), published.TABLE1[model, method]
        seen = [
            [float(v["kurtosis"]) for v in values],
            [float(v["inf_norm"]) for v in values],
            [full(model, v) for v in values],
            [w8a8(model, v) for v in values],
        ]
        if float8:
            seen.append([w8a8(model, v, "fp8") for v in values if "fp8" in v])
        ours = [mean_std(numbers) if numbers else None for numbers in seen]
        ours.append(f"{values[0]['parameters'] / 1e6:.3f}M" if values else None)
        size = presets.MODELS[model].paper_parameters[method.startswith("gated")]
        rows.append([method, *ours, *printed, f"{size:g}M"])
    papers = [f"paper: {name}" for name in names]
    splits = {split_of(model, value) for value in measured}
    other_split = model == "stanhop" and splits != {"test"}
    return Table(
        published.NAMES[model],
        ["method", *names, *float8, "parameters", *papers, "paper: parameters"],
        rows,
        {
            name: side
            for pair in ((*names, *float8), papers)
            for name, side in zip(pair, ("low", "low", better, better, better), strict=False)
        },
        note="Ours are of the validation split. The paper's are of the test split, and so are ours in Table 2."
        if other_split
        else "",
    )


def _options(further: Mapping[str, list[Values]]) -> Table:
    """What ``beyond`` has measured, in the form of Table 1."""
    columns = ["avg kurtosis", "max inf norm", "FP perplexity", "W8A8 perplexity"]
    rows = []
    for method, values in further.items():
        seen = [
            [float(v["kurtosis"]) for v in values],
            [float(v["inf_norm"]) for v in values],
            [full("opt", v) for v in values],
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
    from matplotlib.patches import Patch

    methods = [m for m in published.METHODS if any((model, m) in runs for model in models)]
    figure, _ = drawing.new(9, 0.7 + (0.9 + 0.22 * len(methods)) * len(models), columns=3, rows=len(models))
    titles = ("avg kurtosis", "max inf norm", "W8A8 loss: {}")
    seed = {"ls": "", "marker": "o", "color": "#BBBBBB", "mec": "#444444", "ms": 4}
    papers = {"ls": "", "marker": "D", "color": "white", "mec": "#444444", "ms": 5.5}
    for i, axis in enumerate(figure.axes):
        model, column = models[i // 3], i % 3
        for at, method in enumerate(methods):
            values, printed = runs.get((model, method), []), published.TABLE1[model, method]
            seen = [[v["kurtosis"] for v in values], [v["inf_norm"] for v in values], losses(model, values)][column]
            theirs = (printed.kurtosis, printed.inf_norm, loss(model, printed.full, printed.w8a8))[column]
            if seen and all(map(isfinite, seen)):
                axis.barh(at, mean(seen), color=drawing.colour(method), height=0.62)
            elif seen:
                axis.text(0.02, at, "not finite", transform=axis.get_yaxis_transform(), va="center", fontsize=9)
            if len(values) > 1:
                axis.plot(seen, [at] * len(seen), **seed)
            axis.plot(theirs, at, **papers)
        axis.set_yticks(range(len(methods)), methods if column == 0 else [""] * len(methods))
        axis.set_ylim(len(methods) - 0.4, -0.6)
        axis.tick_params(labelsize=9)
        axis.set_title(f"{published.NAMES[model]}, {titles[column].format(CHIEF[model][1])}", fontsize=10)
        if column < 2:
            axis.set_xlim(
                1, 1.2 * axis.get_xlim()[1]
            )  # bars on a logarithmic scale need a start: the smallest possible kurtosis
            drawing.logarithmic(axis, "x")
        else:
            axis.axvline(0, color="#888888", linewidth=0.8)
    marks: dict[str, Any] = {"our mean": Patch(color="#888888"), "the paper, at its scale": papers}
    if any(len(values) > 1 for values in runs.values()):
        marks["one of our seeds"] = seed
    drawing.legend(figure, marks)
    drawing.save(figure, folder, "methods")


def _summary(runs: Found) -> Table:
    names = ("kurtosis", "inf norm", "FP metric", "W8A8 loss without", "W8A8 loss with")
    rows = []
    for model in models_of(runs):
        for method, other in published.PAIRS:
            old, new = runs.get((model, method), []), runs.get((model, other), [])
            before, after = published.TABLE1[model, method], published.TABLE1[model, other]
            ours = [percent(cut(old, new, field)) if old and new else None for field in FIELDS]
            ours.append(percent(-change(model, old, new)) if old and new else None)
            ours += [mean_std(losses(model, side), 3) if side else None for side in (old, new)]
            printed = [percent(1 - getattr(after, f) / getattr(before, f)) for f in (*FIELDS, "full")]
            printed += [shown(loss(model, p.full, p.w8a8), 3) for p in (before, after)]
            rows.append([published.NAMES[model], method, *ours, *printed])
    return Table(
        "With softmax1 against without",
        ["model", "pair", *names, *(f"paper: {name}" for name in names)],
        rows,
        note="Kurtosis, inf norm and the metric in floating point: change from softmax to softmax1. W8A8 loss: by how "
        "much the model's metric is worse in W8A8 than in floating point; ± over seeds, or over calibration draws if "
        "only one seed is measured.",
    )
