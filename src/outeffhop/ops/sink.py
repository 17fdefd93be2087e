"""The algebra of the sink: softmax's output and logsumexp → softmax_n's, and the gradients.

README.md in this folder derives each line.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from outeffhop.ops import sink_triton

__all__ = ["apply_sink", "sink_gradient", "fold_lse_gradient"]

# Up to this many elements of the output a GPU waits for the host, and launching a Triton kernel takes the host several
# times as long as launching one of PyTorch's: two to four of those are faster. Above it, one pass over the output is.
_SMALL = 1 << 20

_softplus: Any = softplus  # its type lacks ``out``


def apply_sink(
    out: Tensor,
    lse: Tensor,
    sink: float | Tensor,
    without_keys: bool = True,
    needs_lse: bool = True,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of softmax → (out·exp(lse − lse'), lse' = log(eˢ + exp(lse))).

    Args:
        out: [B, H, L, D], fresh from a kernel; overwritten.
        lse: [B, H, L, ...], float32 or float64, possibly padded along L beyond ``out``; may be overwritten.
        sink: s = log n, a number or [H].
        without_keys: whether rows may have no key: the kernel left ±inf in their ``lse``.
        needs_lse: whether lse' is wanted; otherwise the second tensor is of no use.
        in_place: lse' is to be in the memory of ``lse``. What is traced takes none of the ops that do so.
    """
    # rows without keys take more of PyTorch's kernels, so that Triton's is faster at any size
    if (without_keys or out.numel() > _SMALL) and sink_triton.serves(out):
        return sink_triton.apply_sink(out, lse, sink)
    absent = torch.isinf(lse) if without_keys else None
    fill = Tensor.masked_fill_ if in_place else Tensor.masked_fill
    if absent is not None:
        lse = fill(lse, absent, -math.inf)
    number = not isinstance(sink, Tensor)
    zero = number and sink == 0.0
    above = lse if zero else lse - (sink if number else _per_head(sink, lse))
    keep = torch.sigmoid(above)  # γ = exp(lse − lse'), the share that is not no-op
    if absent is not None:  # −inf − (−inf) without a sink is NaN; and a kernel may leave NaN in such a row of out
        keep = keep.masked_fill(absent, 0.0)
        if out.is_cuda:
            out.masked_fill_(_rows(absent, out), 0.0)
    out.mul_(_rows(keep, out))
    if needs_lse:  # for s = 0, logaddexp(lse, s) needs no tensor of zeros
        into = lse if in_place else None
        lse = _softplus(lse, 1.0, 50.0, out=into) if zero else torch.logaddexp(lse, _per_head(sink, lse), out=into)
        if absent is not None:  # a kernel's backward gets exp(score − lse') = 0 there for every lse' except −inf
            lse = fill(lse, torch.isneginf(lse), math.inf)
    return out, lse


def _rows(per_row: Tensor, out: Tensor) -> Tensor:
    """[B, H, L, ...] as the kernel lays it out → [B, H, L, 1]"""
    if per_row.shape[2] != out.shape[2]:
        per_row = per_row[:, :, : out.shape[2]]
    return per_row if per_row.dim() == 4 else per_row.unsqueeze(-1)


def sink_gradient(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """∂L/∂s = −Σ exp(s − lse')·(Δ − ∂L/∂lse'), Δ = rowsum(∂L/∂out' ∘ out').  [H]"""
    if lse.shape != out.shape[:3]:
        lse = lse[:, :, : out.shape[2]].reshape(out.shape[:3])
    no_op = (_per_head(sink, lse) - lse).exp_()
    if out.numel() > _SMALL and sink_triton.serves(out):
        total = (no_op * sink_triton.row_dot(grad_out, out)).sum((0, 2))
    else:  # in the wide type, since one factor has it
        total = (grad_out * no_op.unsqueeze(-1)).mul_(out).sum((0, 2, 3))
    if grad_lse is not None:
        total = total - (no_op * grad_lse).sum((0, 2))
    return -total.to(sink.dtype)


def fold_lse_gradient(
    grad_out: Tensor, grad_lse: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, multiple: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Inputs on which a kernel's own backward also carries ∂L/∂lse'.

    The kernel computes Δ = rowsum(∂L/∂out ∘ out) from its arguments, and we need Δ − ∂L/∂lse' instead.
    Columns of zeros change neither the scores nor the products with the values. In the first of them,
    ∂L/∂out is 1 and out is −∂L/∂lse', which adds −∂L/∂lse' to Δ.
    """
    query, key, value = (pad(t, (0, multiple)) for t in (query, key, value))
    grad_out = _with_column(grad_out, torch.ones_like(grad_lse), multiple)
    out = _with_column(out, -grad_lse, multiple)
    return grad_out, query, key, value, out


def _with_column(t: Tensor, column: Tensor, multiple: int) -> Tensor:
    """[B, H, L, D] and [B, H, L] → [B, H, L, D + multiple], laid out as [B, L, H, D + multiple].

    The backward of one kernel expects its output in the layout that its forward produces.
    """
    columns = pad(column.to(t.dtype).unsqueeze(-1), (0, multiple - 1))
    return torch.cat([t.transpose(1, 2), columns.transpose(1, 2)], dim=-1).transpose(1, 2)


def _per_head(sink: float | Tensor, lse: Tensor) -> Tensor:
    if not isinstance(sink, Tensor):
        return torch.full((), sink, dtype=lse.dtype, device=lse.device)
    if sink.dtype == torch.float64:  # a narrow one is widened by the op that it goes into
        sink = sink.to(lse.dtype)
    return sink.unsqueeze(-1) if lse.dim() == 3 else sink.reshape(-1, *(1,) * (lse.dim() - 2))
