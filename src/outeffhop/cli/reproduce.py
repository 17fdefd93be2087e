"""``outeffhop reproduce``: the paper's tables and figures, printed and as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from outeffhop._io import check_folder
from outeffhop.cli.console import print_json, print_table
from outeffhop.lab.paper.experiment import Result, Scale, Settings, Table
from outeffhop.lab.paper.ranking import ranks
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.running import check
from outeffhop.lab.paper.running import run as run_experiment
from outeffhop.lab.report.experiments_page import text_of, write_report

__all__ = ["list_experiments", "run", "settings_of"]

_MARKS = {1: " *", 2: " +"}


def list_experiments(as_json: bool) -> None:
    found = [find(name) for name in NAMES]
    if as_json:
        print_json([{"name": e.name, "of": e.of, "about": e.about} for e in found])
        return
    print_table("Experiments", ("name", "of the paper", "what it is"), [(e.name, e.of, e.about) for e in found])


def settings_of(
    scale: Scale,
    seeds: int,
    out: Path,
    data: Path | None,
    workers: int,
    device: str | None,
    quick: bool,
    only: tuple[str, ...] = ("*",),
) -> Settings:
    for name, value in (("seeds", seeds), ("workers", workers)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is needed")
    if data is not None and not data.is_dir():
        raise ValueError(f"data={str(data)!r} is no folder: name the one with the data sets, or leave --data out")
    check_folder(out)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: cpu or cuda is needed; CUDA_VISIBLE_DEVICES chooses among several GPUs")
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: there is no CUDA device here; cpu is the remedy")
    return Settings(scale, seeds, out, data, workers, device, quick, only or ("*",))


def run(name: str, settings: Settings, as_json: bool) -> None:
    """One experiment, or all; the page is written anew after each, so that what is done can be seen."""
    chosen = [find(n) for n in (NAMES if name == "all" else (name,))]
    for experiment in chosen:  # before hours of the first: the last may lack its data, or the cells asked for
        check(experiment, settings)
    results = []
    for experiment in chosen:
        result = run_experiment(experiment, settings, lambda line: print(line, file=sys.stderr))
        page = write_report(settings.out)
        results.append(result)
        if not as_json:
            show(result)
            print(f"written to {settings.out / experiment.name}.json and {page}\n")
    if as_json:
        print_json([json.loads(result.to_json()) for result in results])


def show(result: Result) -> None:
    print(f"{result.of}: {result.about}\n")
    for table in result.tables:
        _show_table(table)
    for verdict in result.verdicts:
        print(f"{verdict.verdict.upper()}: {verdict.claim}\n    {verdict.numbers}")
    print_table("\nConditions", ("", ""), [(str(k), text_of(v)) for k, v in result.conditions.items()])


def _show_table(table: Table) -> None:
    marked = ranks(table)
    rows = [
        [text_of(entry) + _MARKS.get(marked.get((i, j), 0), "") for j, entry in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    print_table(table.title, list(table.columns), rows)
    if marked:
        print("  * best, + second best" + (f" for each {table.group}" if table.group else ""))
    print(f"  {table.note}\n" if table.note else "")
