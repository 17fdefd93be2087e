"""Any transformers model with any method. Importing this package makes the methods known to transformers."""

from outeffhop.models import presets
from outeffhop.models.conversion import convert, from_config
from outeffhop.models.interface import register
from outeffhop.models.persistence import persist
from outeffhop.models.sink_schedule import SinkSchedule
from outeffhop.models.summary import ModelSummary, model_summary

__all__ = ["convert", "from_config", "SinkSchedule", "model_summary", "ModelSummary", "presets", "register"]

register()
persist()
