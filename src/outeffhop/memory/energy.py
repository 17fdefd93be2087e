"""The energies that retrieval minimizes.

With scores z = βΞx, the energy of every model except the polynomial one is

    H(x) = −β⁻¹ Ψ*(z) + ½⟨x, x⟩ + Const,    Const = β⁻¹ Ψ*(0) + ½m²,

where Ψ*(z) = max_p ⟨p, z⟩ + Ψ(p) is the convex conjugate of an entropy Ψ and its gradient is the model's
weights. Retrieval Ξᵀ∇Ψ*(z) is the convex-concave procedure on H, so no update raises H.

    Dense        Ψ*(z) = log Σ exp z_μ              Shannon's entropy
    OutEffHop    Ψ*(z) = log(n + Σ exp z_μ)         the same with n patterns that score 0
    Sparse, GSH  Ψ*(z) = ⟨p, z⟩ + Ψ_α(p)            Tsallis' α-entropy, p = entmax_α(z); Sparse is α = 2

m is the largest norm of a pattern. Dense gets the constant of Ramsauer et al., β⁻¹ log M + ½m²,
and OutEffHop β⁻¹ log(M + n) + ½m². Since Ψ*(z) ≤ max(0, max_μ z_μ) + Ψ*(0), it makes
H(x) ≥ ½(‖x‖ − m)² ≥ 0 for all of them.

The polynomial model is Krotov and Hopfield's −Σ ⟨ξ_μ, x⟩ᵖ, which is bounded below only on a sphere.
There it is a monotone function of the form used here, which does not depend on the scale of x:

    H(x) = −log(f(x)/‖x‖),    f(x) = ‖Ξx‖_p.

No update raises it: f is convex and homogeneous, so f(y) ≥ ⟨∇f(x), y⟩ for all y. The retrieval
y is a positive multiple of ∇f(x), so f(y)/‖y‖ ≥ ‖∇f(x)‖ ≥ ⟨∇f(x), x⟩/‖x‖ = f(x)/‖x‖.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outeffhop.methods import Clipped, Entmax, Normalizer, Polynomial, SoftmaxN

__all__ = ["conjugate", "energy", "why_no_energy"]


def why_no_energy(normalizer: Normalizer) -> str | None:
    """Why retrieval with this normalizer has no energy; None if it has one."""
    if isinstance(normalizer, SoftmaxN | Entmax | Polynomial):
        return None
    kind = type(normalizer).__name__
    if not isinstance(normalizer, Clipped):
        return f"none is known for {kind} weights"
    return (
        f"{kind} weights are not the gradient of a function of the scores "
        "(a clipped weight still affects the others), so retrieval minimizes no energy"
    )


def conjugate(normalizer: Normalizer, scores: Tensor, weights: Tensor) -> Tensor | None:
    """Ψ*(z) of scores z [..., M] and their weights; log‖z‖_p for the polynomial model.  [...]

    Softmax is not handled here: its Ψ* is the logsumexp that attention returns.
    """
    if isinstance(normalizer, Entmax):
        return _entmax_conjugate(scores, weights, normalizer.start)
    if isinstance(normalizer, Polynomial):
        return _log_norm(scores, normalizer.order)
    return None


def energy(normalizer: Normalizer, x: Tensor, conjugate: Tensor, beta: float, size: int, largest: float) -> Tensor:
    """H(x) of x [..., d], given Ψ*(βΞx) [...], the number of patterns and their largest norm.  [...]"""
    x = x.to(conjugate.dtype)
    if isinstance(normalizer, Polynomial):
        norm = torch.linalg.vector_norm(x, dim=-1)
        nowhere = (norm == 0) | torch.isneginf(conjugate)  # x overlaps with no pattern
        log_norm = torch.log(torch.where(nowhere, 1.0, norm))
        return torch.where(nowhere, math.inf, log_norm + math.log(beta) - torch.where(nowhere, 0.0, conjugate))
    constant = _conjugate_at_zero(normalizer, size) / beta + 0.5 * largest**2
    return 0.5 * (x * x).sum(-1) - conjugate / beta + constant


def _entmax_conjugate(scores: Tensor, weights: Tensor, alpha: float) -> Tensor:
    if alpha == 1.0:
        return torch.logsumexp(scores, -1)
    # ⟨p, z⟩ relative to the largest score, since p sums to 1: scores of 1e4 would swamp the entropy
    top = scores.detach().amax(-1, keepdim=True)
    mean = (weights * (scores - top)).sum(-1) + top.squeeze(-1)
    # p − pᵅ = −p·(exp((α − 1) log p) − 1), which keeps its digits as α → 1; at p = 0 it is 0
    present = weights > 0
    log_p = torch.log(torch.where(present, weights, 1.0))
    return mean - (weights * torch.expm1((alpha - 1.0) * log_p)).sum(-1) / (alpha * (alpha - 1.0))


def _log_norm(scores: Tensor, order: int) -> Tensor:
    """log‖z‖_p; −inf where all scores are 0."""
    top = scores.detach().abs().amax(-1, keepdim=True)
    zero = top == 0
    ratio = torch.where(zero, 1.0, scores / torch.where(zero, 1.0, top))  # in [−1, 1]: no power overflows
    log_sum = torch.log((ratio**order).sum(-1)) / order
    return torch.where(zero.squeeze(-1), -math.inf, log_sum + torch.log(torch.where(zero, 1.0, top)).squeeze(-1))


def _conjugate_at_zero(normalizer: Normalizer, size: int) -> float:
    """Ψ*(0), the largest entropy: that of equal weights."""
    if isinstance(normalizer, SoftmaxN):
        return math.log(size + normalizer.n)
    alpha = normalizer.start
    if alpha == 1.0:
        return math.log(size)
    return -math.expm1((1.0 - alpha) * math.log(size)) / (alpha * (alpha - 1.0))
