"""Transformers free of activation outliers: the Outlier-Efficient Modern Hopfield Model."""

from outeffhop.attention import attention, explain
from outeffhop.functional import clipped_softmax, entmax, logsumexp_n, softmax1, softmax_n, sparsemax
from outeffhop.memory import HopfieldMemory, NoOp
from outeffhop.methods import Method, methods
from outeffhop.nn import OutEffHop, OutEffHopLayer, OutEffHopPooling

__version__ = "0.1.0"

__all__ = [
    "attention",
    "explain",
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
