"""``outeffhop presets``: the models and sizes there are, and the paper's sizes beside ours."""

from __future__ import annotations

from typing import Any

from outeffhop.cli.console import print_json, print_table
from outeffhop.models import presets

__all__ = ["describe", "show"]

_GATED = "gated-outeffhop"
_PAPER_METHODS = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")


def describe() -> list[dict[str, Any]]:
    """Every preset as plain values; at size "paper" with the paper's millions of parameters."""
    rows = []
    for model, preset in presets.MODELS.items():
        for size in presets.SIZES:
            row: dict[str, Any] = {
                "model": model,
                "size": size,
                "config": preset.sizes[size],
                "parameters": presets.count(model, size),
                "parameters_gated": presets.count(model, size, presets.paper_method(model, _GATED)),
            }
            if size == "paper":
                row["paper_millions"], row["paper_millions_gated"] = preset.paper_parameters
                row["difference"] = preset.difference
                row["paper_methods"] = [str(presets.paper_method(model, name)) for name in _PAPER_METHODS]
            rows.append(row)
    return rows


def show(as_json: bool) -> None:
    rows = describe()
    if as_json:
        print_json(rows)
        return
    table = [
        (
            row["model"],
            row["size"],
            _millions(row["parameters"]),
            _millions(row["parameters_gated"]),
            "{paper_millions}M / {paper_millions_gated}M".format(**row) if "paper_millions" in row else "",
        )
        for row in rows
    ]
    print_table("Presets, as in --model opt --preset tiny", ("model", "size", "parameters", "gated", "paper"), table)
    print_table(
        "Methods with the paper's parameters, where it does not use the defaults",
        ("model", "methods"),
        [(r["model"], ", ".join(m for m in r["paper_methods"] if "(" in m)) for r in rows if "paper_methods" in r],
    )
    print_table(
        "Where ours differ from the paper",
        ("model", "why"),
        [(r["model"], r["difference"]) for r in rows if "difference" in r],
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}M"
