"""``outeffhop train`` and ``outeffhop resume``: a run from a config, flags, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed

from outeffhop._io import to_plain
from outeffhop.cli import mend as mend_command
from outeffhop.cli.console import print_error, print_json, print_table, say, speaks
from outeffhop.cli.options import Resume, Train
from outeffhop.lab.mending.stages import mending_file
from outeffhop.lab.training import Result, RunConfig, RunFolder
from outeffhop.lab.training import resume as resume_run
from outeffhop.lab.training import train as train_run
from outeffhop.lab.training.config import to_dict, to_yaml
from outeffhop.lab.training.estimate import estimate
from outeffhop.lab.training.recipes import in_steps, resolve
from outeffhop.lab.training.run import prepare_data

__all__ = ["resume", "run"]


def run(options: Train) -> None:
    if options.dry_run:
        _show_plan(options.run, as_json=options.json)
        return
    out = options.run.out
    with _interruptible(out):
        result = train_run(options.run, resume=options.resume == "auto", quiet=options.json)
    _show(result, out, as_json=options.json)


def resume(options: Resume) -> None:
    if mending_file(options.run).is_file():
        mend_command.resume(options)
        return
    folder = RunFolder(options.run)
    if folder.finished:
        raise ValueError(f"the run in {options.run!r} is finished: its numbers are in {folder.path / 'result.json'}")
    with _interruptible(options.run):
        result = resume_run(Path(options.run), quiet=options.json)
    _show(result, options.run, as_json=options.json)


@contextmanager
def _interruptible(out: str) -> Iterator[None]:
    """An interrupted run says how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        if speaks() and RunFolder(out).exists:
            print_error(f"interrupted; to continue: outeffhop resume {out}")
        raise
    # its threads must end before the interpreter does
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _show_plan(run: RunConfig, as_json: bool) -> None:
    resolved = resolve(run)
    prepared = prepare_data(resolved)
    resolved = in_steps(resolved, prepared)
    found = estimate(resolved, prepared)
    if as_json:
        print_json({"config": to_dict(resolved), "estimate": dataclasses.asdict(found)})
        return
    say(*to_yaml(resolved).split("\n"))
    rows = [
        ("parameters", f"{found.parameters:,}"),
        ("samples per step", f"{found.samples_per_step:,}"),
        *([("tokens per step", f"{found.tokens_per_step:,}")] if found.tokens_per_step else []),
        ("epochs", f"{found.epochs:.2f}"),
        ("floating point operations per step", f"{found.flops_per_step:.3g}"),
        ("time, roughly", _duration(found.seconds)),
        ("memory, roughly", f"{found.memory_mib:,.0f} MiB"),
    ]
    print_table("What it will cost", ("", ""), rows)


def _show(result: Result, out: str, as_json: bool) -> None:
    if not speaks():
        return
    if as_json:
        print_json(to_plain(dataclasses.asdict(result)))
        return
    values: dict[str, Any] = {
        **result.metrics,
        "max inf norm": result.max_inf_norm,
        "avg kurtosis": result.avg_kurtosis,
    }
    best = "" if result.best_step is None else f"; the best was step {result.best_step}"
    title = f"{out} after {result.steps} steps{', stopped early' if result.stopped_early else ''}{best}"
    print_table(title, ("metric", "validation"), [(k, f"{v:.4g}") for k, v in values.items()])
    say(f"The model is in {Path(out) / 'model'}; next: outeffhop diagnose {out}")


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
