"""The entry of a config that names its method: ``config.outeffhop = {"format": 2, "method": "outeffhop(n=4)"}``.

``config.attn_implementation`` beside it holds the method's name. transformers reads that field of ``config.json`` when
it loads a model, and refuses the checkpoint if this package is not imported.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from outeffhop.methods import METHODS, Method
from outeffhop.models.hf_private import implementation

__all__ = ["KEY", "entry_of", "method_of", "is_annealing", "named_method", "write", "with_inner"]

KEY = "outeffhop"
# An entry without a format has the same fields.
FORMAT = 2


def method_of(config: PreTrainedConfig) -> Method | None:
    """The method a config names, by its entry or by its attention implementation; None if it names none of ours."""
    running = implementation(config)
    named = named_method(config)
    if running in METHODS and (named is None or named.name != running):
        return METHODS[running].method
    return named if running in METHODS or running is None else None


def named_method(config: PreTrainedConfig) -> Method | None:
    """The method that the entry names, whatever implementation runs."""
    entry = entry_of(config)
    return None if entry is None else Method.parse(entry["method"])


def is_annealing(config: PreTrainedConfig) -> bool:
    """Whether the entry says that a schedule moves sinks and gates, which then are among the weights."""
    return bool((entry_of(config) or {}).get("annealing", False))


def entry_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The entry, checked; None if there is none."""
    entry = getattr(config, KEY, None)
    if entry is None:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("method"), str):
        raise ValueError(f'config.{KEY}={entry!r}: must be {{"method": "name(parameter=value)"}}')
    if not isinstance(entry.get("format", FORMAT), int) or entry.get("format", FORMAT) > FORMAT:
        raise ValueError(
            f"config.{KEY}={entry!r}: format {entry['format']!r} is unknown to this version of outeffhop, which reads "
            f"up to {FORMAT}; load it with the version that wrote it"
        )
    return entry


def write(config: PreTrainedConfig, method: Method | None, annealing: bool = False) -> None:
    """Writes the entry of one config; None removes it."""
    if method is not None:
        entry = {"format": FORMAT, "method": str(method), **({"annealing": True} if annealing else {})}
        setattr(config, KEY, entry)
    elif hasattr(config, KEY):
        delattr(config, KEY)


def with_inner(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """A config and all configs inside it, such as those of CLIP's text and vision models."""
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(deep for each in inner if isinstance(each, PreTrainedConfig) for deep in with_inner(each))]
