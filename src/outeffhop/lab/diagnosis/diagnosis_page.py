"""The page of a diagnosis: what to do, what 8 bits cost, who is to blame, and where the outliers are."""

from __future__ import annotations

import math
from html import escape

from outeffhop.lab.diagnosis.diagnosis_report import Culprits, DiagnosisReport, SchemeCost
from outeffhop.lab.diagnosis.opening import name_of
from outeffhop.lab.diagnosis.verdicts import VERDICTS
from outeffhop.lab.report.by_layer import COLOURS, FIRST_TOKEN, by_layer, first_token_by_layer, largest_by_layer
from outeffhop.lab.report.html import Section, page, table
from outeffhop.lab.report.outliers_page import number, outlier_sections
from outeffhop.quantization import SCHEMES

__all__ = ["about", "blamed", "costs", "diagnosis_page", "left_out", "parked"]

_CLASSES = dict(zip(VERDICTS, ("confirmed", "printed", "open", "contradicted"), strict=True))


def diagnosis_page(report: DiagnosisReport, other: DiagnosisReport | None = None) -> str:
    """The report as one HTML file, with another one beside it if given."""
    name = name_of(report.checkpoint)
    if other is None:
        return page(f"Diagnosis of {name}", _sections(report), _head(report))
    title = f"{name} and {name_of(other.checkpoint)}"
    beside = Section(
        "Side by side",
        table(*_beside(report, other)) + _figures(report, other),
        "Both in floating point and in 8 bits. The figures show the largest of the measured tensors of each layer, and "
        "the mean over the heads of a layer.",
    )
    rest = "\n".join(map(str, _sections(other)))
    theirs = Section(
        name_of(other.checkpoint),
        f"<details><summary>Its own diagnosis</summary>{_head(other)}{rest}</details>",
    )
    return page(f"Diagnosis of {title}", [beside, *_sections(report), theirs], _head(report))


def _sections(report: DiagnosisReport) -> list[Section]:
    return [
        Section("What to do", _advice(report)),
        Section("What 8 bits cost", _cost_table(report), _legend(report)),
        *(_blame(culprits) for culprits in report.culprits),
        *outlier_sections(report.outliers, report.tokens),
    ]


def _head(report: DiagnosisReport) -> str:
    paper, linear = report.cost("paper"), report.cost("per-channel")
    facts = {name: number(value) for name, value in report.full.items()}
    facts |= {
        "everything in 8 bits": "" if paper is None else f"{paper.sqnr_db:.1f} dB",
        "Linear layers in 8 bits": "" if linear is None else f"{linear.sqnr_db:.1f} dB",
        "max inf norm": number(report.outliers.max_inf_norm),
        "avg kurtosis": number(report.outliers.avg_kurtosis),
        "heads that do little": parked(report) or "unknown",
    }
    boxes = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    broken = report.outliers.non_finite
    named = ", ".join(f"{name} ({count})" for name, count in broken.items())
    warning = f'<p class="warning">Tensors with values that are not finite: {escape(named)}</p>' if broken else ""
    return f'<p>{escape(about(report))}</p>{warning}<dl class="facts">{boxes}</dl>'


def about(report: DiagnosisReport) -> str:
    """What was measured, on what."""
    length = "" if report.length is None else f" of {report.length} tokens"
    chosen = ", which is built in and was taken because no data was named" if report.builtin else ""
    return (
        f"{report.model} ({report.method}), {report.parameters / 1e6:,.1f} million parameters, {report.dtype} on "
        f"{report.device}; {report.samples} samples{length} of {report.data}{chosen}; static ranges from "
        f"{report.calibration_samples} samples; {report.seconds:.0f} s."
    )


def parked(report: DiagnosisReport) -> str:
    """How many heads leave most of their attention on the first token, on special tokens or on nothing."""
    return f"{sum(len(heads) for _, heads in report.parked)} of {report.heads}" if report.heads else ""


