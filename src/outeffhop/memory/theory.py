"""The paper's bounds as functions: separation, retrieval error, capacity, generalization.

Where a printed formula does not hold, this module has it next to a valid one; docs/theory.md gives counterexamples,
README.md here proofs. Patterns are the rows of a tensor [M, d].

Most proofs rest on one fact: softmax1 over M patterns is softmax over them and one more at the origin.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from outeffhop._naming import require
from outeffhop.functional import logsumexp_n
from outeffhop.memory.arguments import check_patterns

__all__ = [
    "separation",
    "radius",
    "largest_norm",
    "gamma",
    "delta",
    "separation_threshold",
    "well_separated",
    "ErrorBounds",
    "retrieval_error_bounds",
    "ball_error_bound",
    "CorollaryConditions",
    "corollary_conditions",
    "ZeroPoint",
    "zero_point",
    "CapacityBound",
    "capacity_bound",
    "NormBounds",
    "norm_bounds",
    "GeneralizationTerms",
    "generalization_terms",
]

_LOG_MAX = math.log(sys.float_info.max)


def separation(patterns: Tensor) -> Tensor:
    """Δ_μ = ⟨ξ_μ, ξ_μ⟩ − max_{ν≠μ} ⟨ξ_μ, ξ_ν⟩: [M, d] → [M]."""
    _check_patterns(patterns, at_least=2)
    gram = patterns @ patterns.T  # [M, M]
    return gram.diagonal() - gram.masked_fill(
        torch.eye(len(gram), dtype=torch.bool, device=gram.device), -torch.inf
    ).amax(1)


def radius(patterns: Tensor) -> float:
    """R = ½ min_{μ≠ν} ‖ξ_μ − ξ_ν‖, the paper's radius of the spheres S_μ."""
    _check_patterns(patterns, at_least=2)
    return 0.5 * float(torch.pdist(patterns).min())


def largest_norm(patterns: Tensor) -> float:
    """m = max_μ ‖ξ_μ‖."""
    _check_patterns(patterns)
    return float(torch.linalg.vector_norm(patterns, dim=-1).max())


def gamma(patterns: Tensor, queries: Tensor, beta: float) -> Tensor:
    """γ(x) = Σ_μ softmax1(β Ξᵀx)_μ = sigmoid(lse(β Ξᵀx)), in (0, 1): [..., d] → [...]. T_OutEff = γ T_dense."""
    return torch.sigmoid(logsumexp_n(_scores(patterns, queries, beta), 0.0))


def delta(patterns: Tensor, queries: Tensor, beta: float) -> Tensor:
    """δ(x) = −log(γ(x)) / β > 0, so that γ = exp(−βδ): [..., d] → [...]. Precise even where γ rounds to 1."""
    return -torch.nn.functional.logsigmoid(logsumexp_n(_scores(patterns, queries, beta), 0.0)) / beta


def separation_threshold(count: int, beta: float, norm: float, radius: float, delta: float = 0.0) -> float:
    """The Δ_μ that is sufficient: β⁻¹ ln(2(M − 1)m / R) + 2mR − δ.

    delta = 0 is the dense model's condition, delta > 0 the paper's for OutEffHop (its Lemma
    "well_sep"), which rests on an error bound that does not hold: see ``ball_error_bound``.
    """
    _check_positive(beta=beta, norm=norm, radius=radius)
    if count < 2:
        raise ValueError(f"count={count}: separation needs at least 2 patterns")
    return math.log(2 * (count - 1) * norm / radius) / beta + 2 * norm * radius - delta


def well_separated(patterns: Tensor, beta: float, radius: float, delta: float = 0.0) -> Tensor:
    """Δ_μ ≥ ``separation_threshold``, per pattern: [M, d] → bool [M].

    ``radius`` is a free choice: Ramsauer et al. take 1/(βMm). With the paper's R = ½ min ‖ξ_μ − ξ_ν‖
    at least one of the two closest patterns always fails the condition, at every β.
    """
    threshold = separation_threshold(len(patterns), beta, largest_norm(patterns), radius, delta)
    return separation(patterns) >= threshold


@dataclass(frozen=True)
class ErrorBounds:
    """Upper bounds on ‖T(x) − ξ_μ‖ per query, each [...]."""

    dense: Tensor  # 2m(M−1) exp(−βΔ̃), for the dense model
    printed: Tensor  # γ · dense, as printed for OutEffHop: bounds ‖T(x) − γξ_μ‖, not the error
    valid: Tensor  # γ · dense + (1 − γ)‖ξ_μ‖, for OutEffHop
    printed_proved: Tensor  # bool: where ``printed`` does bound the error, provably


