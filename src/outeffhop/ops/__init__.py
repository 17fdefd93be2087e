"""Attention whose softmax can attend to nothing: one call, many kernels.

README.md in this folder derives why the fused forward and backward are exact.
"""

from outeffhop.ops.dispatch import Explanation, attention, attention_varlen, explain

__all__ = ["attention", "attention_varlen", "explain", "Explanation"]
