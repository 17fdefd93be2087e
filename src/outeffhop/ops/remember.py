"""Kinds of calls: what the checks of a call and the choice of its backend depend on, so that both are done once.

A small attention takes tens of microseconds on a GPU, and looking at every argument would take as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from outeffhop.ops.call import SMALLEST_SCALE, Call, largest_sink
from outeffhop.ops.probe import is_seen
from outeffhop.ops.torch_state import is_plain, is_transformed

__all__ = ["Remembered", "kind_of"]

Attend = Callable[[Call], tuple[Tensor, Tensor | None]]


class Remembered:
    """The backends of kinds of calls that were checked before."""

    def __init__(self, most: int = 4096) -> None:
        self._backends: dict[Hashable, Attend] = {}
        self._most = most

    def get(self, kind: Hashable) -> Attend | None:
        return self._backends.get(kind)

    def put(self, kind: Hashable, attend: Attend) -> None:
        if len(self._backends) >= self._most:  # sizes that change all the time
            self._backends.clear()
        self._backends[kind] = attend

    def clear(self) -> None:
        self._backends.clear()


def kind_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    sink: float | Tensor,
    return_lse: bool,
    backend: str,
) -> Hashable | None:
    """Calls of one kind pass the same checks and have the same backend; None: a call that is checked every time.

    Of the lengths and the batch size it holds only how they relate, so that a growing cache is of one kind.
    """
    if not is_plain(query, key, value) or is_transformed() or is_seen():
        return None
    if not (_dense(query) and _dense(key) and _dense(value)):
        return None
    dtype, device = query.dtype, query.device
    batch, heads, queries, size = query.shape
    key_batch, groups, keys, key_size = key.shape
    value_batch, value_groups, value_keys, value_size = value.shape
    if not (
        batch == key_batch == value_batch
        and groups == value_groups
        and keys == value_keys
        and size == key_size
        and dtype == key.dtype == value.dtype
        and device == key.device == value.device
        and batch * heads * queries * size * groups * keys * value_size
        and is_causal.__class__ is bool
        and dropout_p.__class__ is float
        and (scale is None or (scale.__class__ is float and SMALLEST_SCALE <= scale < math.inf))
    ):
        return None
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
        return None
    grad = query.requires_grad or key.requires_grad or value.requires_grad
    of_sink: Hashable
    if isinstance(sink, Tensor):
        if sink.__class__ is not Tensor and sink.__class__ is not nn.Parameter:
            return None
        of_sink, grad = (sink.shape, sink.dtype, sink.device), grad or sink.requires_grad
    elif sink.__class__ is float and (sink == -math.inf or abs(sink) <= largest_sink(dtype)):
        of_sink = sink == -math.inf
    else:
        return None
    of_mask = None
    if mask is not None:
        if not is_plain(mask) or not _dense(mask) or mask.dtype not in (torch.bool, dtype):
            return None
        b, h, q, k = mask.shape
        if b not in (1, batch) or h not in (1, heads) or q not in (1, queries) or k not in (1, keys):
            return None
        of_mask = mask.dtype, mask.device, mask.requires_grad
    return (
        backend,
        dtype,
        device,
        heads,
        groups,
        size,
        value_size,
        queries == keys,
        queries == 1,
        keys == 1,
        of_mask,
        dropout_p,
        is_causal,
        enable_gqa,
        of_sink,
        return_lse,
        grad and torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _dense(t: Tensor) -> bool:
    """Whether it has four dimensions, and is neither nested nor sparse."""
    return not t.is_nested and t.layout is torch.strided and t.dim() == 4
