"""Calls that were checked before: what another call with the same shapes, types and options need not check again.

A small attention takes tens of microseconds on a GPU, and looking at every argument would take as long.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor, nn

from outeffhop.ops.call import Call
from outeffhop.ops.probe import is_seen
from outeffhop.ops.torch_state import is_autocast_anywhere, is_transformed, is_watched

__all__ = ["Remembered", "key_of"]

_PLAIN = (Tensor, nn.Parameter)
Attend = Callable[[Call], tuple[Tensor, Tensor | None]]


class Remembered:
    """Backends and checked options by the key of a call."""

    def __init__(self, most: int = 1024) -> None:
        self._calls: dict[Hashable, tuple[Attend, Call]] = {}
        self._most = most

    def get(self, key: Hashable) -> tuple[Attend, Call] | None:
        try:
            return self._calls.get(key)
        except TypeError:  # some argument is a list: the checks say which
            return None

    def put(self, key: Hashable, attend: Attend, call: Call) -> None:
        """Remembers what the call was made of, without its tensors."""
        if len(self._calls) >= self._most:  # a cache that grows has another length at every step
            self._calls.clear()
        none: Tensor = None  # type: ignore[assignment]
        sink = 0.0 if isinstance(call.sink, Tensor) else call.sink
        self._calls[key] = attend, replace(call, query=none, key=none, value=none, mask=None, sink=sink)


def key_of(
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
    """All that the checks of a call and the choice of its backend depend on; None for calls to be checked every time.

    The values of a learned sink are not part of it.
    """
    plain = query.__class__ in _PLAIN and key.__class__ in _PLAIN and value.__class__ in _PLAIN
    if not plain or is_watched() or is_transformed() or is_seen():
        return None
    try:
        device = query.device
        return (
            _shapes(query, key, value, mask),
            query.dtype,
            key.dtype,
            value.dtype,
            device,
            key.device,
            value.device,
            query.layout,
            key.layout,
            value.layout,
            query.requires_grad,
            key.requires_grad,
            value.requires_grad,
            None if mask is None else (mask.__class__, mask.dtype, mask.device, mask.layout, mask.requires_grad),
            dropout_p,
            is_causal,
            scale,
            enable_gqa,
            (sink.__class__, sink.shape, sink.dtype, sink.device, sink.layout, sink.requires_grad)
            if isinstance(sink, Tensor)
            else sink,
            return_lse,
            backend,
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            is_autocast_anywhere() and torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        )
    except (AttributeError, RuntimeError):  # not a tensor, or a nested one, which has no shape
        return None


def _shapes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Hashable:
    """The shapes. Of a decoding step the number of keys is left out: it grows with each token, and nothing depends on
    it but whether it is 0, 1, or another one in the value or the mask."""
    asked, keys, values = query.shape, key.shape, value.shape
    masked = None if mask is None else mask.shape
    if len(asked) != 4 or asked[2] != 1 or not len(keys) == len(values) == 4 or not 1 < keys[2] == values[2]:
        return asked, keys, values, masked
    fits = bool(masked) and masked[-1] == keys[2]  # type: ignore[index]
    return asked, keys[:2], keys[3], values[:2], values[3], masked[:-1] if fits else masked, fits  # type: ignore[index]
