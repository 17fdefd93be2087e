"""The page of a diagnosis: what to do, what 8 bits cost, which tensors are to blame, and where the outliers are."""

from __future__ import annotations

import math
from html import escape

from outeffhop.lab.diagnosis.diagnosis_report import Culprits, DiagnosisReport, SchemeCost
from outeffhop.lab.diagnosis.opening import name_of
from outeffhop.lab.diagnosis.verdicts import VERDICTS, verdict
from outeffhop.lab.report.by_layer import COLOURS, FIRST_TOKEN, by_layer, first_token_by_layer, largest_by_layer
from outeffhop.lab.report.html import Section, page, table
from outeffhop.lab.report.outliers_page import number, outlier_sections, short_names
from outeffhop.quantization import SCHEMES

__all__ = ["about", "blamed", "costs", "diagnosis_page", "idle_heads", "left_out", "title_of"]

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
        *outlier_sections(report.outliers, report.tokens, idle_heads(report)),
    ]


def _head(report: DiagnosisReport) -> str:
    paper, linear = report.cost("paper"), report.cost("per-channel")
    facts = {name: number(value) for name, value in report.full.items()}
    facts |= {
        "everything in 8 bits": _fact(paper),
        "Linear layers in 8 bits": _fact(linear),
        "max inf norm": number(report.outliers.max_inf_norm),
        "avg kurtosis": number(report.outliers.avg_kurtosis),
        "heads that do little": _counted_heads(report),
    }
    boxes = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    broken = report.outliers.non_finite
    named = ", ".join(f"{name} ({count})" for name, count in broken.items())
    warning = f'<p class="warning">Tensors with values that are not finite: {escape(named)}</p>' if broken else ""
    told = "".join(f"<p>{escape(line)}</p>" for line in about(report))
    return f'{told}{warning}<dl class="facts">{boxes}</dl>'


def _fact(cost: SchemeCost | None) -> str:
    return "" if cost is None else f"{_decibels(cost.sqnr_db)} dB, {cost.verdict}"


def about(report: DiagnosisReport) -> list[str]:
    """What was measured, and on what: a line for each."""
    length = "" if report.length is None else f" of {report.length} tokens"
    parameters = f"{report.parameters / 1e6:,.1f} million" if report.parameters >= 1e5 else f"{report.parameters:,}"
    lines = [
        f"{report.model} with {report.method} attention, {parameters} parameters, {report.dtype} on {report.device}.",
        f"Measured on {report.samples} samples{length} of {report.data}; static ranges come from "
        f"{report.calibration_samples} others. It took {report.seconds:.0f} s.",
    ]
    if report.builtin:
        lines.append("No data was named, so built-in data was used: name data like what the model will see by --data.")
    return lines


def idle_heads(report: DiagnosisReport) -> str:
    """Which heads leave most of their attention on the first token, on special tokens or on nothing, in a sentence."""
    if not report.heads:
        return "What the heads attend to is unknown: this model's attention does not show its weights."
    found = report.parked
    told = "more than half of their attention on the first token, on special tokens or on nothing"
    if not found:
        return f"None of {report.heads} heads leaves {told.replace('their', 'its')}."
    names = short_names([heads.name for heads in report.outliers.attention])
    by_name = dict(zip((heads.name for heads in report.outliers.attention), names, strict=True))
    where = "; ".join(f"{by_name[heads.name]}: {', '.join(map(str, idle))}" for heads, idle in found)
    return f"{_counted_heads(report)} heads leave {told}, so they do little. {where}."


def _counted_heads(report: DiagnosisReport) -> str:
    return f"{sum(len(heads) for _, heads in report.parked)} of {report.heads}" if report.heads else "unknown"


def costs(report: DiagnosisReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What each scheme costs, as text: columns and rows."""
    names = list(report.costs[0].metric) if report.costs else []
    rows = [
        (
            cost.scheme,
            cost.words,
            *(_change(report, cost, name) for name in names),
            _decibels(cost.sqnr_db),
            cost.verdict,
        )
        for cost in report.costs
    ]
    shown = ["same answer" if name == "agreement" else f"{name} (floating → 8 bits)" for name in names]
    return ("scheme", "8 bits for", *shown, "SQNR dB", "outputs are"), rows


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
    return (
        f"Weights and activations have 8 bits. SQNR is the power of the outputs over that of their error. {words}."
        f"{same if has_it else ''}"
    )


def _cost_table(report: DiagnosisReport) -> str:
    columns, rows = costs(report)
    classes = {word: _CLASSES[least] for least, word in VERDICTS.items()}
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    note = f"<p>{escape(report.no_int8)}</p>" if report.no_int8 else ""
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[:-1])
        + f'<td class="{classes[row[-1]]}">{escape(row[-1])}</td></tr>'
        for row in rows
    )
    return f'<div class="wide"><table class="costs">\n<tr>{head}</tr>\n{body}\n</table></div>{note}'


def _advice(report: DiagnosisReport) -> str:
    items = "\n".join(
        f"<li>{escape(advice.text)}" + (f"<pre>{escape(advice.command)}</pre>" if advice.command else "") + "</li>"
        for advice in report.advice
    )
    return f'<ol class="advice">\n{items}\n</ol>'


def _blame(culprits: Culprits) -> Section:
    most = culprits.left_out[-1].count if culprits.left_out else 0
    remedy = culprits.remedy
    if culprits.sqnr_db >= 0 and remedy is not None:
        end = f"With the first {remedy.count} in floating point the outputs are {verdict(remedy.sqnr_db)}."
    else:
        end = ""
    return Section(
        title_of(culprits),
        table(*blamed(culprits)) + table(*left_out(culprits)),
        f"8 bits for {SCHEMES[culprits.scheme].what}. Each of these was rounded alone, with all else in floating "
        f"point; they are the {most} of {culprits.among} {culprits.units} whose own values 8 bits round worst. "
        f"The second table rounds all but the first ones. {end}",
    )


def title_of(culprits: Culprits) -> str:
    """What a table of culprits is about."""
    where = "Linear layers" if culprits.units == "layers" else "everything"
    return f"The {culprits.units} to blame: 8 bits for {where}"


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
    columns = (culprits.units.removesuffix("s"), "outputs, dB", "own values, dB", "max |x|", "max |x| / std")
    return columns, rows


def left_out(culprits: Culprits) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What leaving the first of them in floating point gains, as text: columns and rows."""
    columns = ("left in floating point", "none", *(f"first {left.count}" for left in culprits.left_out))
    decibels = [_decibels(culprits.sqnr_db), *(_decibels(left.sqnr_db) for left in culprits.left_out)]
    return columns, [("outputs, dB", *decibels)]


def _beside(report: DiagnosisReport, other: DiagnosisReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    both = (report, other)
    rows: list[tuple[str, ...]] = [
        ("model", *(each.model for each in both)),
        ("attention", *(each.method for each in both)),
        ("max inf norm", *(number(each.outliers.max_inf_norm) for each in both)),
        ("avg kurtosis", *(number(each.outliers.avg_kurtosis) for each in both)),
        ("heads that do little", *(_counted_heads(each) for each in both)),
    ]
    names = [name for name in report.full if name in other.full]
    rows += [(f"{name}, floating point", *(_short(each.full[name]) for each in both)) for name in names]
    for cost in report.costs:
        found = [each.cost(cost.scheme) for each in both]
        told = [_told(each, names) if each is not None else "" for each in found]
        rows.append((f"8 bits for {cost.words}", *told))
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
