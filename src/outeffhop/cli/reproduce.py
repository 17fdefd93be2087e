"""``outeffhop reproduce``: the paper's tables and figures, printed and as a page."""

from __future__ import annotations

import json
import sys

import torch

from outeffhop._io import check_folder
from outeffhop.cli.console import print_json, print_table
from outeffhop.cli.options import Reproduce
from outeffhop.lab.paper.experiment import Result, Settings, Table
from outeffhop.lab.paper.ranking import ranks
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.running import check
from outeffhop.lab.paper.running import run as run_experiment
from outeffhop.lab.report.experiments_page import text_of, write_report

__all__ = ["run", "show"]

_MARKS = {1: " *", 2: " +"}


def run(options: Reproduce) -> None:
    """One experiment, or all; the page is written again after each, so that what is done can be seen."""
    if options.name is None:
        _list(options.json)
        return
    settings = _settings(options)
    chosen = [find(n) for n in (NAMES if options.name == "all" else (options.name,))]
    for experiment in chosen:  # before hours of the first: the last may lack its data, or have no such cells
        check(experiment, settings)
    results = []
    for experiment in chosen:
        result = run_experiment(experiment, settings, lambda line: print(line, file=sys.stderr))
        page = write_report(settings.out)
        results.append(result)
        if not options.json:
            show(result)
            print(f"written to {settings.out / experiment.name}.json and {page}\n")
    if options.json:
        print_json([json.loads(result.to_json()) for result in results])


def _list(as_json: bool) -> None:
    found = [find(name) for name in NAMES]
    if as_json:
        print_json([{"name": e.name, "of": e.of, "about": e.about} for e in found])
        return
    print_table("Experiments", ("name", "of the paper", "what it is"), [(e.name, e.of, e.about) for e in found])


def _settings(options: Reproduce) -> Settings:
    for name, value in (("seeds", options.seeds), ("workers", options.workers)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"data={str(options.data)!r} is not a folder: give the one with the data sets, or no --data")
    check_folder(options.out)
    device = options.device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be cpu or cuda; CUDA_VISIBLE_DEVICES chooses among several GPUs")
    elif device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: there is no CUDA device here; use cpu")
    return Settings(
        options.scale,
        options.seeds,
        options.out,
        options.data,
        options.workers,
        device,
        options.quick,
        options.only or ("*",),
    )


def show(result: Result) -> None:
    print(f"{result.of}: {result.about}\n")
    for table in result.tables:
        _show_table(table)
    for verdict in result.verdicts:
        behind = f" ({verdict.seeds_said})" if verdict.seeds is not None else ""
        print(f"{verdict.verdict.upper()}{behind}: {verdict.claim}\n    {verdict.numbers}")
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
