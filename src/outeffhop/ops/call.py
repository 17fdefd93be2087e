"""The arguments of ``attention``, checked once and in one form for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outeffhop.functional import compute_dtype
from outeffhop.ops.torch_state import is_concrete, is_transformed
from outeffhop.ops.window import Packed, check_window, rows_without_keys, visible

__all__ = ["Call", "check_sink", "prepare"]

# The kernels compute in float32, where a smaller scale is 0.
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # no kernel multiplies 8-bit floats


@dataclass(slots=True)
class Call:
    """One attention call. Every backend can rely on these shapes."""

    query: Tensor  # [..., H, Lq, D]
    key: Tensor  # [..., G, Lk, D], H a multiple of G
    value: Tensor  # [..., G, Lk, Dv]
    # bool (True: attend) or additive, as wide as query or as the scores; broadcasts to [..., H, Lq, Lk]
    mask: Tensor | None
    dropout_p: float
    is_causal: bool  # top-left aligned, as in PyTorch; applied in addition to the mask
    scale: float
    sink: float | Tensor  # log n; a tensor is [H]
    return_lse: bool
    needs_grad: bool  # whether autograd records this call
    window: tuple[int, int] | None = None  # keys before and after the query's own position; −1: unlimited
    packed: Packed | None = None  # then B is 1 and the sequences lie one behind the other along L
    softcap: float | None = None  # for the eager backend; others get it in the mask

    @property
    def grouped(self) -> bool:
        return bool(self.query.shape[-3] != self.key.shape[-3])

    @property
    def empty(self) -> bool:
        return self.query.numel() == 0 or self.key.numel() == 0 or self.value.numel() == 0

    def rows_without_keys(self) -> Tensor | None:
        """Queries whose keys are all masked, broadcasting to [..., H, Lq]; None if there cannot be any."""
        if self.mask is None:
            if not self.banded:  # a causal query sees key 0
                return None
            return rows_without_keys(*self._positions())
        absent = ~self.mask if self.mask.dtype == torch.bool else torch.isneginf(self.mask)
        seen = self.visible()
        return (absent if seen is None else absent | ~seen).all(-1)

    @property
    def banded(self) -> bool:
        """Whether more than the causal mask limits the keys of a query by its position."""
        return self.window is not None or self.packed is not None

    def visible(self) -> Tensor | None:
        """True where position lets a query see a key, [Lq, Lk]: causal mask, window, sequences; None: everywhere."""
        return visible(*self._positions())

    def with_positions_as_mask(self) -> Call:
        """The same with window and packed sequences written into the mask, for those that read only masks."""
        seen = self.visible()
        if not self.banded or seen is None:
            return self
        mask = seen
        if self.mask is not None:
            mask = self.mask & seen if self.mask.dtype == torch.bool else self.mask.masked_fill(~seen, -math.inf)
        return replace(self, mask=mask, is_causal=False, window=None, packed=None)

    def _positions(self) -> tuple[int, int, bool, tuple[int, int] | None, Packed | None, torch.device]:
        lengths = self.query.shape[-2], self.key.shape[-2]
        return *lengths, self.is_causal, self.window, self.packed, self.query.device

    def with_mask_as_query(self) -> Call:
        """The same with the additive mask rounded to the query's dtype, for kernels that need it so."""
        if self.mask is None or self.mask.dtype in (torch.bool, self.query.dtype):
            return self
        return replace(self, mask=self.mask.to(self.query.dtype))

    @property
    def transformed(self) -> bool:
        """Whether torch.func or forward-mode differentiation is active, which flash kernels do not support."""
        return is_transformed()


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    sink: float | Tensor,
    return_lse: bool,
    window: Any = None,
    packed: Packed | None = None,
) -> Call:
    for name, t in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(t, Tensor) and (t is not None or name != "attn_mask"):
            raise TypeError(f"{name} is a {type(t).__name__}: expected a tensor")
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    _check_tensors(query, key, value)
    if query.dim() < 4:  # [L, D] and [H, L, D] are views of [1, H, L, D]
        query, key, value = (t.reshape((1,) * (4 - t.dim()) + tuple(t.shape)) for t in (query, key, value))
    _check_shapes(query, key, value, enable_gqa)
    if attn_mask is not None:
        attn_mask = _check_mask(attn_mask, query, key)
    dropout_p = _number("dropout_p", dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: must be a probability in [0, 1)")
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[-1]) if query.shape[-1] else 1.0
    elif isinstance(scale, Tensor):  # converted to a number, it would get no gradient
        raise TypeError("scale is a tensor: expected a number; multiply the query by a learned one, with scale=1.0")
    else:
        scale = _number("scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale}: must be a finite number")
    if scale < _SMALLEST:  # kernels mask before they scale, and −inf times 0 or a negative number is NaN or +inf
        query, scale = query * scale, 1.0
    band, is_causal = check_window(window, bool(is_causal))
    sink = check_sink(sink, query)
    leaves = query, key, value, sink
    grad = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in leaves)
    return Call(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=float(scale),
        sink=sink,
        return_lse=return_lse,
        needs_grad=grad,
        window=band,
        packed=packed,
    )


