"""``outeffhop methods``, ``presets`` and ``data``: what there is to choose from."""

from __future__ import annotations

from typing import Any

from outeffhop.cli.console import print_json, print_table
from outeffhop.cli.options import Data, Methods, Presets

__all__ = ["data", "describe_method", "describe_presets", "methods", "presets", "sources"]

_GATED = "gated-outeffhop"
_PAPER_METHODS = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")


def methods(options: Methods) -> None:
    from outeffhop.methods import METHODS

    found = [describe_method(n) for n in ([options.name] if options.name is not None else METHODS)]
    if options.json:
        print_json(found if options.name is None else found[0])
    elif options.name is not None:
        print_table(found[0]["method"], ("", ""), [(k, str(v)) for k, v in found[0].items() if k != "method"])
    else:
        rows = [
            (m["name"], ", ".join(f"{k}={v}" for k, v in m["parameters"].items()), m["attention"], m["about"])
            for m in found
        ]
        print_table("Methods, as in --method 'outeffhop(n=4)'", ("name", "parameters", "attention", "what it is"), rows)


def describe_method(text: str) -> dict[str, Any]:
    """A method as plain values: how it is written, its parameters, and which attention serves it."""
    from outeffhop.methods import METHODS, Method

    method = Method.parse(text)
    entry = METHODS[method.name]
    fused = method.normalizer.sink is not None
    return {
        "method": str(method),
        "name": method.name,
        "about": entry.about,
        "parameters": entry.values(method),
        "choices": entry.choices,
        "normalizer": str(method.normalizer),
        "gate": None if method.gate is None else str(method.gate),
        "qk_norm": method.qk_norm,
        "attention": "fused" if fused else "eager",
    }


def presets(options: Presets) -> None:
    rows = describe_presets()
    if options.json:
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


def describe_presets() -> list[dict[str, Any]]:
    """Every preset as plain values; those of size "paper" with the paper's millions of parameters."""
    from outeffhop.models import presets

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


def _millions(count: int) -> str:
    return f"{count / 1e6:.3f}M"


def data(options: Data) -> None:
    from outeffhop.lab.data import describe

    if options.spec is None:
        _show_sources(sources(), options.json)
        return
    found = describe(options.spec, options.task)
    if options.json:
        print_json(found)
        return
    serves = f"; serves {', '.join(found['tasks'])}" if found["tasks"] else ""
    rows = [
        (split, ", ".join(f"{count:,} {what}" for what, count in sizes.items()))
        for split, sizes in found["splits"].items()
    ]
    for name in ("classes", "series"):
        if name in found:
            names = found[name]
            rows.append((name, f"{len(names)}: {', '.join(names[:12])}{' …' if len(names) > 12 else ''}"))
    print_table(f"{options.spec}: {found['kind']}{serves}", ("split", "holds"), rows)
    print_table("First samples of train", ("", ""), [(str(i), text) for i, text in enumerate(found["samples"])])


def sources() -> dict[str, Any]:
    """Every way to name data."""
    from outeffhop.lab.data.specs import BUILTIN, KINDS
    from outeffhop.metrics import TASKS

    return {
        "builtin": {f"builtin:{name}": about for name, about in BUILTIN.items()},
        "path": dict(KINDS),
        "hub": {"hub:NAME[/CONFIG]": "a dataset of the Hugging Face hub with text, labelled images, or dated numbers"},
        "tasks": {task: " or ".join(kinds) for task, (kinds, _) in TASKS.items()},
    }


def _show_sources(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    kinds = [(f"PATH ({kind})", about) for kind, about in found["path"].items()]
    rows = [*found["builtin"].items(), *kinds, *found["hub"].items()]
    print_table("Data, as in outeffhop data builtin:text", ("spec", "what it is"), rows)
    print_table("Tasks", ("task", "needs"), list(found["tasks"].items()))
