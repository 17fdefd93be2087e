"""``outeffhop data``: what data there is, and what a spec would give."""

from __future__ import annotations

from typing import Any

from outeffhop.cli.console import print_json, print_table
from outeffhop.lab.data import describe
from outeffhop.lab.data.specs import BUILTIN, KINDS
from outeffhop.metrics import TASKS

__all__ = ["show", "sources"]


def sources() -> dict[str, Any]:
    """What can be named as data, without naming any."""
    return {
        "builtin": {f"builtin:{name}": about for name, about in BUILTIN.items()},
        "path": dict(KINDS),
        "hub": {"hub:NAME[/CONFIG]": "a dataset of the Hugging Face hub with text, labelled images, or dated numbers"},
        "tasks": {task: kind for task, (kind, _) in TASKS.items()},
    }


def show(spec: str | None, task: str | None, as_json: bool) -> None:
    if spec is None:
        _show_sources(sources(), as_json)
        return
    found = describe(spec, task)
    if as_json:
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
    print_table(f"{spec}: {found['kind']}{serves}", ("split", "holds"), rows)
    print_table("First samples of train", ("", ""), [(str(i), text) for i, text in enumerate(found["samples"])])


def _show_sources(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    kinds = [(f"PATH ({kind})", about) for kind, about in found["path"].items()]
    rows = [*found["builtin"].items(), *kinds, *found["hub"].items()]
    print_table("Data, as in outeffhop data builtin:text", ("spec", "what it is"), rows)
    print_table("Tasks", ("task", "needs"), list(found["tasks"].items()))
