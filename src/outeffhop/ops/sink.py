"""The algebra of the sink: softmax's output and logsumexp → softmax_n's, and the gradients.

README.md in this folder derives each line.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outeffhop.ops import sink_triton

__all__ = ["apply_sink", "sink_gradient", "fold_lse_gradient"]


def apply_sink(out: Tensor, lse: Tensor, sink: float | Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of softmax → (out·exp(lse − lse'), lse' = log(eˢ + exp(lse))).

    Args:
        out: [B, H, L, D], fresh from a kernel.
        lse: [B, H, L, ...], float32 or float64, possibly padded along L beyond ``out``. Both are overwritten.
        sink: s = log n, a number or [H].
    """
    if sink_triton.serves(out):
        return sink_triton.apply_sink(out, lse, sink)
    sink = _per_head(sink, lse)
    keep = torch.sigmoid(lse - sink)  # γ = exp(lse − lse'), the share that is not no-op
    # without keys and without a sink, −inf − (−inf) is NaN; the output there is 0
    out.mul_(keep.nan_to_num_(0.0)[:, :, : out.shape[2]].reshape(*out.shape[:3], 1))
    torch.logaddexp(lse, sink, out=lse)
    # in a row without keys, a kernel's backward gets exp(score − lse') = 0 for every lse' except −inf
    return out, lse.masked_fill_(torch.isneginf(lse), torch.inf)


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
        return lse.new_full((), sink)
    return sink.to(lse.dtype).reshape(-1, *(1,) * (lse.dim() - 2))
