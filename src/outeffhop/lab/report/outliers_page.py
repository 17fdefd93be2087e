"""The page of an outlier report: where outliers are, by layer and component, and what heads attend to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from types import MappingProxyType

from outeffhop.lab.report.heat_map import heat_map
from outeffhop.lab.report.html import Section, page, table
from outeffhop.outliers.outlier_report import HeadStats, OutlierReport, TensorStats

__all__ = ["number", "outlier_page", "outlier_sections", "short_names", "worst_tensors"]

_KEPT = 20
_SEEN = 0.005  # what a map shows as more than 0.00


def outlier_page(report: OutlierReport, about: str = "") -> str:
    """The report as one HTML file. ``about`` says what was measured, and on which data."""
    return page(f"Outliers of {report.model}, {report.method}", outlier_sections(report), _head(report, about))


def outlier_sections(
    report: OutlierReport, tokens: Mapping[str, str] = MappingProxyType({}), heads: str = ""
) -> list[Section]:
    """The worst tensors, the maps of layers and the maps of heads.

    Args:
        tokens: tensor → the token that its largest value is at, in words.
        heads: what is to be said about the heads, if anything.
    """
    told = " The last column names the token of the largest value." if tokens else ""
    return [
        Section(
            "Worst tensors",
            table(*worst_tensors(report, _KEPT, tokens)),
            f"The largest inf norms, and the channels with the most values beyond 6σ from their sample's mean.{told}",
        ),
        *_tensor_maps(report),
        *_head_maps(report, heads),
    ]


def worst_tensors(
    report: OutlierReport, k: int, tokens: Mapping[str, str] = MappingProxyType({})
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The worst tensors as text: columns and rows."""
    columns: tuple[str, ...] = ("tensor", "inf norm", "max |x|", "kurtosis", "per token", "beyond 6σ", "channels")
    rows = [
        (
            row["tensor"],
            number(row["inf_norm"]),
            number(row["max_abs"]),
            number(row["kurtosis"]),
            number(row["token_kurtosis"]),
            f"{row['outliers']} ({100 * row['share']:.2g}%)",
            ", ".join(map(str, row["channels"])),
            *([tokens.get(row["tensor"], "")] if tokens else []),
            *([str(row["non_finite"])] if report.non_finite else []),
        )
        for row in report.table(k)
    ]
    columns += (("token",) if tokens else ()) + (("not finite",) if report.non_finite else ())
    return columns, rows


def number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.0f}" if math.isfinite(value) and abs(value) >= 999.5 else f"{value:.3g}"


def _head(report: OutlierReport, about: str) -> str:
    facts = {
        "max inf norm": number(report.max_inf_norm),
        "largest |x|": number(report.max_abs),
        "avg kurtosis": number(report.avg_kurtosis),
        "avg kurtosis per token": number(report.avg_token_kurtosis),
        "no-op mass 1 − γ": number(report.no_op),
        "samples": str(report.samples),
    }
    boxes = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    warning = ""
    if report.non_finite:
        named = ", ".join(f"{name} ({count})" for name, count in report.non_finite.items())
        warning = f'<p class="warning">Tensors with values that are not finite: {escape(named)}</p>'
    return f'<p>{escape(about)}</p>{warning}<dl class="facts">{boxes}</dl>'


def _tensor_maps(report: OutlierReport) -> list[Section]:
    """Inf norm and kurtosis by component and layer, for every stack of layers."""
    stacks: dict[str, list[TensorStats]] = {}
    for tensor in report.tensors:
        stack, layer, _ = tensor.place
        if layer is not None:
            stacks.setdefault(stack, []).append(tensor)
    sections = []
    for title, field, remark in (
        ("Inf norm", "inf_norm", "max |x| of a sample, averaged over samples. Colours are logarithmic."),
        (
            "Kurtosis",
            "kurtosis",
            "Of a sample over all its tokens and features, averaged; a Gaussian has 3. Colours are logarithmic.",
        ),
    ):
        for stack, tensors in stacks.items():
            layers = sorted({layer for t in tensors if (layer := t.place[1]) is not None})
            components = list(dict.fromkeys(t.place[2] for t in tensors))
            found = {(t.place[2], t.place[1]): getattr(t, field) for t in tensors}
            body = heat_map(
                [f"layer {layer}" for layer in layers],
                [c or "(layer's output)" for c in components],
                [[found.get((c, layer)) for c in components] for layer in layers],
                logarithmic=True,
                write=number,
            )
            sections.append(Section(f"{title}: {stack or 'layers'}", body, remark))
    return sections


def _head_maps(report: OutlierReport, said: str) -> list[Section]:
    if not report.attention:
        return []
    maps = (
        (
            "Attention on the first token",
            "first_token",
            f"The mean over queries. A head that puts its attention here does nothing. {said}".strip(),
        ),
        ("Attention on special tokens", "special_tokens", f"Ids {', '.join(map(str, report.special_ids))}."),
        ("No-op mass", "no_op", "1 − γ: attention to nothing, possible with softmax1 but not with softmax."),
        ("Largest probability", "max_probability", "The largest of each query, averaged over queries."),
    )
    return [
        Section(title, _head_map(report.attention, field), remark)
        for title, field, remark in maps
        if _says_something(report.attention, field)
    ]


def _says_something(attention: tuple[HeadStats, ...], field: str) -> bool:
    """Whether it was measured, and is not nothing everywhere: softmax has no no-op mass, a text no special tokens."""
    values = [getattr(h, field) for h in attention]
    return None not in values and any(value >= _SEEN for heads in values for value in heads)


def _head_map(attention: tuple[HeadStats, ...], field: str) -> str:
    values = [list(getattr(h, field)) for h in attention]
    heads = max(map(len, values))
    return heat_map(
        short_names([h.name for h in attention]),
        [str(i) for i in range(heads)],
        [row + [None] * (heads - len(row)) for row in values],
        low=0.0,
        high=1.0,
        corner="head",
        write="{:.2f}".format,
    )


def short_names(names: list[str]) -> list[str]:
    """Names without the parts that they all start or end with."""
    split = [name.split(".") for name in names]
    while len(split) > 1 and all(len(s) > 1 and s[0] == split[0][0] for s in split):
        split = [s[1:] for s in split]
    while len(split) > 1 and all(len(s) > 1 and s[-1] == split[0][-1] for s in split):
        split = [s[:-1] for s in split]
    return [f"layer {s[0]}" if len(s) == 1 and s[0].isdigit() else ".".join(s) for s in split]