def retrieval_error_bounds(
    patterns: Tensor, queries: Tensor, target: Tensor, beta: float, radius: float | None = None
) -> ErrorBounds:
    """Bounds on the error of one update from x towards ξ_target.

    Args:
        queries: [..., d].
        target: the index μ of the pattern each query should retrieve, long [...].
        radius: R of a sphere around ξ_μ that contains x, for the exponent −β(Δ_μ − 2mR); by default
            the sharper −βΔ̃ with Δ̃ = ⟨ξ_μ, x⟩ − max_{ν≠μ} ⟨ξ_ν, x⟩.
    """
    _check_patterns(patterns, at_least=2)
    count, norm = len(patterns), largest_norm(patterns)
    outside = target[(target < 0) | (target >= count)]
    if target.shape != queries.shape[:-1] or len(outside):
        wrong = f" with the value {int(outside[0])}" if len(outside) else ""
        raise ValueError(
            f"target of shape {tuple(target.shape)}{wrong}: "
            f"expected one index in 0..{count - 1} per query, shape {tuple(queries.shape[:-1])}"
        )
    wanted = patterns[target]  # [..., d]
    products = queries @ patterns.T  # [..., M]
    runner_up = products.scatter(-1, target.unsqueeze(-1), -torch.inf).amax(-1)
    if radius is None:
        gap = (wanted * queries).sum(-1) - runner_up
    else:
        distance = torch.linalg.vector_norm(queries - wanted, dim=-1)
        if (distance > radius * (1 + 1e-9)).any():
            furthest = float(distance.max())
            raise ValueError(
                f"radius={radius}: a query is {furthest} away from its pattern; choose a radius at least as large"
            )
        gap = separation(patterns)[target] - 2 * norm * radius
    lse = logsumexp_n(_scores(patterns, queries, beta), 0.0)
    mass, rest = torch.sigmoid(lse), torch.sigmoid(-lse)  # γ and 1 − γ, each to full precision
    own_norm = torch.linalg.vector_norm(wanted, dim=-1)
    dense = 2 * norm * (count - 1) * torch.exp(-beta * gap)
    # The error is at most [(M−1) e^{βs} D + ‖ξ_μ‖] / Z and the printed bound at least 2m(M−1) e^{βs} / Z,
    # with s the runner-up's score and D the largest distance from ξ_μ.
    spread = torch.cdist(patterns, patterns).amax(1)[target]
    proved = (count - 1) * torch.exp(beta * runner_up) * (2 * norm - spread) >= own_norm
    return ErrorBounds(dense, mass * dense, mass * dense + rest * own_norm, proved)


def ball_error_bound(patterns: Tensor, beta: float, radius: float, n: float = 1.0) -> Tensor:
    """sup ‖T(x) − ξ_μ‖ over ‖x − ξ_μ‖ ≤ R is at most this, for any n no-op patterns: [M, d] → [M].

        2m(M − 1) exp(−β(Δ_μ − 2mR)) + ‖ξ_μ‖ n / (n + exp(β‖ξ_μ‖(‖ξ_μ‖ − R)))

    Where it is ≤ R, T maps the sphere around ξ_μ into itself: the valid well-separation of OutEffHop
    (n = 1), and Ramsauer's of the dense model (n = 0).
    """
    _check_positive(beta=beta, radius=radius)
    if not n >= 0.0:
        raise ValueError(f"n={n}: the number of no-op patterns must not be negative")
    norms: Tensor = torch.linalg.vector_norm(patterns, dim=-1)
    norm = largest_norm(patterns)
    others = 2 * norm * (len(patterns) - 1) * torch.exp(-beta * (separation(patterns) - 2 * norm * radius))
    log_n = math.log(n) if n > 0 else -math.inf
    no_op = torch.sigmoid(log_n - beta * norms * (norms - radius))  # n / (n + exp(…)), without overflow
    return others + norms * no_op


@dataclass(frozen=True)
class CorollaryConditions:
    """When shrinking helps, ‖γv − w‖ ≤ ‖v − w‖ for v = T_dense(x), w = ξ_μ, γ < 1; each bool [...]."""

    exact: Tensor  # (γ + 1)‖v‖² ≥ 2⟨v, w⟩: equivalent
    printed: Tensor  # (γ + 1)/2 ≥ cos ∠(v, w): for ‖v‖ ≤ ‖w‖ = 1 necessary, not sufficient


def corollary_conditions(dense: Tensor, target: Tensor, gamma: Tensor) -> CorollaryConditions:
    """Both readings of the paper's corollary: dense v [..., d], target w [..., d], gamma [...]."""
    inner = (dense * target).sum(-1)
    lengths = torch.linalg.vector_norm(dense, dim=-1) * torch.linalg.vector_norm(target, dim=-1)
    return CorollaryConditions(
        exact=(gamma + 1) * dense.square().sum(-1) >= 2 * inner,
        printed=(gamma + 1) / 2 * lengths >= inner,  # multiplied out, since v = 0 has no angle
    )


