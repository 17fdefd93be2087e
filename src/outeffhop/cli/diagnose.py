"""``outeffhop diagnose``: what 8 bits cost a checkpoint, why, and what to do, as tables, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import json
from itertools import count
from pathlib import Path

from outeffhop.cli.console import print_json, print_table, progress, say
from outeffhop.cli.options import Diagnose
from outeffhop.lab.diagnosis.diagnosing import FILE, OTHER, PAGE, run_diagnosis
from outeffhop.lab.diagnosis.diagnosis_config import DiagnosisConfig
from outeffhop.lab.diagnosis.diagnosis_page import about, blamed, costs, idle_heads, left_out, title_of
from outeffhop.lab.diagnosis.diagnosis_report import DiagnosisReport
from outeffhop.lab.diagnosis.opening import name_of
from outeffhop.lab.report.outliers_page import worst_tensors
from outeffhop.quantization import SCHEMES

__all__ = ["run"]

_SHOWN = 5
_STEPS = 6 + 2 * len(SCHEMES)  # about: those to blame and a comparison come on top


def run(options: Diagnose) -> None:
    """Diagnoses, and writes ``diagnosis.json`` and ``diagnosis.html`` once everything is done."""
    fields = {f.name: getattr(options, f.name) for f in dataclasses.fields(DiagnosisConfig)}
    fields["int8"] = True if options.int8 else False if options.no_int8 else None
    config = DiagnosisConfig(**fields)
    out = options.out or Path("diagnosis") / name_of(options.checkpoint)
    done = count()
    with progress(_STEPS) as tell:
        report, other = run_diagnosis(config, options.compare, out, progress=lambda text: tell(text, next(done)))
    if options.json:
        print_json(json.loads(report.to_json()))
        return
    _show(report)
    if other is not None:
        say()
        _show(other)
    also = f", {out / OTHER}" if other is not None else ""
    say(f"written to {out / PAGE} and {out / FILE}{also}")


def _show(report: DiagnosisReport) -> None:
    say(report.checkpoint)
    for line in about(report):
        say(f"  {line}")
    print_table("What 8 bits for weights and activations cost", *costs(report))
    if report.no_int8:
        say(f"  {report.no_int8}")
    for each in report.culprits:
        columns, rows = blamed(each)
        print_table(f"{title_of(each)}, each rounded alone", columns, rows[:_SHOWN])
        print_table(f"The same with the first of {each.among} left out", *left_out(each))
    print_table("Worst tensors", *worst_tensors(report.outliers, _SHOWN, report.tokens))
    say("Heads", f"  {idle_heads(report)}")
    for tensor, found in report.outliers.non_finite.items():
        say(f"NOT FINITE: {found} values of {tensor}")
    say("What to do")
    for i, advice in enumerate(report.advice, 1):
        say(f"  {i}. {advice.text}")
        if advice.command is not None:
            say(f"     {advice.command}")
