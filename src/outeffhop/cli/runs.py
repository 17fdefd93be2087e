"""``outeffhop runs``: the runs under a folder, with their metrics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from outeffhop._io import read_json
from outeffhop.cli.console import print_error, print_json, print_table, say
from outeffhop.cli.options import Runs
from outeffhop.lab.training import Result, RunFolder
from outeffhop.quantization import QuantizationReport

__all__ = ["describe", "run"]


def describe(root: Path) -> list[dict[str, Any]]:
    """Every run at or below a folder, in the order of their names."""
    if not root.is_dir():
        raise ValueError(f"folder={str(root)!r} is not a folder")
    return [_describe(RunFolder(p.parent), root) for p in sorted(root.rglob("config.yaml"))]


def _describe(folder: RunFolder, root: Path) -> dict[str, Any]:
    name = str(folder.path.relative_to(root)) if folder.path != root else str(root)
    try:
        config = folder.config()
        lines = folder.metrics()
        metrics: dict[str, Any] = {}
        for line in lines:
            metrics.update(
                {k: v for k, v in line.items() if k.startswith("eval_") or k in ("max_inf_norm", "avg_kurtosis")}
            )
        for kind, reader in (("result", Result), ("quantization", QuantizationReport)):
            file = folder.path / f"{kind}.json"
            if file.is_file():
                reader.load(file)  # refuses anything else
                metrics[kind] = read_json(file)
    except (ValueError, OSError) as error:  # the others can still be shown
        return {"run": name, "state": "unreadable", "error": str(error)}
    return {
        "run": name,
        "model": config.model,
        "preset": config.preset,
        "method": config.method,
        "data": config.data,
        "seed": config.train.seed,
        "step": max((line.get("step", 0) for line in lines), default=0),
        "steps": config.train.max_steps,
        "state": "finished" if folder.finished else "unfinished",
        "metrics": metrics,
    }


def run(options: Runs) -> None:
    root = Path(options.folder)
    runs = describe(root)
    if options.json:
        print_json(runs)
        return
    if not runs:
        say(f"no runs in {root}; start one with: outeffhop train --data builtin:text --out {root}/a")
        return
    print_table(
        f"Runs in {root}",
        ("run", "model", "method", "seed", "step", "state", "metric", "max inf norm", "avg kurtosis", "quantized"),
        [_row(each) for each in runs],
    )
    for each in runs:
        if "error" in each:
            print_error(f"{each['run']} is unreadable: {each['error']}")


def _row(run: dict[str, Any]) -> list[str]:
    if "error" in run:
        return [run["run"], "", "", "", "", run["state"], "", "", "", ""]
    found = run["metrics"]
    chief = [(k, found[k]) for k in ("eval_perplexity", "eval_accuracy", "eval_mse") if k in found]
    quantized = ""
    if "quantization" in found:
        name, values = next(iter(found["quantization"]["quantized"].items()), ("nothing", [math.nan]))
        quantized = f"{name} {sum(map(float, values)) / len(values):.4g} ({found['quantization']['scheme']})"
    return [
        run["run"],
        f"{run['model']} {run['preset']}",
        run["method"],
        str(run["seed"]),
        f"{run['step']}/{run['steps']}",
        run["state"],
        "".join(f"{k.removeprefix('eval_')} {_number(v)}" for k, v in chief),
        _number(found.get("max_inf_norm")),
        _number(found.get("avg_kurtosis")),
        quantized,
    ]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value or "")
