"""PyTorch's CPU flash kernel over windows and packed batches: block by block, each with only the keys it sees.

Memory is linear in the number of queries and keys. A key's gradient is the sum over the blocks that see it, taken in
float32 at least. Tensors are [B, H, L, D]; a packed batch is one sample whose sequences lie one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outeffhop.functional import compute_dtype
from outeffhop.ops.window import Packed, visible

__all__ = ["forward", "backward"]

aten = torch.ops.aten
_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 512


class _Block(NamedTuple):
    queries: slice
    keys: slice
    is_causal: bool  # by the kernel itself
    mask: Tensor | None  # [1, 1, queries, keys], additive


_library = torch.library.Library("outeffhop", "DEF")
_BAND = "bool is_causal, float scale, int[]? window, Tensor? cu_q, Tensor? cu_k, SymInt max_q, SymInt max_k"
_QKV = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_library.define(f"windows({_QKV}, {_BAND}) -> (Tensor out, Tensor lse)")
_library.define(
    f"windows_backward(Tensor grad_out, {_QKV}, Tensor out, Tensor lse, {_BAND}) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float,
    window: tuple[int, int] | None,
    packed: Packed | None,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, Dv] and the logsumexp [B, H, Lq] of softmax; 0 and −inf for a query without keys.

    An op, since the blocks of a packed batch depend on numbers that a trace does not have.
    """
    rest = packed or (None, None, 0, 0)
    return torch.ops.outeffhop.windows.default(q, k, v, bias, is_causal, scale, window, *rest)  # type: ignore[no-any-return]


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    window: tuple[int, int] | None,
    packed: Packed | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rest = packed or (None, None, 0, 0)
    op = torch.ops.outeffhop.windows_backward.default
    return op(grad, q, k, v, bias, out, lse, is_causal, scale, window, *rest)  # type: ignore[no-any-return]


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *band: Any) -> tuple[Tensor, Tensor]:
    out, lse = _empty(q)
    is_causal, scale, window, packed = _read(*band)
    for block in _blocks(q, k, bias, is_causal, window, packed):
        part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, block.queries],
            k[:, :, block.keys],
            v[:, :, block.keys],
            0.0,
            block.is_causal,
            attn_mask=block.mask,
            scale=scale,
        )
        out[:, :, block.queries] = part
        lse[:, :, block.queries] = part_lse
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, *band: Any
) -> tuple[Tensor, Tensor, Tensor]:
    is_causal, scale, window, packed = _read(*band)
    grad_q, grad_k, grad_v = _zeros(q, q.dtype), _zeros(k, compute_dtype(k.dtype)), _zeros(v, compute_dtype(v.dtype))
    for block in _blocks(q, k, bias, is_causal, window, packed):
        part_q, part_k, part_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, :, block.queries],
            q[:, :, block.queries],
            k[:, :, block.keys],
            v[:, :, block.keys],
            out[:, :, block.queries],
            lse[:, :, block.queries],
            0.0,
            block.is_causal,
            attn_mask=block.mask,
            scale=scale,
        )
        grad_q[:, :, block.queries] = part_q
        grad_k[:, :, block.keys] += part_k
        grad_v[:, :, block.keys] += part_v
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _traced_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty(q)


def _traced_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _zeros(q, q.dtype), _zeros(k, k.dtype), _zeros(v, v.dtype)


_library.impl("windows", _forward, "CPU")
_library.impl("windows_backward", _backward, "CPU")
torch.library.register_fake("outeffhop::windows", _traced_forward, lib=_library)
torch.library.register_fake("outeffhop::windows_backward", _traced_backward, lib=_library)


def _read(
    is_causal: bool,
    scale: float,
    window: list[int] | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
) -> tuple[bool, float, tuple[int, int] | None, Packed | None]:
    band = None if window is None else (window[0], window[1])
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    return is_causal, scale, band, packed


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the logsumexp of queries without keys."""
    batch, heads, length, _ = q.shape
    lse = q.new_full((batch, length, heads), -math.inf, dtype=compute_dtype(q.dtype)).transpose(1, 2)
    return torch.zeros_like(q), lse


def _zeros(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros of t's shape, laid out as [B, L, H, D]."""
    heads_last = t.transpose(1, 2)
    return torch.zeros_like(heads_last, dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)


def _blocks(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    window: tuple[int, int] | None,
    packed: Packed | None,
) -> Iterator[_Block]:
    if packed is None:
        own = is_causal and window is None
        yield from _blocks_of(0, q.shape[2], 0, k.shape[2], own, window, 0, q.dtype, bias)
        return
    for first_q, end_q, first_k, end_k in packed.bounds():
        offset = (end_k - first_k) - (end_q - first_q)
        # with as many queries as keys, the kernel's own causal mask serves
        own = window is None and is_causal and offset == 0
        band = (-1, 0) if window is None and is_causal and not own else window
        yield from _blocks_of(first_q, end_q, first_k, end_k, own, band, offset, q.dtype, None)


def _blocks_of(
    first_q: int,
    end_q: int,
    first_k: int,
    end_k: int,
    is_causal: bool,
    window: tuple[int, int] | None,
    offset: int,
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Iterator[_Block]:
    """The blocks of one sequence; those without keys are left out."""
    queries, keys = end_q - first_q, end_k - first_k
    if window is None:
        if queries and keys:
            yield _Block(slice(first_q, end_q), slice(first_k, end_k), is_causal, bias)
        return
    left, right = window
    sides = [side for side in window if side >= 0]
    size = min(max(sum(sides) // 2, _SMALLEST_BLOCK), _LARGEST_BLOCK)
    masks: dict[Any, Tensor | None] = {}  # almost all blocks of a sequence have the same
    for start in range(0, queries, size):
        end = min(start + size, queries)
        low = max(0, start + offset - left) if left >= 0 else 0
        high = min(keys, end + offset + right) if right >= 0 else keys
        if low >= high:
            continue
        shape = end - start, high - low, start + offset - low
        if shape not in masks:
            masks[shape] = _additive(*shape, window, dtype)
        mask = masks[shape]
        if bias is not None:
            rows = slice(None) if bias.shape[2] == 1 else slice(start, end)
            part = bias[:, :, rows, low:high]
            mask = part if mask is None else part + mask
        yield _Block(slice(first_q + start, first_q + end), slice(first_k + low, first_k + high), False, mask)


def _additive(queries: int, keys: int, offset: int, window: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
    seen = visible(queries, keys, False, window, None, torch.device("cpu"), offset)
    if seen is None or bool(seen.all()):
        return None
    return torch.zeros(1, 1, queries, keys, dtype=dtype).masked_fill_(~seen, -math.inf)
