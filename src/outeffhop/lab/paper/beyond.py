"""Beyond the paper: newer options, alone and combined with its methods, and how much they reduce the cost of int8.

The paper names outliers made by LayerNorm as its limit. Here, learned sinks, gates that see all features, QK-norm, and
folding LayerNorm's scale into the next layers are measured on OPT.
"""

from __future__ import annotations

import re
from pathlib import Path

from outeffhop.lab.paper import beyond_result, published
from outeffhop.lab.paper.beyond_result import BITS, ROUNDED, column
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings, Values, group_by
from outeffhop.lab.paper.trained_models import measured, quantized
from outeffhop.lab.paper.training_runs import DATA, finished, needs, run_config, steps_of

__all__ = ["EXPERIMENT", "by_method"]

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


def cells(settings: Settings) -> list[Cell]:
    asked = {"steps": steps_of("opt", settings), "data": DATA[settings.scale]["opt"]}
    return [
        Cell(f"{_slug(method)}-{seed}", {"method": method, "seed": seed, **asked})
        for seed in range(settings.seeds)  # the first seed of everything first, for a complete table early
        for method in METHODS
    ]


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text).strip("-")


def measure(cell: Cell, settings: Settings) -> Values:
    method = cell.values["method"]
    options = _slug(method.partition("(")[2])
    # the runs of the paper's own methods are those of Table 1
    group = EXPERIMENT.name if options else "table1"
    config = run_config(settings, "opt", method, cell.values["seed"], group=group, name=options)
    finished(config, settings)
    rounded = {column(bits, fold): quantized(config, settings, bits, fold=fold)["perplexity"] for bits, fold in ROUNDED}
    return {**measured(config, settings), "rounded": rounded}


def by_method(found: dict[str, Values], settings: Settings) -> dict[str, list[Values]]:
    """Method → a value of each seed."""
    return group_by(cells(settings), found, "method")


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
    "OPT with learned sinks, gates that see all features, QK-norm and folded LayerNorms: outliers, W8A8 and W4A8.",
    cells,
    measure,
    conclude,
    lambda settings: needs(settings, ("opt",)),
    partial=True,
)
