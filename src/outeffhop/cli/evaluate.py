"""``outeffhop evaluate``: a checkpoint's metric on data."""

from __future__ import annotations

import json
from typing import Any

from outeffhop._io import to_plain, write_whole
from outeffhop.cli.console import print_json, print_table, say
from outeffhop.cli.options import Evaluate
from outeffhop.lab.data import batches
from outeffhop.lab.diagnosis.opening import open_checkpoint
from outeffhop.metrics import metric_for
from outeffhop.models.summary import running_method

__all__ = ["run"]

_FILE = "evaluation.json"


def run(options: Evaluate) -> None:
    """The task's metrics of a checkpoint on one split; written to ``out/evaluation.json`` if ``out`` is given."""
    model, source, prepared = open_checkpoint(options, out=options.out)
    if prepared.task == "embedding":
        raise ValueError(
            f"{type(model).__name__} has no head with a metric: use `outeffhop diagnose`, or `outeffhop quantize`, "
            "which compare its outputs before and after"
        )
    samples = getattr(prepared, options.split)
    drawn = batches(samples, prepared.eval_collate, options.batch_size, limit=options.batches)
    found = metric_for(prepared.task)(model, drawn)
    measured = len(samples) if options.batches is None else min(len(samples), options.batches * options.batch_size)
    result = {
        "checkpoint": source.checkpoint,
        "model": type(model).__name__,
        "method": running_method(model),
        "data": source.data,
        "split": options.split,
        "samples": measured,
        "metrics": found,
    }
    if options.out is not None:
        write_whole(options.out / _FILE, json.dumps(to_plain(result), indent=1) + "\n")
    _show(result, options)


def _show(result: dict[str, Any], options: Evaluate) -> None:
    if options.json:
        print_json(to_plain(result))
        return
    title = (
        f"{result['model']} ({result['method']}) on {result['data']}, {result['split']}, {result['samples']} samples"
    )
    print_table(title, ("metric", "value"), [(k, f"{v:.6g}") for k, v in result["metrics"].items()])
    if options.out is not None:
        say(f"written to {options.out / _FILE}")
