"""Any transformers model with any method. Importing this package makes the methods known to transformers."""

import transformers.modeling_utils  # noqa: F401  # first: it triggers the registration, which imports what follows

from outeffhop.models import presets
from outeffhop.models.conversion import convert, from_config
from outeffhop.models.interface import register
from outeffhop.models.sink_schedule import SinkSchedule
from outeffhop.models.summary import ModelSummary, model_summary

__all__ = ["convert", "from_config", "SinkSchedule", "model_summary", "ModelSummary", "presets", "register"]
