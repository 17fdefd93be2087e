"""Any transformers model with any method. Importing this package makes the methods known to transformers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from outeffhop.models.registration import register

if TYPE_CHECKING:
    from outeffhop.models import presets
    from outeffhop.models.conversion import convert, from_config
    from outeffhop.models.sink_schedule import SinkSchedule
    from outeffhop.models.summary import ModelSummary, model_summary

__all__ = ["convert", "from_config", "SinkSchedule", "model_summary", "ModelSummary", "presets", "register"]

_WHERE = {
    "convert": "conversion",
    "from_config": "conversion",
    "SinkSchedule": "sink_schedule",
    "model_summary": "summary",
    "ModelSummary": "summary",
}

register()


def __getattr__(name: str) -> Any:
    """Names are loaded when they are first used."""
    if name == "presets":
        return import_module("outeffhop.models.presets")
    if name in _WHERE:
        return getattr(import_module(f"outeffhop.models.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
