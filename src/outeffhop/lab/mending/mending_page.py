"""The page of a mending: outliers, attention and the cost of 8 bits, before and after."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from outeffhop.lab.mending.measuring_models import MEASURED
from outeffhop.lab.mending.mend_report import Measured, MendReport
from outeffhop.lab.report.by_layer import COLOURS, FIRST_TOKEN, by_layer, first_token_by_layer, largest_by_layer
from outeffhop.lab.report.html import Section, page, table
from outeffhop.lab.report.outliers_page import number
from outeffhop.quantization import SCHEMES

__all__ = ["cost_table", "mending_page"]

_COLOURS = {"as it came": COLOURS[0], "plain fine-tuning": COLOURS[2], "mended": COLOURS[1]}
_WORST = 12


def mending_page(report: MendReport) -> str:
    """The report as one HTML file."""
    metric = next(iter(report.before.full))
    sections = [
        Section(
            "What 8 bits cost",
            table(*cost_table(report)),
            "Every row is one way to quantize, simulated; every column one model. Static ranges per tensor for the "
            "whole model are the hardest. The other ways leave all but Linear layers in floating point, find ranges as "
            "the model runs, or use 8-bit floating point.",
        ),
        Section(
            "Outliers by layer",
            _figure(report, "inf norm", lambda m: largest_by_layer(m.outliers, "inf_norm"))
            + _figure(report, "kurtosis", lambda m: largest_by_layer(m.outliers, "kurtosis")),
            "The largest of the measured tensors of each layer; the inf norm is max |x| of a sample, averaged over "
            "samples. A Gaussian has kurtosis 3.",
        ),
        Section(
            "Attention on the first token",
            _figure(report, FIRST_TOKEN, lambda m: first_token_by_layer(m.outliers), is_share=True),
            "The mean over the heads of a layer. Heads with nothing to do park their attention there.",
        ),
        Section(
            "The tensors to blame",
            table(*_blamed(report)),
            "The tensors of the model as it came that static 8 bits round worst, by the signal over the rounding error "
            "of the median channel or token; and the same tensors of the mended model.",
        ),
    ]
    return page(f"{report.checkpoint}, mended", sections, _head(report, metric))


def cost_table(report: MendReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The metrics of each model in floating point and by each scheme, as text: columns and rows."""
    models = report.columns
    rows = [("max inf norm", *(number(m.outliers.max_inf_norm) for m in models.values()))]
    rows += [("avg kurtosis", *(number(m.outliers.avg_kurtosis) for m in models.values()))]
    for metric in (name for name in report.before.full if name != "loss"):  # perplexity says the same
        full = [m.full[metric] for m in models.values()]
        if any(map(math.isfinite, full)):  # a model's SQNR against itself is not
            rows.append((f"{metric}, floating point", *map(_short, full)))
        for scheme in MEASURED:
            found = [m.quantized[scheme].mean(metric) for m in models.values()]
            rows.append((f"{metric}, {SCHEMES[scheme].words}", *map(_short, found)))
    return ("", *models), rows


def _short(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def _head(report: MendReport, metric: str) -> str:
    before, after = report.before, report.after
    facts = {
        f"{metric}, floating point": _pair(before.full[metric], after.full[metric]),
        f"{metric}, W8A8": _pair(*(m.quantized["paper"].mean(metric) for m in (before, after))),
        "max inf norm": _pair(before.outliers.max_inf_norm, after.outliers.max_inf_norm),
        "avg kurtosis": _pair(before.outliers.avg_kurtosis, after.outliers.avg_kurtosis),
        "fine-tuning": f"{report.steps:,} steps, {report.seconds / 60:.1f} min",
    }
    boxes = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    length = f" × {report.length} tokens" if report.length else ""
    kept = "its architecture unchanged" if report.method == "vanilla" else f"attention method {report.method}"
    learned = f"imitating {report.teacher}" if report.teacher else "from labels"
    data = report.data.rstrip("/").rpartition("/")[2]
    said = (
        f"Fine-tuned on {data}, {report.batch_size}{length} a step, {learned}, learning rate {report.lr:g}, "
        f"penalty {report.penalty:g} on outliers ({report.penalty_kind}), "
        f"weights within {report.weight_bound:g} deviations, seed {report.seed}; {kept}. Measured on "
        f"{after.outliers.samples} samples of the validation split."
    )
    return f'<p>{escape(said)}</p><dl class="facts">{boxes}</dl>'


def _pair(before: float, after: float) -> str:
    return f"{_short(before)} → {_short(after)}"


def _figure(report: MendReport, title: str, values: Callable[[Measured], list[float]], is_share: bool = False) -> str:
    lines = {name: (values(model), _COLOURS[name]) for name, model in report.columns.items()}
    return by_layer(title, lines, is_share=is_share)


def _blamed(report: MendReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    after = {row.name: row for row in report.after.quantized["paper"].worst}
    rows: list[tuple[str, ...]] = []
    for row in report.before.quantized["paper"].worst[:_WORST]:
        mended = after.get(row.name)
        rows.append(
            (
                row.name,
                f"{row.typical_db:.1f}",
                "each token's own" if row.low is None else f"[{row.low:.4g}, {row.high:.4g}]",
                "no longer among the worst" if mended is None else f"{mended.typical_db:.1f}",
            )
        )
    return ("tensor", "dB as it came", "its range", "dB mended"), rows
