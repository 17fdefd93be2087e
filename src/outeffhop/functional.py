"""Normalizers of attention scores: the mathematics of every method, and the reference that tests compare with.

Each function takes scores ``x`` and normalizes over ``dim``. Half precision is computed in
float32, as ``torch.softmax`` does. A row in which every score is −inf (no key takes part) gets
weights 0 with gradient 0.
"""

from __future__ import annotations

import math

import entmax as _package  # type: ignore[import-untyped]
import torch
from torch import Tensor

__all__ = [
    "softmax_n",
    "softmax1",
    "logsumexp_n",
    "clipped_softmax",
    "sparsemax",
    "entmax",
]


def softmax_n(
    x: Tensor,
    n: float | Tensor = 1.0,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """exp(x_i) / (n + Σ_j exp(x_j)): softmax with n no-op patterns of score 0.

    Args:
        x: scores, any shape.
        n: how many no-op patterns, a number or a tensor that broadcasts against ``x`` with ``dim``
            reduced to size 1. 0 gives softmax, 1 the paper's Softmax₁.
        dim: the dimension to normalize over.
        dtype: computes and returns in this dtype; by default the input's.

    Examples:
        >>> softmax_n(torch.tensor([-10.0, -10.0, -10.0]))
        tensor([4.5394e-05, 4.5394e-05, 4.5394e-05])
    """
    out_dtype = x.dtype if dtype is None else dtype
    x = x.to(compute_dtype(out_dtype))
    dim = _from_the_end(x, dim)
    exp, total, _ = _shifted_sum(x, _as_count(n, x, dim), dim)
    # total is 0 only where no key takes part and n = 0: 0 / 1 there, not 0 / 0
    return (exp / torch.where(total == 0, 1, total)).to(out_dtype)


def softmax1(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """exp(x_i) / (1 + Σ_j exp(x_j)), the paper's Softmax₁: one no-op pattern."""
    return softmax_n(x, 1.0, dim=dim, dtype=dtype)


def logsumexp_n(x: Tensor, n: float | Tensor = 1.0, dim: int = -1, keepdim: bool = False) -> Tensor:
    """log(n + Σ_j exp(x_j)); its gradient is ``softmax_n(x, n)``. The paper's lse₁ at n = 1, β = 1."""
    out_dtype = x.dtype
    x = x.to(compute_dtype(out_dtype))
    dim = _from_the_end(x, dim)
    _, total, shift = _shifted_sum(x, _as_count(n, x, dim), dim)
    empty = total == 0
    lse = torch.where(empty, -torch.inf, torch.log(torch.where(empty, 1, total)) + shift)
    return (lse if keepdim else lse.squeeze(dim)).to(out_dtype)


def clipped_softmax(
    x: Tensor,
    gamma: float,
    zeta: float,
    n: float | Tensor = 0.0,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """clip((ζ − γ)·softmax_n(x) + γ, 0, 1): weights that reach exactly 0 (γ < 0) and 1 (ζ > 1)."""
    if not (-math.inf < gamma <= 0.0 and 1.0 <= zeta < math.inf):
        raise ValueError(
            f"gamma={gamma}, zeta={zeta}: must be finite with gamma <= 0 and zeta >= 1, as clipping stretches outwards"
        )
    out_dtype = x.dtype if dtype is None else dtype
    p = softmax_n(x, n, dim=dim, dtype=compute_dtype(out_dtype))
    return torch.clamp((zeta - gamma) * p + gamma, 0.0, 1.0).to(out_dtype)


def sparsemax(x: Tensor, dim: int = -1) -> Tensor:
    """The Euclidean projection of ``x`` onto the simplex (entmax with α = 2)."""
    return entmax(x, 2.0, dim=dim)


def entmax(x: Tensor, alpha: float | Tensor = 1.5, dim: int = -1) -> Tensor:
    """α-entmax: softmax at α = 1, sparsemax at α = 2, sparse for every α > 1.

    Args:
        alpha: a number ≥ 1, or a tensor > 1 that broadcasts against ``x`` with ``dim`` reduced to
            size 1; a tensor gets its gradient (the learned α of the generalized sparse model). Values of a
            tensor below 1.001 (1.000001 for float64 scores) are raised to it: closer to softmax, α's gradient
            would be only rounding error.
    """
    out_dtype = x.dtype
    dtype = compute_dtype(out_dtype)
    dim = _from_the_end(x, dim)
    if isinstance(alpha, Tensor):
        _check_rows("alpha", alpha, x, dim)
        alpha = alpha.to(dtype)
        nearest = alpha.detach().clamp(min=1.0 + (1e-6 if dtype == torch.float64 else 1e-3))
        alpha = alpha + (nearest - alpha.detach())  # the gradient still reaches α, so that it can grow again
    else:
        if not 1.0 <= alpha < math.inf:
            raise ValueError(f"alpha={alpha}: entmax needs a finite alpha >= 1")
        if alpha - 1.0 < 1e-8:  # equal to 1 up to rounding
            return softmax_n(x, 0.0, dim=dim)
        if alpha < 1.01:  # the power 1/(α − 1) amplifies rounding errors
            dtype = torch.float64
    if x.shape[dim] == 0:
        return x.clone()
    x = x.to(dtype)
    # The package's sorts and sums do not survive −inf. An entry further than 1/(α − 1) below the
    # maximum has weight 0, so moving −inf to twice that distance changes no weight. Nor does a shift
    # by the maximum, without which the thresholds of scores of 1e30 would drown in rounding.
    absent = torch.isneginf(x)
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(torch.isneginf(top), 0, top)
    reach = 2.0 / ((alpha.detach() if isinstance(alpha, Tensor) else alpha) - 1.0)
    lost = ~torch.isfinite(top)  # NaN or +inf makes the whole row NaN; the package would index out of bounds
    x = torch.where(lost, 0, torch.where(absent, -reach, x - top))
    p = _Entmax.apply(x, alpha, dim)
    return p.masked_fill(absent, 0).masked_fill(lost, torch.nan).to(out_dtype)


class _Entmax(torch.autograd.Function):
    """The package's forward with our own backward, since torch.compile cannot trace its backward, a classmethod.

    torch.compiler.allow_in_graph would do without this class, but it imports torch._dynamo, which takes a second.
    """

    @staticmethod
    def forward(ctx, x, alpha, dim):  # type: ignore[no-untyped-def]
        if isinstance(alpha, Tensor) or alpha not in (1.5, 2.0):
            # halvings of an interval of at most 1: more would change nothing in this dtype
            p = _package.entmax_bisect(x, alpha, dim=dim, n_iter=50 if x.dtype == torch.float64 else 32)
        else:
            p = (_package.sparsemax if alpha == 2.0 else _package.entmax15)(x, dim=dim)
        ctx.dim, ctx.number = dim, None if isinstance(alpha, Tensor) else alpha
        ctx.save_for_backward(p, alpha if isinstance(alpha, Tensor) else None)
        return p

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        p, alpha = ctx.saved_tensors
        dim, order = ctx.dim, alpha if ctx.number is None else ctx.number
        # ∂p/∂x = diag(s) − s sᵀ / Σs with s = p^(2 − α) on the support, 0 elsewhere
        s = torch.where(p > 0, p ** (2.0 - order), 0.0)
        share = s / s.sum(dim, keepdim=True)
        grad_x = s * (grad - (share * grad).sum(dim, keepdim=True))
        grad_alpha = None
        if ctx.needs_input_grad[1]:  # Correia et al., 2019, proposition 1
            plogp = torch.where(p > 0, p * torch.log(p), 0.0)
            slope = (p - share) / (order - 1.0) ** 2
            slope = slope - (plogp - share * plogp.sum(dim, keepdim=True)) / (order - 1.0)
            grad_alpha = (grad * slope).sum_to_size(alpha.shape)
        return grad_x, grad_alpha, None


def below_sink(x: Tensor, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x − m, n = exp(sink − m) and m = max(sink, max_j x_j): a sink log n of any size, as the functions above take it.

    softmax_n(x − m, n) is then softmax over x and the sink, and logsumexp_n(x − m, n) + m its logsumexp. Without the
    shift, n = exp(1e4) would overflow, and scores of 1 would be lost beside a sink of −1e30. m carries no gradient.

    Args:
        x: [..., M], −inf where a key takes no part; normalized over the last dimension.
        sink: broadcasts against x with its last dimension reduced to size 1; −inf: no sink.
    """
    m = sink.detach() if x.shape[-1] == 0 else torch.maximum(x.detach().amax(-1, keepdim=True), sink.detach())
    m = torch.where(torch.isneginf(m), 0, m)
    return x - m, torch.exp(sink - m), m


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores and sums: float32 at least."""
    if not dtype.is_floating_point:  # the weights would be cut to 0 and 1
        raise TypeError(f"x has dtype {dtype}: expected floating point; x.float() converts it")
    return torch.float64 if dtype == torch.float64 else torch.float32


def _from_the_end(x: Tensor, dim: int) -> int:
    """The dimension counted from the end, which stays the same when n or α adds dimensions in front."""
    x.size(dim)  # raises if x has no such dimension
    return dim if dim < 0 else dim - x.dim()


def _as_count(n: float | Tensor, x: Tensor, dim: int) -> Tensor:
    if isinstance(n, Tensor):
        _check_rows("n", n, x, dim)
        return n.to(x.dtype)
    if not 0.0 <= n <= torch.finfo(x.dtype).max:
        raise ValueError(
            f"n={n}: the number of no-op patterns must be finite in {x.dtype} and not negative; "
            "attention(..., sink=log n) takes n of any size"
        )
    return x.new_full((), n)


def _check_rows(name: str, t: Tensor, x: Tensor, dim: int) -> None:
    """One value for each row: along ``dim`` a tensor has size 1, elsewhere it broadcasts against x."""
    rows = list(x.shape)
    rows[dim] = 1
    sizes = zip(reversed(t.shape), reversed(rows), strict=False)
    per_entry = t.dim() >= -dim and t.shape[dim] != 1
    if per_entry or any(a != b and a != 1 and b != 1 for a, b in sizes):
        raise ValueError(
            f"{name} has shape {tuple(t.shape)}: it must broadcast against {tuple(rows)}, one value per row"
        )


def _shifted_sum(x: Tensor, n: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x − m), n·exp(−m) + Σ_j exp(x_j − m), and the shift m that prevents overflow.

    m = max(0, max_j x_j), since the no-op patterns score 0; without any (n = 0), m = max_j x_j.
    Every result below is invariant to m, so m carries no gradient.
    """
    if x.shape[dim] == 0:
        shape = list(x.shape)
        shape[dim] = 1
        return x, n.expand(torch.broadcast_shapes(n.shape, shape)), x.new_zeros(())
    top = x.detach().amax(dim, keepdim=True)
    top = torch.where(torch.isneginf(top), 0, top)
    shift = torch.where(n.detach() > 0, top.clamp(min=0), top)
    exp = torch.exp(x - shift)
    # shift < 0 only where n = 0; the clamp keeps 0 · exp(1e4) from being NaN
    return exp, exp.sum(dim, keepdim=True) + n * torch.exp(-shift.clamp(min=-80)), shift
