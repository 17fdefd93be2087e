"""The algebra of the sink: softmax's output and logsumexp → softmax_n's, and the gradients.

README.md in this folder derives each line.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from outeffhop.ops import sink_triton

__all__ = ["apply_sink", "sink_gradient", "fold_lse_gradient"]


def apply_sink(
    out: Tensor, lse: Tensor, sink: float | Tensor, without_keys: bool = True, needs_lse: bool = True
) -> tuple[Tensor, Tensor]:
    """(out, lse) of softmax → (out·exp(lse − lse'), lse' = log(eˢ + exp(lse))).

    Args:
        out: [B, H, L, D], fresh from a kernel; overwritten.
        lse: [B, H, L, ...], float32 or float64, possibly padded along L beyond ``out``; may be overwritten.
        sink: s = log n, a number or [H].
        without_keys: whether rows may have no key: the kernel left ±inf in their ``lse``.
        needs_lse: whether lse' is wanted; otherwise the second tensor is of no use.
    """
    if sink_triton.serves(out):
        return sink_triton.apply_sink(out, lse, sink)
    absent = torch.isinf(lse) if without_keys else None
    if absent is not None:
        lse = lse.masked_fill(absent, -math.inf)
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
        lse = softplus(lse, threshold=50.0) if zero else torch.logaddexp(lse, _per_head(sink, lse))
        if absent is not None:  # a kernel's backward gets exp(score − lse') = 0 there for every lse' except −inf
            lse = lse.masked_fill(torch.isneginf(lse), math.inf)
    return out, lse


def _rows(per_row: Tensor, out: Tensor) -> Tensor:
    """[B, H, L, ...] as the kernel lays it out → [B, H, L, 1]"""
    if per_row.shape[2] != out.shape[2]:
        per_row = per_row[:, :, : out.shape[2]]
    return per_row if per_row.dim() == 4 else per_row.unsqueeze(-1)


def sink_gradient(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """∂L/∂s = −Σ exp(s − lse')·(Δ − ∂L/∂lse'), Δ = rowsum(∂L/∂out' ∘ out').  [H]"""
    lse = lse[:, :, : out.shape[2]].reshape(out.shape[:3])
    if sink_triton.serves(out):
        delta = sink_triton.row_dot(grad_out, out)
    else:
        delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    return -(torch.exp(_per_head(sink, lse) - lse) * delta).sum((0, 2)).to(sink.dtype)


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
    return sink.to(lse.dtype).reshape(-1, *(1,) * (lse.dim() - 2))
