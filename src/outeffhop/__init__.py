"""Transformers free of activation outliers: the Outlier-Efficient Modern Hopfield Model.

Importing this package makes the methods known to transformers as attention implementations.
"""

from outeffhop.functional import clipped_softmax, entmax, logsumexp_n, softmax1, softmax_n, sparsemax
from outeffhop.memory import HopfieldMemory, NoOp
from outeffhop.methods import Method, methods
from outeffhop.models import SinkSchedule, convert, from_config, model_summary
from outeffhop.nn import OutEffHop, OutEffHopLayer, OutEffHopPooling
from outeffhop.ops import attention, explain

__version__ = "0.1.0"

__all__ = [
    "attention",
    "explain",
    "convert",
    "from_config",
    "SinkSchedule",
    "model_summary",
    "HopfieldMemory",
    "NoOp",
    "OutEffHop",
    "OutEffHopPooling",
    "OutEffHopLayer",
    "Method",
    "methods",
    "softmax_n",
    "softmax1",
    "logsumexp_n",
    "clipped_softmax",
    "sparsemax",
    "entmax",
]
