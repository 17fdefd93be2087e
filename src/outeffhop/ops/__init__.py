"""Attention whose softmax can attend to nothing: one call, many kernels.

README.md in this folder derives why the fused forward and backward are exact.
"""

from outeffhop.ops.dispatch import BACKENDS, Explanation, attention, explain
from outeffhop.ops.eager import eager_attention
from outeffhop.ops.probe import probing, watching

__all__ = ["attention", "explain", "Explanation", "eager_attention", "probing", "watching", "BACKENDS"]
