"""Figures 2, 3 and 4: how outliers grow in training, by method, by layer, and within one layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from outeffhop.lab.paper import drawing, published, table1
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values
from outeffhop.lab.paper.ranking import mean_std
from outeffhop.lab.paper.table1_numbers import models_of
from outeffhop.lab.paper.table1_result import seeds_said
from outeffhop.lab.paper.training_components import (
    COMPONENTS,
    FFN,
    component,
    counted,
    depth_of,
    ffn_layers,
    layer_curve,
    shown_layer,
)
from outeffhop.lab.paper.training_runs import finished
from outeffhop.lab.paper.training_verdicts import Curves, verdicts
from outeffhop.lab.training import RunFolder

__all__ = ["EXPERIMENT", "curve_of"]


def measure(cell: Cell, settings: Settings) -> Values:
    """From the metrics of a run of Table 1."""
    return curve_of(finished(table1.config_of(cell, settings), settings), cell.values["model"])


def curve_of(folder: RunFolder, model: str) -> Values:
    """A run's outliers over its steps: the paper's two numbers, and the inf norm of each tensor."""
    lines = [line for line in folder.metrics() if "tensors" in line]
    names = list(lines[-1]["tensors"])
    norms = [name for name in names if counted(model, name)]
    tails = [name for name in names if counted(model, name, kurtosis=True)]
    return {
        "steps": [line["step"] for line in lines],
        "max_inf_norm": [max(float(line["tensors"][name][0]) for name in norms) for line in lines],
        "avg_kurtosis": [_average([line["tensors"][name][1] for name in tails]) for line in lines],
        "tensors": {name: [float(line["tensors"][name][0]) for line in lines] for name in names},
    }


def _average(kurtosis: list[float | None]) -> float:
    known = [float(k) for k in kurtosis if k is not None]  # a constant tensor has none
    return mean(known) if known else float("nan")


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    curves = table1.by_method(found, settings)
    models = models_of(curves)
    layers = {model: shown_layer(model, _tensors(curves, model)) for model in models}
    _draw_methods(curves, layers, folder)
    _draw_parts(curves, models, folder, "layers", _ffn_curves)
    _draw_parts(curves, models, folder, "components", _component_curves)
    said = "Solid: vanilla; dashed: OutEffHop; first seed."
    return EXPERIMENT.result(
        [_table(curves, layers)],
        [
            Figure(
                "methods",
                "Maximum infinity norm over training (Figure 2)",
                "Figure 2: the largest norm of one layer's tensors, one line per seed.",
            ),
            Figure(
                "layers",
                "By layer (Figure 3)",
                "Figure 3: the inf norm of the FFN's output, layer by layer. " + said,
            ),
            Figure(
                "components",
                "Within one layer (Figure 4)",
                "Figure 4: the inf norms within one layer. " + said,
            ),
        ],
        verdicts(curves, models),
        {
            "seeds": seeds_said(curves),
            "steps": ", ".join(f"{published.NAMES[m]} {_last_step(curves, m)}" for m in models),
            "layers": _layers_said(curves, layers),
        },
    )


def _layers_said(curves: Curves, layers: dict[str, int]) -> str:
    """Which layers stand for those of the paper."""
    each = [
        f"{published.NAMES[m]} {layer} and {', '.join(map(str, ffn_layers(_tensors(curves, m))))} "
        f"of {depth_of(_tensors(curves, m))}"
        for m, layer in layers.items()
    ]
    return (
        f"counted from 0: {'; '.join(each)}; the paper has 12, and shows layer 10 (9 of STanHop-Net) and the FFNs "
        "of layers 3, 6, 9 and 10"
    )


def _last_step(curves: Curves, model: str) -> int:
    return max(int(c["steps"][-1]) for (m, _), seeds in curves.items() if m == model for c in seeds)


def _table(curves: Curves, layers: dict[str, int]) -> Table:
    rows = []
    for (model, method), seeds in curves.items():
        of_layer = [layer_curve(model, curve, layers[model])[-1] for curve in seeds]
        first, last = ([curve["max_inf_norm"][at] for curve in seeds] for at in (0, -1))
        rows.append([published.NAMES[model], method, *map(mean_std, (of_layer, first, last))])
    better = {"that layer, at the end": "low", "all layers, at the end": "low"}
    columns = ["model", "method", "that layer, at the end", "all layers, first measured", "all layers, at the end"]
    note = "That layer: the one of Figure 2."
    return Table("Maximum infinity norm", columns, rows, better, "model", note)


def _draw_methods(curves: Curves, layers: dict[str, int], folder: Path) -> None:
    pairs = [pair for pair in published.PAIRS if any((m, method) in curves for m in layers for method in pair)]
    figure, _ = drawing.new(9, 0.8 + 2.2 * len(layers), columns=len(pairs), rows=len(layers))
    marks: dict[str, Any] = {}
    for axis, (model, pair) in zip(figure.axes, [(m, p) for m in layers for p in pairs], strict=True):
        for method in pair:
            for i, curve in enumerate(curves.get((model, method), [])):
                norms, width = layer_curve(model, curve, layers[model]), 0.8 if i else 1.8
                marks[method] = {"color": drawing.colour(method), "linewidth": 1.8}
                axis.plot(curve["steps"], norms, color=drawing.colour(method), linewidth=width)
        axis.set_title(f"{published.NAMES[model]}, layer {layers[model]}", fontsize=10)
        _or_nothing(axis)
    if any(len(seeds) > 1 for seeds in curves.values()):
        marks |= {"thick: first seed": {"color": "#888888", "linewidth": 1.8}}
        marks |= {"thin: other seeds": {"color": "#888888", "linewidth": 0.8}}
    drawing.legend(figure, marks)
    _label(figure, "max inf norm")
    drawing.save(figure, folder, "methods")


def _or_nothing(axis: Any) -> None:
    if not axis.lines:
        axis.set_axis_off()
        axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)


Parts = Callable[[str, Values], dict[str, list[float] | None]]  # of a model's curve: label → norms


def _ffn_curves(model: str, curve: Values) -> dict[str, list[float] | None]:
    return {f"layer {layer}": component(curve, layer, FFN[model]) for layer in ffn_layers(curve["tensors"])}


def _component_curves(model: str, curve: Values) -> dict[str, list[float] | None]:
    layer = shown_layer(model, curve["tensors"])
    return {label: component(curve, layer, name) for label, name in COMPONENTS[model].items()}


def _draw_parts(curves: Curves, models: list[str], folder: Path, name: str, parts: Parts) -> None:
    """A panel for each model, a colour for each part."""
    rows = (len(models) + 1) // 2
    figure, _ = drawing.new(9, 0.9 + 2.8 * rows, columns=2, rows=rows)
    labels = _in_order([list(parts(model, seeds[0])) for (model, _), seeds in curves.items() if model in models])
    shades = dict(zip(labels, drawing.shades(len(labels), ordered=name == "layers"), strict=True))
    marks: dict[str, Any] = {}
    for axis, model in zip(figure.axes, models, strict=False):
        drawn = [(m, style) for m, style in zip(published.PAIRS[0], ("-", "--"), strict=True) if (model, m) in curves]
        for method, style in drawn:
            curve = curves[model, method][0]
            for label, norms in parts(model, curve).items():
                if norms is not None:
                    marks[label] = {"color": shades[label], "linewidth": 1.8}
                    axis.plot(curve["steps"], norms, style, color=shades[label])
        axis.set_title(published.NAMES[model], fontsize=10)
        _or_nothing(axis)
    for axis in figure.axes[len(models) :]:
        axis.set_visible(False)
    marks = {label: marks[label] for label in labels if label in marks}
    for method, style, word in zip(published.PAIRS[0], ("-", "--"), ("solid", "dashed"), strict=True):
        marks[f"{word}: {method}"] = {"color": "#888888", "linestyle": style, "linewidth": 1.8}
    drawing.legend(figure, marks)
    _label(figure, "inf norm")
    drawing.save(figure, folder, name)


def _in_order(lists: list[list[str]]) -> list[str]:
    """All labels of the lists, the longest list's first; layers by their numbers."""
    labels = dict.fromkeys(label for labels in sorted(lists, key=len, reverse=True) for label in labels)
    if all(label.startswith("layer ") for label in labels):
        return sorted(labels, key=lambda label: int(label.split()[1]))
    return list(labels)


def _tensors(curves: Curves, model: str) -> list[str]:
    return list(next(seeds for (m, _), seeds in curves.items() if m == model)[0]["tensors"])


def _label(figure: Any, what: str) -> None:
    figure.supxlabel("training steps", fontsize=10)
    figure.supylabel(what, fontsize=10)


EXPERIMENT = Experiment(
    "training-outliers",
    "Figures 2, 3 and 4",
    "The maximum infinity norm over training: of one layer with each method, of the FFN outputs of four layers, and of "
    "the components of one layer.",
    table1.cells,
    measure,
    conclude,
    table1.needs,
    partial=True,
)
