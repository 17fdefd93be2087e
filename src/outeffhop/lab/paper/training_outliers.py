"""Figures 2, 3 and 4: how outliers grow in training, by method, by layer, and within one layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from outeffhop.lab.paper import drawing, published, table1
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values, Verdict
from outeffhop.lab.paper.ranking import judged, mean_std, surplus
from outeffhop.lab.paper.table1_result import models_of, seeds_said
from outeffhop.lab.paper.training_runs import finished
from outeffhop.lab.training import RunFolder
from outeffhop.outliers.outlier_report import place_of

__all__ = ["EXPERIMENT", "curve_of", "growth_verdict"]

PAIRS = (("vanilla", "outeffhop"), ("clipped", "clipped-outeffhop"), ("gated", "gated-outeffhop"))
Curves = dict[tuple[str, str], list[Values]]  # (model, method) → a curve of each seed


def measure(cell: Cell, settings: Settings) -> Values:
    """From the metrics of a run of Table 1."""
    return curve_of(finished(table1.config_of(cell, settings), settings))


def curve_of(folder: RunFolder) -> Values:
    """A run's outliers over its steps: the paper's two numbers, and the inf norm of each tensor."""
    lines = [line for line in folder.metrics() if "tensors" in line]
    return {
        "steps": [line["step"] for line in lines],
        "max_inf_norm": [float(line["max_inf_norm"]) for line in lines],
        "avg_kurtosis": [float(line["avg_kurtosis"]) for line in lines],
        "tensors": {name: [float(line["tensors"][name][0]) for line in lines] for name in lines[-1]["tensors"]},
    }


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    curves = table1.by_method(found, settings)
    models = models_of(curves)
    _draw_methods(curves, models, folder)
    figures = [
        Figure(
            "methods",
            "Maximum infinity norm over training (Figure 2)",
            "The largest norm of the tensors the paper looks at. Left to right: plain, clipped and gated, as far as "
            "measured, with softmax and with softmax1. One line per seed.",
        )
    ]
    for name, title, caption, draw in (
        ("layers", "By layer (Figure 3)", "The largest inf norm among the tensors of a layer.", _draw_layers),
        (
            "components",
            "Within one layer (Figure 4)",
            "The five largest tensors of the second-to-last layer.",
            _draw_components,
        ),
    ):
        draw(curves, models, folder, name)
        figures.append(Figure(name, title, f"{caption} Solid: vanilla; dashed: OutEffHop; of the first seed."))
    return EXPERIMENT.result(
        [_table(curves, models)],
        figures,
        [growth_verdict(published.NAMES[m], curves, m) for m in models],
        {
            "seeds": seeds_said(curves),
            "steps": ", ".join(f"{published.NAMES[m]} {_last_step(curves, m)}" for m in models),
        },
    )


def _last_step(curves: Curves, model: str) -> int:
    return max(int(c["steps"][-1]) for (m, _), seeds in curves.items() if m == model for c in seeds)


def _table(curves: Curves, models: list[str]) -> Table:
    rows = [
        [published.NAMES[m], method, *(mean_std([c["max_inf_norm"][at] for c in seeds]) for at in (0, -1))]
        for (m, method), seeds in curves.items()
        if m in models
    ]
    columns = ["model", "method", "first measured", "at the end"]
    return Table("Maximum infinity norm", columns, rows, {"at the end": "low"}, "model")


def growth_verdict(name: str, curves: Curves, model: str) -> Verdict:
    """Over the second half of training, when outliers have had time to grow.

    Differences within 5 %, or within two standard errors over seeds, do not count.
    """
    claim = f"{name}: OutEffHop keeps the maximum infinity norm below vanilla's during training"
    old, new = ([_late(curve) for curve in curves.get((model, method), [])] for method in PAIRS[0])
    if not old or not new:
        return Verdict(claim, "not measured", "")
    gain = surplus(old, new) / mean(old)
    numbers = f"{mean_std(new, 3)} against {mean_std(old, 3)}, averaged over the second half of training"
    return Verdict(claim, judged(gain, 0.05), numbers)


def _late(curve: Values) -> float:
    norms = curve["max_inf_norm"]
    return mean(map(float, norms[len(norms) // 2 :]))


def _draw_methods(curves: Curves, models: list[str], folder: Path) -> None:
    pairs = [pair for pair in PAIRS if any((m, method) in curves for m in models for method in pair)]
    figure, _ = drawing.new(10, 2.4 * len(models), columns=len(pairs), rows=len(models))
    for axis, (model, pair) in zip(figure.axes, [(m, p) for m in models for p in pairs], strict=True):
        for method in pair:
            for i, curve in enumerate(curves.get((model, method), [])):
                name, width = (None, 0.8) if i else (method, 1.5)
                axis.plot(
                    curve["steps"], curve["max_inf_norm"], color=drawing.colour(method), label=name, linewidth=width
                )
        axis.set_title(f"{published.NAMES[model]}, {pair[0]}", fontsize=9)
        _legend(axis)
    _label(figure, "max inf norm")
    drawing.save(figure, folder, "methods")


def _legend(axis: Any) -> None:
    if axis.lines:
        axis.legend(fontsize=7, frameon=False)
    else:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)


Grouped = Callable[[str], str | None]


def _draw_layers(curves: Curves, models: list[str], folder: Path, name: str) -> None:
    def group(model: str) -> Grouped:
        layers = sorted({layer for t in _tensors(curves, model) if (layer := place_of(t)[1]) is not None})
        chosen = {layers[i * (len(layers) - 1) // 3] for i in range(4)} if layers else set()
        return lambda tensor: f"layer {place_of(tensor)[1]}" if place_of(tensor)[1] in chosen else None

    _draw_groups(curves, models, folder, name, group)


def _draw_components(curves: Curves, models: list[str], folder: Path, name: str) -> None:
    def group(model: str) -> Grouped:
        layers = sorted({layer for t in _tensors(curves, model) if (layer := place_of(t)[1]) is not None})
        chosen = layers[max(len(layers) - 2, 0)] if layers else None
        largest = sorted(
            (t for t in _tensors(curves, model) if place_of(t)[1] == chosen),
            key=lambda t: -curves[model, _first(curves, model)][0]["tensors"][t][-1],
        )[:5]  # more curves could not be told apart
        return lambda tensor: (place_of(tensor)[2] or "the layer's output") if tensor in largest else None

    _draw_groups(curves, models, folder, name, group)


def _draw_groups(
    curves: Curves,
    models: list[str],
    folder: Path,
    name: str,
    group: Callable[[str], Grouped],
) -> None:
    from matplotlib import colormaps

    rows = (len(models) + 1) // 2
    figure, _ = drawing.new(10, 3.2 * rows, columns=2, rows=rows)
    for axis, model in zip(figure.axes, models, strict=False):
        key = group(model)
        groups = list(dict.fromkeys(k for t in _tensors(curves, model) if (k := key(t)) is not None))
        drawn = [(m, style) for m, style in (("vanilla", "-"), ("outeffhop", "--")) if (model, m) in curves]
        for method, style in drawn:
            values = curves[model, method][0]
            for i, part in enumerate(groups):
                tensors = [v for t, v in values["tensors"].items() if key(t) == part]
                largest = [max(at) for at in zip(*tensors, strict=True)]
                shade = colormaps["viridis"](0.9 * i / max(len(groups) - 1, 1))
                axis.plot(values["steps"], largest, style, color=shade, label=part if method == drawn[0][0] else None)
        axis.set_title(published.NAMES[model], fontsize=9)
        _legend(axis)
    for axis in figure.axes[len(models) :]:
        axis.set_visible(False)
    _label(figure, "inf norm")
    drawing.save(figure, folder, name)


def _first(curves: Curves, model: str) -> str:
    return next(method for m, method in curves if m == model)


def _tensors(curves: Curves, model: str) -> list[str]:
    return list(curves[model, _first(curves, model)][0]["tensors"])


def _label(figure: Any, what: str) -> None:
    figure.supxlabel("training steps", fontsize=9)
    figure.supylabel(what, fontsize=9)


EXPERIMENT = Experiment(
    "training-outliers",
    "Figures 2, 3 and 4",
    "The maximum infinity norm over training: of each method, layer by layer, and tensor by tensor.",
    table1.cells,
    measure,
    conclude,
    table1.needs,
    partial=True,
)
