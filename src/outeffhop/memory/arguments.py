"""Checks of a memory's arguments; every error names the argument, its value and the remedy."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outeffhop.methods import Method

__all__ = ["check_beta", "check_method", "check_patterns", "check_queries", "check_values"]


def check_patterns(patterns: Tensor, name: str = "patterns", *, may_be_empty: bool = False) -> Tensor:
    """[M, d], floating point and finite; detached, since nothing is learned here."""
    if not isinstance(patterns, Tensor):
        raise TypeError(f"{name} is a {type(patterns).__name__}: expected a tensor [M, d], one pattern per row")
    if not patterns.is_floating_point():
        raise TypeError(f"{name} has dtype {patterns.dtype}: expected floating point; {name}.float() converts it")
    if patterns.dim() != 2 or patterns.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(patterns.shape)}: expected [M, d], one pattern per row")
    if patterns.shape[0] == 0 and not may_be_empty:
        raise ValueError(f"{name} has shape {tuple(patterns.shape)}: a memory needs at least one pattern")
    _check_finite(patterns, name)
    return patterns.detach()


def check_values(values: Tensor | None, patterns: Tensor) -> Tensor | None:
    """[M, d_v], one row for each pattern, of their dtype and device, and finite; detached."""
    if values is None:
        return None
    size = len(patterns)
    if not isinstance(values, Tensor):
        raise TypeError(f"values is a {type(values).__name__}: expected a tensor [{size}, d_v], one row per pattern")
    if values.dim() != 2 or values.shape[0] != size or values.shape[1] == 0:
        raise ValueError(f"values has shape {tuple(values.shape)}: expected [{size}, d_v], one row per pattern")
    if values.dtype != patterns.dtype:
        raise TypeError(f"values has dtype {values.dtype} and patterns {patterns.dtype}: convert one with .to()")
    if values.device != patterns.device:
        raise ValueError(f"values is on {values.device} and patterns on {patterns.device}: move one with .to()")
    _check_finite(values, "values")
    return values.detach()


def check_queries(x: Tensor, patterns: Tensor, name: str = "x") -> Tensor:
    """[..., d] of the memory's size, dtype and device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a tensor [..., {patterns.shape[1]}]")
    if x.dim() == 0 or x.shape[-1] != patterns.shape[1]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and the patterns have size {patterns.shape[1]}: "
            f"expected [..., {patterns.shape[1]}]"
        )
    if x.dtype != patterns.dtype:
        raise TypeError(f"{name} has dtype {x.dtype} and the memory {patterns.dtype}: convert one with .to()")
    if x.device != patterns.device:
        raise ValueError(f"{name} is on {x.device} and the memory on {patterns.device}: move one with .to()")
    return x


def _check_finite(rows: Tensor, name: str) -> None:
    finite = torch.isfinite(rows).all(1)
    if not finite.all():
        first = int((~finite).nonzero()[0])
        raise ValueError(
            f"{name}: {int((~finite).sum())} of {len(rows)} rows hold NaN or infinity, the first is row {first}; "
            "remove or repair them"
        )


def check_beta(beta: float) -> float:
    beta = float(beta)
    if not 0.0 < beta < math.inf:
        raise ValueError(f"beta={beta}: the inverse temperature must be finite and greater than 0")
    return beta


def check_method(method: str | Method) -> Method:
    parsed = Method.parse(method)
    if parsed.gate is not None:
        raise ValueError(
            f"method={str(parsed)!r} has a gate, which is learned from a layer's input, and a memory learns nothing: "
            "use a method without a gate, such as 'vanilla' or 'outeffhop'"
        )
    if parsed.qk_norm != "none":
        raise ValueError(
            f"method={str(parsed)!r} normalizes queries and keys by learned factors, and a memory learns nothing: "
            "leave qk_norm out"
        )
    return parsed
