"""``outeffhop mend``: a trained model loses its outliers. ``outeffhop resume`` continues it too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from outeffhop.cli.console import print_error, print_json, print_table, say
from outeffhop.cli.options import Mend, Resume
from outeffhop.lab.mending import MendConfig, MendReport, resume_mending
from outeffhop.lab.mending.mending_page import cost_table
from outeffhop.lab.mending.stages import mending_file, run_mending

__all__ = ["resume", "run"]


def run(options: Mend) -> None:
    config = MendConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(MendConfig)})
    report = _interruptible(
        options.out,
        lambda: run_mending(config, resume=options.resume == "auto", quiet=options.json, progress=_tell),
    )
    _show(report, Path(options.out), options.json)


def resume(options: Resume) -> None:
    report = _interruptible(options.run, lambda: resume_mending(options.run, quiet=options.json, progress=_tell))
    _show(report, Path(options.run), options.json)


def _interruptible(out: str, work: Callable[[], MendReport]) -> MendReport:
    try:
        return work()
    except KeyboardInterrupt:
        if mending_file(out).is_file():
            print_error(f"interrupted; to continue: outeffhop resume {out}")
        raise


def _tell(text: str) -> None:
    say(text, beside=True)


def _show(report: MendReport, out: Path, as_json: bool) -> None:
    if as_json:
        print_json(json.loads(report.to_json()))
        return
    kept = "architecture unchanged" if report.method == "vanilla" else report.method
    title = f"{report.checkpoint} on {report.data}, {report.steps:,} steps, {report.seconds / 60:.1f} min, {kept}"
    print_table(title, *cost_table(report))
    say(f"written to {out / 'model'}, {out / 'mend.json'} and {out / 'mend.html'}")
