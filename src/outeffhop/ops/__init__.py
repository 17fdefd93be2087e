"""Attention whose softmax can attend to nothing: one call, many kernels.

README.md in this folder derives why the fused forward and backward are exact.
"""

from outeffhop.ops.dispatch import Explanation, attention, explain

__all__ = ["attention", "explain", "Explanation"]
