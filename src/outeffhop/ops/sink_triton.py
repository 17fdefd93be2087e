"""The sink's two elementwise passes, each as one Triton kernel; without Triton, sink.py does them in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outeffhop.ops.torch_state import is_plain

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

__all__ = ["serves", "apply_sink", "row_dot"]


def serves(out: Tensor) -> bool:
    return triton is not None and out.is_cuda and out.dtype != torch.float64 and is_plain(out)


def apply_sink(out: Tensor, lse: Tensor, sink: float | Tensor) -> tuple[Tensor, Tensor]:
    """Like sink.apply_sink, in place: one read and one write of each tensor."""
    learned = isinstance(sink, Tensor)
    grid, blocks = _grid(out, lse.shape[2])
    _apply_sink_kernel[grid](
        out,
        lse,
        sink.contiguous()
        if isinstance(sink, Tensor)
        else lse,  # a constant sink still needs a pointer, which is not read
        0.0 if learned else sink,
        *out.stride()[:3],
        *lse.stride()[:3],
        out.shape[1],
        out.shape[2],
        lse.shape[2],
        out.shape[3],
        LEARNED=learned,
        **blocks,
    )
    return out, lse


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """rowsum(a ∘ b) in float32 without a float32 copy of either.  [B, H, L]"""
    result = torch.empty(a.shape[:3], dtype=torch.float32, device=a.device)
    grid, blocks = _grid(a, a.shape[2])
    _row_dot_kernel[grid](a, b, result, *a.stride(), *b.stride(), a.shape[1], a.shape[2], a.shape[3], **blocks)
    return result


def _grid(t: Tensor, length: int) -> tuple[tuple[int], dict[str, Any]]:
    """One program for 2048 elements in whole rows: slightly the fastest size on an H200."""
    width = 1 << (t.shape[3] - 1).bit_length()
    rows = max(1, 2048 // width)
    return (-(-length // rows) * t.shape[0] * t.shape[1],), {"ROWS": rows, "WIDTH": width}


if triton is not None:

    @triton.jit
    def _rows(heads, length, ROWS: tl.constexpr):
        """The batch, the head and the rows of this program, in 64 bits: offsets may exceed 2³¹."""
        blocks = tl.cdiv(length, ROWS)
        block = tl.program_id(0) % blocks
        sample = tl.program_id(0) // blocks
        return (
            (sample // heads).to(tl.int64),
            (sample % heads).to(tl.int64),
            block.to(tl.int64) * ROWS + tl.arange(0, ROWS),
        )

    @triton.jit
    def _apply_sink_kernel(
        out_ptr,
        lse_ptr,
        sink_ptr,
        sink_value,
        out_b,
        out_h,
        out_l,
        lse_b,
        lse_h,
        lse_l,
        heads,
        length,
        padded_length,
        size,
        LEARNED: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        batch, head, row = _rows(heads, padded_length, ROWS)
        column = tl.arange(0, WIDTH)
        sink = tl.load(sink_ptr + head).to(tl.float32) if LEARNED else sink_value
        lse_at = lse_ptr + batch * lse_b + head * lse_h + row * lse_l
        lse = tl.load(lse_at, mask=row < padded_length, other=0.0)
        # Every warp reads these rows and one of them writes: it must not write before the others have read.
        # Without the barrier, a busy GPU that delays warps counts the sink of some rows twice.
        tl.debug_barrier()
        # ±inf: a row without keys (see sink.py)
        absent = (lse == float("inf")) | (lse == float("-inf"))
        top = tl.maximum(lse, sink)
        top = tl.where(absent, 0.0, top)
        new_lse = top + tl.log(tl.exp(lse - top) + tl.exp(sink - top))
        new_lse = tl.where(new_lse == float("-inf"), float("inf"), new_lse)
        tl.store(lse_at, new_lse, mask=row < padded_length)
        at = out_ptr + batch * out_b + head * out_h + row[:, None] * out_l + column[None, :]
        inside = (row < length)[:, None] & (column < size)[None, :]
        out = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        out = tl.where(absent[:, None], 0.0, out * tl.exp(lse - new_lse)[:, None])
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _row_dot_kernel(
        a_ptr,
        b_ptr,
        result_ptr,
        a_b,
        a_h,
        a_l,
        a_d,
        b_b,
        b_h,
        b_l,
        b_d,
        heads,
        length,
        size,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        batch, head, row = _rows(heads, length, ROWS)
        column = tl.arange(0, WIDTH)
        inside = (row < length)[:, None] & (column < size)[None, :]
        a = tl.load(
            a_ptr + batch * a_b + head * a_h + row[:, None] * a_l + column[None, :] * a_d, mask=inside, other=0.0
        )
        b = tl.load(
            b_ptr + batch * b_b + head * b_h + row[:, None] * b_l + column[None, :] * b_d, mask=inside, other=0.0
        )
        dot = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
        tl.store(result_ptr + (batch * heads + head) * length + row, dot, mask=row < length)
