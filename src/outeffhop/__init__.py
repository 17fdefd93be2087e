"""Transformers free of activation outliers: the Outlier-Efficient Modern Hopfield Model."""

from outeffhop.attention import attention, explain
from outeffhop.functional import clipped_softmax, entmax, logsumexp_n, softmax1, softmax_n, sparsemax

__version__ = "0.1.0"

__all__ = [
    "attention",
    "clipped_softmax",
    "entmax",
    "explain",
    "logsumexp_n",
    "softmax1",
    "softmax_n",
    "sparsemax",
]