def _autocast(query: Tensor, *others: Any) -> tuple[Any, ...]:
    """Casts the inputs under autocast, as for scaled_dot_product_attention."""
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return query, *others
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
        for t in (query, *others)
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {t.dtype}: expected a floating point tensor of at least 16 bits")
        if t.is_nested or t.layout != torch.strided:
            raise TypeError(f"{name} is nested or of layout {t.layout}: expected a dense tensor")
        if t.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {t.dtype} and query {query.dtype}: convert them to one dtype")
        if t.device != query.device:
            raise ValueError(f"{name} is on {t.device} and query on {query.device}: move them to one device")
        if t.dim() < 2 or t.dim() != query.dim():
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and query {tuple(query.shape)}: "
                "they must have the same number of dimensions, [..., heads, length, size]"
            )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}: "
            "they may differ only in the last dimension"
        )
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query has size {query.shape[-1]} per head and key {key.shape[-1]}: they must be equal")
    if query.shape[:-3] != key.shape[:-3]:
        raise ValueError(
            f"query has batch shape {tuple(query.shape[:-3])} and key {tuple(key.shape[:-3])}: "
            "they must be equal; expand() the smaller one"
        )
    heads, groups = query.shape[-3], key.shape[-3]
    if heads != groups and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key {groups}: they must be equal, unless enable_gqa=True "
            "lets several query heads share a key head"
        )
    if enable_gqa and (groups == 0 or heads % groups):
        raise ValueError(f"query has {heads} heads and key {groups}: the first must be a multiple of the second")


def _check_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {mask.dtype}: expected bool (True: attend) or floating point (added)")
    if mask.device != query.device:
        raise ValueError(f"attn_mask is on {mask.device} and query on {query.device}: move them to one device")
    target = (*query.shape[:-1], key.shape[-2])
    # right-aligned, each size 1 or the target's
    sizes = zip(reversed(mask.shape), reversed(target), strict=False)
    if mask.dim() > len(target) or any(m != 1 and m != t for m, t in sizes):
        raise ValueError(f"attn_mask has shape {tuple(mask.shape)}: it must broadcast to {target}")
    return mask if mask.dtype in (torch.bool, query.dtype) else mask.to(compute_dtype(query.dtype))


def check_sink(sink: float | Tensor, query: Tensor) -> float | Tensor:
    heads = query.shape[-3]
    largest = _LARGEST[compute_dtype(query.dtype)]
    if not isinstance(sink, Tensor):
        sink = _number("sink", sink)
        if not sink <= largest:  # NaN as well
            raise ValueError(f"sink={sink}: log n must be at most {largest:.2g}; -inf is softmax, 0.0 is softmax1")
        return sink if sink >= -largest else -math.inf
    if not sink.is_floating_point():
        raise TypeError(f"sink has dtype {sink.dtype}: expected a floating point tensor")
    if sink.dim() > 1 or (sink.dim() == 1 and sink.shape[0] != heads):
        raise ValueError(f"sink has shape {tuple(sink.shape)}: expected a number or shape ({heads},), one per head")
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device} and query on {query.device}: move them to one device")
    # On a GPU reading the values would wait for the device, and a trace has none. A NaN there shows as NaN outputs.
    readable = sink.device.type == "cpu" and not torch.compiler.is_compiling() and is_concrete(sink)
    if readable and heads > 0 and not sink.detach().max().item() <= largest:  # the maximum with a NaN is NaN
        raise ValueError(
            f"sink holds NaN or more than {largest:.2g}: log n must be a number; -inf is softmax, 0.0 is softmax1"
        )
    return sink if sink.dim() else sink.expand(heads)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}: expected a number") from None
