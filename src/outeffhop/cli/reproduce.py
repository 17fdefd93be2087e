"""``outeffhop reproduce``: the paper's tables and figures, printed and as a page."""

from __future__ import annotations

import dataclasses
import json
import os

import torch

from outeffhop._io import check_folder
from outeffhop.cli.console import print_json, print_table, say, speaks
from outeffhop.cli.options import Reproduce
from outeffhop.lab.paper.experiment import Experiment, Result, Settings, Table
from outeffhop.lab.paper.paper_settings import repeats
from outeffhop.lab.paper.ranking import entry_text, ranks
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.running import check
from outeffhop.lab.paper.running import run as run_experiment
from outeffhop.lab.report.experiments_page import write_report

__all__ = ["run", "show"]

_MARKS = {1: " *", 2: " +"}


def run(options: Reproduce) -> None:
    """One experiment, or all; the page is written again after each, so that what is done can be seen."""
    if options.name is None:
        _list(options.json)
        return
    settings = _settings(options)
    chosen = [find(n) for n in (NAMES if options.name == "all" else (options.name,))]
    if options.dry_run:
        _dry_run(chosen, settings, options)
        return
    _join_processes(chosen, settings)
    for experiment in chosen:  # before hours of the first: the last may lack its data, or have no such cells
        check(experiment, _seeded(experiment, settings, options))
    results = []
    for experiment in chosen:
        result = run_experiment(experiment, _seeded(experiment, settings, options), _tell)
        if not speaks():
            continue
        page = write_report(settings.out)
        results.append(result)
        if not options.json:
            show(result)
            say(f"written to {settings.out / experiment.name}.json and {page}", "")
    if options.json and speaks():
        print_json([json.loads(result.to_json()) for result in results])


def _tell(line: str) -> None:
    if speaks():
        say(line, beside=True)


def _seeded(experiment: Experiment, settings: Settings, options: Reproduce) -> Settings:
    """As many seeds as the paper repeats an experiment, at its scale; three otherwise."""
    if options.seeds is not None or options.scale != "paper":
        return settings
    return dataclasses.replace(settings, seeds=repeats(experiment.name) or settings.seeds)


def _dry_run(experiments: list[Experiment], settings: Settings, options: Reproduce) -> None:
    """Every setting beside the paper's."""
    from outeffhop.lab.paper.dry_run import rows

    found = [row for e in experiments for row in rows(e, _seeded(e, settings, options))]
    if options.json:
        print_json([dataclasses.asdict(row) for row in found])
        return
    for experiment in experiments:
        own = [row for row in found if row.experiment == experiment.name]
        for part in dict.fromkeys(row.part for row in own):
            print_table(
                f"{experiment.of} ({experiment.name}), {part}, scale {settings.scale}",
                ("setting", "ours", "the paper's", "source", ""),
                [
                    (row.setting, _said(row.ours), _said(row.paper), row.source, "" if row.note == "same" else row.note)
                    for row in own
                    if row.part == part
                ],
            )
            say()


def _said(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_said, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _join_processes(experiments: list[Experiment], settings: Settings) -> None:
    """Under torchrun, all processes train a cell together and measure it alike; the first one writes."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return
    if settings.workers > 1:
        raise ValueError(f"workers={settings.workers}: under torchrun all processes measure one cell; leave it out")
    alone = [e.name for e in experiments if e.alone]
    if alone:
        raise ValueError(f"name={alone[0]!r} measures time and memory of one process: run it without torchrun")
    if settings.device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def _list(as_json: bool) -> None:
    found = [find(name) for name in NAMES]
    if as_json:
        print_json([{"name": e.name, "of": e.of, "about": e.about} for e in found])
        return
    print_table("Experiments", ("name", "of the paper", "what it is"), [(e.name, e.of, e.about) for e in found])


def _settings(options: Reproduce) -> Settings:
    for name, value in (("seeds", options.seeds), ("workers", options.workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    if options.data is not None and not options.data.is_dir():
        raise ValueError(f"data={str(options.data)!r} is not a folder: give the one with the data sets, or no --data")
    if not options.dry_run:
        check_folder(options.out)
    device = options.device
    if device is None:
        on_gpu = torch.cuda.is_available() or (options.dry_run and options.scale != "tiny")
        device = "cuda" if on_gpu else "cpu"
    elif device not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r}: must be cpu or cuda; CUDA_VISIBLE_DEVICES chooses among several GPUs")
    elif device == "cuda" and not torch.cuda.is_available() and not options.dry_run:
        raise ValueError(f"device={device!r}: there is no CUDA device here; use cpu")
    return Settings(
        options.scale,
        3 if options.seeds is None else options.seeds,
        options.out,
        options.data,
        options.workers,
        device,
        options.quick,
        options.only or ("*",),
        options.text,
        options.tokenizer,
    )


def show(result: Result) -> None:
    say(f"{result.of}: {result.about}", "")
    for table in result.tables:
        _show_table(table)
    for verdict in result.verdicts:
        behind = f" ({verdict.seeds_said})" if verdict.seeds is not None else ""
        say(f"{verdict.verdict.upper()}{behind}: {verdict.claim}", f"    {verdict.numbers}")
    say()
    print_table("Conditions", ("", ""), [(str(k), entry_text(v)) for k, v in result.conditions.items()])


def _show_table(table: Table) -> None:
    marked = ranks(table)
    rows = [
        [entry_text(entry) + _MARKS.get(marked.get((i, j), 0), "") for j, entry in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    print_table(table.title, list(table.columns), rows)
    if marked:
        say("  * best, + second best" + (f" for each {table.group}" if table.group else ""))
    say(*([f"  {table.note}", ""] if table.note else []))
