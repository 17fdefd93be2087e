"""Beyond the paper: newer options, alone and combined with its methods, and how much they reduce the cost of int8.

The paper names outliers made by LayerNorm as its limit. Here, learned sinks, gates that see all features, QK-norm, a
penalty on outliers in the loss, and folding LayerNorm's scale into the next layers are measured on OPT.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from outeffhop.lab.paper import beyond_result, published
from outeffhop.lab.paper.beyond_result import BITS, ROUNDED, column
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings, Values, group_by
from outeffhop.lab.paper.trained_models import measured, quantized
from outeffhop.lab.paper.training_runs import data_of, finished, needs, run_config, steps_of
from outeffhop.lab.training import RunConfig

__all__ = ["EXPERIMENT", "by_method", "config_of"]

METHODS = (
    "vanilla",
    "outeffhop",
    "outeffhop(sink=learned)",
    "gated-outeffhop",
    "gated-outeffhop(predictor=features)",
    "gated-outeffhop(gate=element, predictor=features)",
    "vanilla(qk_norm=rms)",
    "outeffhop(qk_norm=rms)",
    # combinations
    "gated(gate=element, predictor=features, qk_norm=rms)",
    "outeffhop(sink=learned, qk_norm=rms)",
    "gated-outeffhop(gate=element, predictor=features, qk_norm=rms)",
    "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)",
)
# trained with the penalty as well: alone, with the paper's method, and with the gates that lose least
PENALIZED = ("vanilla", "outeffhop", "gated-outeffhop(gate=element, predictor=features)")
PENALTY = 0.1


def cells(settings: Settings) -> list[Cell]:
    asked = {"steps": steps_of("opt", settings), "data": data_of(settings, "opt")}
    found = []
    for seed in range(settings.seeds):  # the first seed of everything first, for a complete table early
        found += [Cell(f"{_slug(method)}-{seed}", {"method": method, "seed": seed, **asked}) for method in METHODS]
        found += [
            Cell(f"{_slug(method)}-penalty-{seed}", {"method": method, "penalty": PENALTY, "seed": seed, **asked})
            for method in PENALIZED
        ]
    return found


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text).strip("-")


def config_of(cell: Cell, settings: Settings) -> RunConfig:
    """The run of a cell."""
    method, penalty = cell.values["method"], cell.values.get("penalty", 0.0)
    options = _slug(f"{method.partition('(')[2]}{' penalty' if penalty else ''}")
    # the runs of the paper's own methods are those of Table 1
    group = EXPERIMENT.name if options else "table1"
    train = {"penalty": penalty} if penalty else {}
    return run_config(settings, "opt", method, cell.values["seed"], group=group, name=options, train=train)


def measure(cell: Cell, settings: Settings) -> Values:
    config = config_of(cell, settings)
    finished(config, settings)
    rounded = {column(bits, fold): quantized(config, settings, bits, fold=fold)["perplexity"] for bits, fold in ROUNDED}
    return {**measured(config, settings), "rounded": rounded}


def by_method(found: dict[str, Values], settings: Settings) -> dict[str, list[Values]]:
    """Method, with its penalty if it has one → a value of each seed."""
    named = [replace(cell, values={**cell.values, "method": _combination(cell)}) for cell in cells(settings)]
    return group_by(named, found, "method")


def _combination(cell: Cell) -> str:
    penalty = cell.values.get("penalty")
    return f"{cell.values['method']}, penalty {penalty:g}" if penalty else str(cell.values["method"])


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    runs = by_method(found, settings)
    candidates = {bits: beyond_result.candidates(runs, bits) for bits in BITS}
    rivals = [m for m in METHODS if m in published.METHODS and m not in runs]
    beyond_result.draw(candidates, folder)
    return EXPERIMENT.result(
        beyond_result.tables(runs, candidates),
        beyond_result.FIGURES,
        beyond_result.verdicts(candidates, rivals),
        beyond_result.conditions(runs),
    )


EXPERIMENT = Experiment(
    "beyond",
    "Beyond the paper",
    "OPT with learned sinks, gates that see all features, QK-norm, an outlier penalty and folded LayerNorms: "
    "outliers, W8A8 and W4A8.",
    cells,
    measure,
    conclude,
    lambda settings: needs(settings, ("opt",)),
    partial=True,
)