@dataclass(frozen=True)
class ZeroPoint:
    """OutEffHop's energy at x = 0, the paper's zero-energy point."""

    drift: float  # ‖T(0)‖ = ‖Σ_μ ξ_μ‖ / (M + 1) = ‖∇H(0)‖
    curvature: float  # the least eigenvalue of ∇²H(0)


def zero_point(patterns: Tensor, beta: float) -> ZeroPoint:
    """Gradient and curvature of H at 0: ∇²H(0) = I − β[ΞΞᵀ/(M+1) − ssᵀ/(M+1)²], s = Σ_μ ξ_μ."""
    _check_patterns(patterns)
    _check_positive(beta=beta)
    drift = patterns.sum(0) / (len(patterns) + 1)  # [d]
    covariance = patterns.T @ patterns / (len(patterns) + 1) - torch.outer(drift, drift)
    return ZeroPoint(float(drift.norm()), 1.0 - beta * float(torch.linalg.eigvalsh(covariance)[-1]))


@dataclass(frozen=True)
class CapacityBound:
    """M ≥ √p c^{(d−1)/4} with c = b / W₀(exp(a + ln b)), the root of ac + c ln c = b."""

    a: float
    b: float
    c: float
    patterns: float  # the bound on M, not rounded; inf beyond 1.8e308, nan where the formula has no value
    note: str = ""  # why the bound is vacuous, if it is


def capacity_bound(
    dim: int, beta: float, norm: float, failure: float, *, radius: float | None = None, delta: float = 0.0
) -> CapacityBound:
    """How many random patterns on the sphere of radius m in R^d are stored with probability ≥ 1 − p.

    Valid with delta = 0 for the dense model and for OutEffHop. A pattern is stored if T maps the ball of
    radius R around it into itself.

    Args:
        norm: m. With m = K√(d − 1) and radius=None this is Theorem A5 of Ramsauer et al.
        failure: p.
        radius: R; a = 4/(d−1)·[ln(2√p m/R) + 2βmR − βδ], b = 4βm²/(5(d−1)); 1/(2βm) gives the largest
            bound. By default R = 1/(βMm); a = 2/(d−1)·[1 + ln(2βm²p) − βδ], b = 2βm²/(5(d−1)).
        delta: what the paper's separation condition would add, for comparison only: it depends on a query,
            and the condition is not valid for OutEffHop.
    """
    _check_capacity(dim, beta, norm, failure)
    if radius is None:
        share = 2 / (dim - 1)
        a = share * (1 + math.log(2 * beta * norm**2 * failure) - beta * delta)
    else:
        _check_positive(radius=radius)
        share = 4 / (dim - 1)
        a = share * (math.log(2 * math.sqrt(failure) * norm / radius) + beta * (2 * norm * radius - delta))
    b = share * beta * norm**2 / 5
    # wrightomega(z) = W₀(e^z) for real z, and e^z never overflows
    omega = float(require("scipy.special").wrightomega(a + math.log(b)))
    c = b / omega if omega > 0.0 else math.inf
    log_patterns = 0.5 * math.log(failure) + (dim - 1) / 4 * math.log(c)
    patterns = math.exp(log_patterns) if log_patterns < _LOG_MAX else math.inf
    note = ""
    if patterns < 2:
        note = "fewer than 2 patterns: the bound is vacuous; raise beta, norm or dim"
    # No two patterns are closer than the angle c^{−1/2}. If their balls may overlap, nothing is stored.
    elif (radius or 1 / (beta * patterns * norm)) >= norm * math.sin(min(math.pi, c**-0.5) / 2):
        note = "the balls around the patterns may overlap: the bound is vacuous; raise beta or norm, or lower radius"
    return CapacityBound(a, b, c, patterns, note)


def printed_capacity_bound(
    dim: int, beta: float, norm: float, failure: float, radius: float, delta: float = 0.0
) -> CapacityBound:
    """The paper's formula to the letter: a = 4/(d−1)·{ln[2m²(√p − 1)/R] + 1 − δ/(2βmR)}, b = 4βm²/(5(d−1)).

    √p − 1 ≤ 0 for every probability p, so it has no value; ``note`` says why.
    """
    _check_capacity(dim, beta, norm, failure)
    _check_positive(radius=radius)
    b = 4 * beta * norm**2 / (5 * (dim - 1))
    argument = 2 * norm**2 * (math.sqrt(failure) - 1) / radius
    note = f"the logarithm's argument 2m²(√p − 1)/R = {argument:.6g} is not positive for any probability p <= 1"
    return CapacityBound(math.nan, b, math.nan, math.nan, note)


