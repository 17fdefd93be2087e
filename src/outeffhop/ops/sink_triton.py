"""The sink's two elementwise passes, each as one Triton kernel; without Triton, sink.py does them in PyTorch."""

from __future__ import annotations

from collections.abc import Hashable
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
    batch, heads, length, size = out.shape
    width, rows = _block(size)
    unit = 1 if size % 8 else 8
    out_b, out_h, out_l, _ = out.stride()
    lse_b, lse_h, lse_l = lse.stride()[:3]
    padded = lse.shape[2]
    _launch(
        _apply_sink_kernel,
        (out.dtype, sink.dtype if learned else None, size, unit),  # type: ignore[union-attr]
        -(-padded // rows) * batch * heads,
        (out, lse),
        out,
        lse,
        sink if learned else lse,  # a constant sink still needs a pointer, which is not read
        0.0 if learned else sink,
        sink.stride(0) if learned else 0,  # type: ignore[union-attr]
        out_b // unit,
        out_h // unit,
        out_l // unit,
        lse_b,
        lse_h,
        lse_l,
        heads,
        length,
        padded,
        size,
        unit,
        learned,
        rows,
        width,
    )
    return out, lse


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """rowsum(a ∘ b) in float32 without a float32 copy of either.  [B, H, L]"""
    a, b = (t if t.stride(3) == 1 else t.contiguous() for t in (a, b))
    batch, heads, length, size = a.shape
    result = torch.empty(batch, heads, length, dtype=torch.float32, device=a.device)
    width, rows = _block(size)
    strides = *a.stride()[:3], *b.stride()[:3]
    unit = 1 if any(s % 8 for s in (*strides, size)) else 8
    _launch(
        _row_dot_kernel,
        (a.dtype, b.dtype, size, unit),
        -(-length // rows) * batch * heads,
        (a, b, result),
        a,
        b,
        result,
        *(s // unit for s in strides),
        heads,
        length,
        size,
        unit,
        rows,
        width,
    )
    return result


def _block(size: int) -> tuple[int, int]:
    """Width and rows of a program, 2048 elements in whole rows: slightly the fastest number on an H200."""
    width = 1 << (size - 1).bit_length()
    return width, max(1, 2048 // width)


# What Triton compiled, by kernel, device and what the code was made for. Triton itself looks at every argument at each
# launch, which takes longer than the launch. The numbers are not part of it: the code is made for any.
_COMPILED: dict[Hashable, Any] = {}


def _launch(kernel: Any, kind: Hashable, programs: int, aligned: tuple[Tensor, ...], *arguments: Any) -> None:
    """Launches a kernel; what it is compiled to is remembered for its ``kind``."""
    device = aligned[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # where Triton launches
        with torch.cuda.device(device):
            _launch(kernel, kind, programs, aligned, *arguments)
        return
    usual = all(t.data_ptr() % 16 == 0 for t in aligned)  # 16 bytes are loaded at a time
    compiled = _COMPILED.get((kernel, device, kind)) if usual else None
    if compiled is not None:
        compiled[(programs, 1, 1)](*arguments)
        return
    compiled = kernel[(programs,)](*arguments)
    if usual and compiled is not None:  # Triton's interpreter returns nothing
        _COMPILED[kernel, device, kind] = compiled


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

    _NUMBERS = ["sink_h", "out_b", "out_h", "out_l", "lse_b", "lse_h", "lse_l", "heads", "length", "padded_length"]

    @triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=["sink_ptr"])
    def _apply_sink_kernel(
        out_ptr,
        lse_ptr,
        sink_ptr,
        sink_value,
        sink_h,
        out_b,
        out_h,
        out_l,
        lse_b,
        lse_h,
        lse_l,
        heads,
        length,
        padded_length,
        SIZE: tl.constexpr,
        UNIT: tl.constexpr,
        LEARNED: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        batch, head, row = _rows(heads, padded_length, ROWS)
        column = tl.arange(0, WIDTH)
        sink = tl.load(sink_ptr + head * sink_h).to(tl.float32) if LEARNED else sink_value
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
        # strides are in units of 8 elements where all are multiples of 8, so that 16 bytes are loaded at a time
        at = out_ptr + (batch * out_b + head * out_h + row[:, None] * out_l) * UNIT + column[None, :]
        inside = (row < length)[:, None] & (column < SIZE)[None, :]
        out = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        out = tl.where(absent[:, None], 0.0, out * tl.exp(lse - new_lse)[:, None])
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["a_b", "a_h", "a_l", "b_b", "b_h", "b_l", "heads", "length"])
    def _row_dot_kernel(
        a_ptr,
        b_ptr,
        result_ptr,
        a_b,
        a_h,
        a_l,
        b_b,
        b_h,
        b_l,
        heads,
        length,
        SIZE: tl.constexpr,
        UNIT: tl.constexpr,
        ROWS: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        batch, head, row = _rows(heads, length, ROWS)
        column = tl.arange(0, WIDTH)
        inside = (row < length)[:, None] & (column < SIZE)[None, :]
        # strides in units as above
        a_at = a_ptr + (batch * a_b + head * a_h + row[:, None] * a_l) * UNIT + column[None, :]
        b_at = b_ptr + (batch * b_b + head * b_h + row[:, None] * b_l) * UNIT + column[None, :]
        a = tl.load(a_at, mask=inside, other=0.0)
        b = tl.load(b_at, mask=inside, other=0.0)
        dot = tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)
        tl.store(result_ptr + (batch * heads + head) * length + row, dot, mask=row < length)
