"""Table 1: outliers and W8A8 of four models with six methods."""

from __future__ import annotations

from pathlib import Path

from outeffhop.lab.paper import beyond, published, table1_result, table1_verdicts
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings, Values, chosen, group_by
from outeffhop.lab.paper.running import found_before
from outeffhop.lab.paper.table1_numbers import Found
from outeffhop.lab.paper.trained_models import measured, quantized
from outeffhop.lab.paper.training_runs import data_of, finished, run_config, steps_of
from outeffhop.lab.paper.training_runs import needs as needed_by
from outeffhop.lab.training import RunConfig

__all__ = ["EXPERIMENT", "FLOAT8", "by_method", "cells", "config_of", "needs", "split_of"]

# The paper's STanHop-Net row is its Table 2's ETTh1-24, of the test split. The images that a folder brings for
# validation are also its test split if it brings no other (ImageNet).
_SPLIT = {"vit": "test", "stanhop": "test"}
# models that are also measured in 8-bit floating point, as the authors' scripts quantize them
FLOAT8 = ("vit",)
# BERT's components, which Figure 4 shows: the tensors of the paper's numbers, then the others of a layer
_WATCHED = {
    "bert": "*[0-9].output.dense, *[0-9].output.LayerNorm, *[0-9].output.LayerNorm:input, "
    "*.attention.output.dense, *.attention.output.LayerNorm, *.intermediate.dense"
}


def cells(settings: Settings) -> list[Cell]:
    return [
        Cell(
            f"{model}-{method}-{seed}",
            {"model": model, "method": method, "seed": seed, "steps": steps_of(model, settings)}
            | {"data": data_of(settings, model)},
        )
        for seed in range(settings.seeds)  # the first seed of everything first, for a complete table early
        for model in published.NAMES
        for method in published.METHODS
    ]


def needs(settings: Settings) -> list[str]:
    return needed_by(settings, {cell.values["model"] for cell in chosen(cells(settings), settings)})


def config_of(cell: Cell, settings: Settings) -> RunConfig:
    """The run of a cell, which Figures 2, 3 and 4 share."""
    model = cell.values["model"]
    watched = {"outlier_tensors": _WATCHED[model]} if model in _WATCHED else {}
    return run_config(settings, model, cell.values["method"], cell.values["seed"], train=watched)


def split_of(model: str) -> str:
    """The split that a model is measured on."""
    return _SPLIT.get(model, "validation")


def measure(cell: Cell, settings: Settings) -> Values:
    config = config_of(cell, settings)
    finished(config, settings)
    split = split_of(cell.values["model"])
    found = {**measured(config, settings, split), "split": split, "w8a8": quantized(config, settings, split=split)}
    if cell.values["model"] in FLOAT8:
        found["fp8"] = quantized(config, settings, "W8A8 fp8", split=split)
    return found


def by_method(found: dict[str, Values], settings: Settings) -> Found:
    return group_by(cells(settings), found, "model", "method")


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    runs = by_method(found, settings)
    further = beyond.by_method(found_before(beyond.EXPERIMENT, settings), settings)
    options = {method: values for method, values in further.items() if method not in published.METHODS}
    table1_result.draw(runs, folder)
    return EXPERIMENT.result(
        table1_result.tables(runs, options),
        table1_result.FIGURES,
        table1_verdicts.verdicts(runs),
        table1_result.conditions(runs),
    )


EXPERIMENT = Experiment(
    "table1",
    "Table 1",
    "Outliers, the metric in floating point and in W8A8, of BERT, OPT, ViT and STanHop-Net with six methods.",
    cells,
    measure,
    conclude,
    needs,
    partial=True,
)
