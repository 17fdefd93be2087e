"""``outeffhop evaluate``: a checkpoint's metric on data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outeffhop._io import to_plain, write_whole
from outeffhop.cli.checkpoint_data import check, load, prepared_for
from outeffhop.cli.console import print_json, print_table
from outeffhop.lab.data import batches
from outeffhop.metrics import metric_for
from outeffhop.models import model_summary

__all__ = ["run", "show"]

_FILE = "evaluation.json"


def run(
    checkpoint: str,
    data: str | None,
    *,
    split: str,
    batch_size: int,
    limit: int | None,
    length: int | None,
    tokenizer: str | None,
    device: str | None,
    out: Path | None,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """The task's metrics of a checkpoint on one split; written to ``out/evaluation.json`` where it is given."""
    check(out, batch_size=batch_size, limit=limit, length=length)
    model, source = load(checkpoint, device, data, length, trust_remote_code)
    prepared, has_task = prepared_for(model, source, tokenizer)
    if not has_task:
        raise ValueError(f"{type(model).__name__} has no head, hence no metric: `outeffhop outliers` serves it")
    samples = getattr(prepared, split)
    found = metric_for(prepared.task)(model, batches(samples, prepared.eval_collate, batch_size, limit=limit))
    summary = model_summary(model)
    result = {
        "checkpoint": checkpoint,
        "model": summary.model,
        "method": summary.method,
        "data": source.data,
        "split": split,
        "samples": len(samples) if limit is None else min(len(samples), limit * batch_size),
        "metrics": found,
    }
    if out is not None:
        write_whole(out / _FILE, json.dumps(to_plain(result), indent=1) + "\n")
    return result


def show(result: dict[str, Any], out: Path | None, as_json: bool) -> None:
    if as_json:
        print_json(to_plain(result))
        return
    title = (
        f"{result['model']} ({result['method']}) on {result['data']}, {result['split']}, {result['samples']} samples"
    )
    print_table(title, ("metric", "value"), [(k, f"{v:.6g}") for k, v in result["metrics"].items()])
    if out is not None:
        print(f"written to {out / _FILE}")