def costs(report: DiagnosisReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What each scheme costs, as text: columns and rows."""
    names = list(report.costs[0].metric) if report.costs else []
    rows = [
        (cost.words, *(_change(report, cost, name) for name in names), _decibels(cost.sqnr_db), cost.verdict)
        for cost in report.costs
    ]
    shown = ["same answer" if name == "agreement" else f"{name} (floating → 8 bits)" for name in names]
    return ("quantized", *shown, "SQNR dB", "outputs are"), rows


def _change(report: DiagnosisReport, cost: SchemeCost, name: str) -> str:
    if name not in cost.metric:
        return ""
    if name == "agreement":
        return f"{100 * cost.metric[name]:.1f} %"
    return f"{_short(report.full[name])} → {_short(cost.metric[name])}" if name in report.full else ""


def _decibels(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else str(value)


def _short(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"


def _legend(report: DiagnosisReport) -> str:
    ends = list(VERDICTS)
    words = "; ".join(
        f"{end:g} dB or more: {VERDICTS[end]}" if math.isfinite(end) else f"less than {ends[-2]:g} dB: {VERDICTS[end]}"
        for end in ends
    )
    same = " The same answer: how often the largest logit is that of the model in floating point."
    has_it = any("agreement" in cost.metric for cost in report.costs)
    return f"SQNR is the power of the outputs over that of their error. {words}.{same if has_it else ''}"


def _cost_table(report: DiagnosisReport) -> str:
    columns, rows = costs(report)
    classes = {word: _CLASSES[least] for least, word in VERDICTS.items()}
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[:-1])
        + f'<td class="{classes[row[-1]]}">{escape(row[-1])}</td></tr>'
        for row in rows
    )
    return f'<div class="wide"><table class="costs">\n<tr>{head}</tr>\n{body}\n</table></div>'


def _advice(report: DiagnosisReport) -> str:
    items = "\n".join(
        f"<li>{escape(advice.text)}" + (f"<pre>{escape(advice.command)}</pre>" if advice.command else "") + "</li>"
        for advice in report.advice
    )
    return f'<ol class="advice">\n{items}\n</ol>'


def _blame(culprits: Culprits) -> Section:
    where = "Linear layers" if culprits.units == "layers" else "everything"
    return Section(
        f"Who is to blame: {where}, static",
        table(*blamed(culprits)) + table(*left_out(culprits)),
        f"{SCHEMES[culprits.scheme].words}. Of {culprits.among} {culprits.units}, those whose own values are rounded "
        f"worst were rounded alone, with everything else in floating point. All together leave "
        f"{_decibels(culprits.sqnr_db)} dB. The second table leaves the first of them in floating point.",
    )


def blamed(culprits: Culprits) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The tensors or layers to blame, as text: columns and rows."""
    rows: list[tuple[str, ...]] = [
        (
            each.name,
            _decibels(each.alone_db),
            _decibels(each.typical_db),
            number(each.largest),
            number(each.largest / each.std) if each.std else "",
        )
        for each in culprits.tensors
    ]
    columns = ("rounded alone", "outputs, dB", "its own typical value, dB", "max |x|", "max |x| / std")
    return columns, rows


def left_out(culprits: Culprits) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What leaving the first of them in floating point gains, as text: columns and rows."""
    columns = ("in floating point", "none", *(f"first {left.count}" for left in culprits.left_out))
    decibels = [_decibels(culprits.sqnr_db), *(_decibels(left.sqnr_db) for left in culprits.left_out)]
    return columns, [("outputs, dB", *decibels)]


def _beside(report: DiagnosisReport, other: DiagnosisReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    both = (report, other)
    rows: list[tuple[str, ...]] = [
        ("model", *(each.model for each in both)),
        ("attention", *(each.method for each in both)),
        ("max inf norm", *(number(each.outliers.max_inf_norm) for each in both)),
        ("avg kurtosis", *(number(each.outliers.avg_kurtosis) for each in both)),
        ("heads that do little", *(parked(each) or "unknown" for each in both)),
    ]
    names = [name for name in report.full if name in other.full]
    rows += [(f"{name}, floating point", *(_short(each.full[name]) for each in both)) for name in names]
    for cost in report.costs:
        found = [each.cost(cost.scheme) for each in both]
        told = [_told(each, names) if each is not None else "" for each in found]
        rows.append((cost.words, *told))
    return ("", *_names(report, other)), rows


def _names(report: DiagnosisReport, other: DiagnosisReport) -> tuple[str, str]:
    """What the two are called; by their whole paths where the last parts are the same."""
    first, second = name_of(report.checkpoint), name_of(other.checkpoint)
    return (first, second) if first != second else (report.checkpoint, f"{other.checkpoint}, the other")


def _told(cost: SchemeCost, names: list[str]) -> str:
    metric = "".join(f"{name} {_short(cost.metric[name])}, " for name in names if name in cost.metric)
    return f"{metric}{_decibels(cost.sqnr_db)} dB, {cost.verdict}"


def _figures(report: DiagnosisReport, other: DiagnosisReport) -> str:
    models = dict(zip(_names(report, other), (report.outliers, other.outliers), strict=True))
    colours = dict(zip(models, COLOURS, strict=False))
    figures = [
        by_layer(title, {name: (largest_by_layer(found, field), colours[name]) for name, found in models.items()})
        for title, field in (("inf norm", "inf_norm"), ("kurtosis", "kurtosis"))
    ]
    attention = {name: (first_token_by_layer(found), colours[name]) for name, found in models.items()}
    return "".join([*figures, by_layer(FIRST_TOKEN, attention, is_share=True)])
