"""``outeffhop outliers``: where a checkpoint's outliers are, as a table, as JSON and as a page."""

from __future__ import annotations

from pathlib import Path

from outeffhop._io import to_plain, write_whole
from outeffhop.cli.console import print_json, print_table, progress, say
from outeffhop.cli.options import Outliers
from outeffhop.lab.data import batches
from outeffhop.lab.data.tokenizer import marking_ids
from outeffhop.lab.diagnosis.opening import open_checkpoint
from outeffhop.lab.report.outliers_page import number, outlier_page, worst_tensors
from outeffhop.outliers import OutlierReport, measure

__all__ = ["run"]

_SHOWN = 10


def run(options: Outliers) -> None:
    """Measures, and writes ``outliers.json`` and ``outliers.html`` once everything is done."""
    model, source, prepared = open_checkpoint(options, out=options.out)
    total = min(options.batches, -(-len(prepared.validation) // options.batch_size))
    drawn = batches(prepared.validation, prepared.eval_collate, options.batch_size, limit=options.batches)
    with progress(total) as tell:
        report = measure(
            model,
            drawn,
            options.tensors,
            special_ids=marking_ids(prepared.tokenizer),
            progress=lambda done: tell(f"batch {done}/{total}", done),
        )
    about = (
        f"{Path(options.checkpoint).name} on {source.data}, validation split, {report.samples} samples; "
        f"tensors: {options.tensors}"
    )
    page = outlier_page(report, about)
    report.save(options.out / "outliers.json")
    write_whole(options.out / "outliers.html", page)
    _show(report, options.out, options.json)


def _show(report: OutlierReport, out: Path, as_json: bool) -> None:
    if as_json:
        print_json(to_plain({**report.summary, "worst": report.table(_SHOWN)}))
        return
    title = f"{report.model} ({report.method}), {report.samples} samples"
    facts = (report.max_inf_norm, report.max_abs, report.avg_kurtosis, report.avg_token_kurtosis)
    columns = ("max inf norm", "largest |x|", "avg kurtosis", "avg kurtosis per token")
    print_table(title, columns, [tuple(map(number, facts))])
    print_table("Worst tensors", *worst_tensors(report, _SHOWN))
    heads = [
        (
            h.name,
            _range(h.first_token),
            "unknown" if h.special_tokens is None else _range(h.special_tokens),
            _range(h.no_op),
            _range(h.max_probability),
        )
        for h in report.attention
    ]
    if not heads:
        say("No heads: this model computes attention in its own way, which cannot be looked into.")
    else:
        named = ("attention", "first token", "special tokens", "no-op 1 − γ", "largest probability")
        print_table("Heads: mean (largest)", named, heads)
    for name, found in report.non_finite.items():
        say(f"NOT FINITE: {found} values of {name}")
    say(f"written to {out / 'outliers.json'} and {out / 'outliers.html'}")


def _range(values: tuple[float, ...]) -> str:
    return f"{sum(values) / len(values):.3f} ({max(values):.3f})"