@dataclass(frozen=True)
class NormBounds:
    """The constants of assumptions A2 to A4: the smallest for given weights and memories."""

    key: float  # B_K = ‖W_Kᵀ‖₂, the spectral norm; no bound below uses it
    key_21: float  # B_K^{2,1} = ‖W_K‖_{2,1}
    value: float  # B_V = ‖W̃_Vᵀ‖₂
    value_21: float  # B_V^{2,1} = ‖W̃_V‖_{2,1}
    memory: float  # B_Y = max_t ‖y_t‖


def norm_bounds(key_weight: Tensor, value_weight: Tensor, memory: Tensor) -> NormBounds:
    """W_K [a, d], W̃_V = W_K W_V [a, d], Y [..., M, a]. ‖A‖_{2,1} sums the ℓ₂ norms of A's columns."""
    if key_weight.ndim != 2 or value_weight.ndim != 2 or not len(key_weight) == len(value_weight) == memory.shape[-1]:
        raise ValueError(
            f"key_weight {tuple(key_weight.shape)}, value_weight {tuple(value_weight.shape)}, "
            f"memory {tuple(memory.shape)}: expected [a, d], [a, d] and [..., M, a]"
        )
    return NormBounds(
        key=float(torch.linalg.matrix_norm(key_weight, 2)),
        key_21=float(torch.linalg.vector_norm(key_weight, dim=0).sum()),
        value=float(torch.linalg.matrix_norm(value_weight, 2)),
        value_21=float(torch.linalg.vector_norm(value_weight, dim=0).sum()),
        memory=float(torch.linalg.vector_norm(memory, dim=-1).max()),
    )


@dataclass(frozen=True)
class GeneralizationTerms:
    """ε_gen ≤ Õ(rate). Õ hides constants and logarithms: a rate compares settings, it does not bound an error."""

    e1: float
    e2: float
    bracket: float  # (E₁ + E₂)^{3/2} + √log(1/δ)
    rate: float  # bracket / √N


def generalization_terms(
    bounds: NormBounds, beta: float, dim: int, samples: int, patterns: int, failure: float, *, printed: bool = False
) -> GeneralizationTerms:
    """E₁ = [B_V² B_Y⁴ (βB_K^{2,1})² log(dNM)]^{1/3}, E₂ = [B_Y² (B_V^{2,1})² log(dNM)]^{1/3}.

    The paper prints (``printed=True``) E₁ = [4 B_V² B_Y² (…)² log]^{1/3} and E₂ = [(B_V^{2,1})² log]^{1/3}: the B_Y of
    the covering lemma is missing, and softmax1's Lipschitz constant is 2 instead of 1.

    Args:
        dim, samples, patterns: d, N, M.
        failure: the paper's δ; the bound holds with probability 1 − δ.
    """
    _check_positive(beta=beta, dim=dim, samples=samples, patterns=patterns)
    _check_probability(failure)
    log = math.log(dim * samples * patterns)
    lipschitz, input_norm = (2.0, 1.0) if printed else (1.0, bounds.memory)
    e1 = ((lipschitz * bounds.value * bounds.memory * input_norm * beta * bounds.key_21) ** 2 * log) ** (1 / 3)
    e2 = ((input_norm * bounds.value_21) ** 2 * log) ** (1 / 3)
    bracket = (e1 + e2) ** 1.5 + math.sqrt(math.log(1 / failure))
    return GeneralizationTerms(e1, e2, bracket, bracket / math.sqrt(samples))


def _scores(patterns: Tensor, queries: Tensor, beta: float) -> Tensor:
    _check_patterns(patterns)
    _check_positive(beta=beta)
    if queries.ndim == 0 or queries.shape[-1] != patterns.shape[1]:
        raise ValueError(f"queries of shape {tuple(queries.shape)}: the last size must be d={patterns.shape[1]}")
    return beta * (queries @ patterns.T)  # [..., M]


def _check_patterns(patterns: Tensor, at_least: int = 1) -> None:
    check_patterns(patterns)
    if len(patterns) < at_least:
        raise ValueError(f"patterns of shape {tuple(patterns.shape)}: expected [M, d] with M >= {at_least}")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise ValueError(f"{name}={value}: must be positive and finite")


def _check_probability(failure: float) -> None:
    if not 0.0 < failure <= 1.0:
        raise ValueError(f"failure={failure}: the probability of failure must be in (0, 1]")


def _check_capacity(dim: int, beta: float, norm: float, failure: float) -> None:
    if dim < 2:
        raise ValueError(f"dim={dim}: a sphere of random patterns needs dim >= 2")
    _check_positive(beta=beta, norm=norm)
    _check_probability(failure)
