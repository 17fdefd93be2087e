"""Any transformers model with any method. Importing this package makes the methods known to transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader
import transformers.modeling_utils  # noqa: F401  # first: it triggers the registration, which imports what follows

from outeffhop.models.registration import register

if TYPE_CHECKING:
    from outeffhop.models import presets
    from outeffhop.models.checkpoint import load_checkpoint
    from outeffhop.models.conversion import convert, from_config
    from outeffhop.models.sink_schedule import SinkSchedule
    from outeffhop.models.summary import model_summary

__all__ = [
    "convert",
    "from_config",
    "load_checkpoint",
    "SinkSchedule",
    "model_summary",
    "presets",
    "register",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    ["presets"],
    {
        "checkpoint": ["load_checkpoint"],
        "conversion": ["convert", "from_config"],
        "sink_schedule": ["SinkSchedule"],
        "summary": ["model_summary"],
    },
)
