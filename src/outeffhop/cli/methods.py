"""``outeffhop methods``: what there is to choose from."""

from __future__ import annotations

from typing import Any

from outeffhop.cli.console import print_json, print_table
from outeffhop.methods import METHODS, Method

__all__ = ["describe", "show"]


def describe(text: str) -> dict[str, Any]:
    """A method as plain values: how it is written, what its parameters are, what serves it."""
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


def show(name: str | None, as_json: bool) -> None:
    found = [describe(n) for n in ([name] if name is not None else METHODS)]
    if as_json:
        print_json(found if name is None else found[0])
    elif name is not None:
        print_table(found[0]["method"], ("", ""), [(k, str(v)) for k, v in found[0].items() if k != "method"])
    else:
        rows = [
            (m["name"], ", ".join(f"{k}={v}" for k, v in m["parameters"].items()), m["attention"], m["about"])
            for m in found
        ]
        print_table("Methods, as in --method 'outeffhop(n=4)'", ("name", "parameters", "attention", "what it is"), rows)
