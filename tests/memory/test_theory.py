"""Every claim of docs/theory.md: the bounds that hold, and the counterexamples to those that do not."""

import math

import pytest
import torch
from scipy.special import lambertw
from torch import Tensor

from outeffhop.functional import logsumexp_n, softmax1, softmax_n
from outeffhop.memory import theory

ROUND = 1e-12  # errors below this are rounding: patterns here are of order 1
FAMILIES = ["sphere", "antipodal", "simplex", "images", "gaussian"]


def update(patterns, queries, beta, n=1.0):
    """T(x) = Ξ softmax_n(β Ξᵀx), spelled out; n = 0 is the dense model."""
    return softmax_n(beta * queries @ patterns.T, n) @ patterns


def energy(patterns, queries, beta, n=1.0):
    """H(x) = −β⁻¹ log(n + Σ exp(β⟨ξ, x⟩)) + ½⟨x, x⟩, spelled out."""
    return queries.square().sum(-1) / 2 - logsumexp_n(beta * queries @ patterns.T, n) / beta


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def sphere(count: int, dim: int, rng: torch.Generator) -> Tensor:
    return unit(torch.randn(count, dim, generator=rng))


def family(name: str, count: int, dim: int, rng: torch.Generator) -> Tensor:
    if name == "sphere":
        return sphere(count, dim, rng)
    if name == "antipodal":
        half = sphere(count // 2, dim, rng)
        return torch.cat([half, -half])
    if name == "simplex":  # the most separated unit patterns: ⟨ξ_μ, ξ_ν⟩ = −1/(M − 1)
        return unit(torch.eye(count) - 1 / count)
    if name == "images":  # no negative inner product
        return torch.rand(count, dim, generator=rng)
    return torch.randn(count, dim, generator=rng)


def in_balls(patterns: Tensor, target: Tensor, radius: float, rng: torch.Generator) -> Tensor:
    """Queries within ``radius`` of their patterns, half of them on the boundary."""
    direction = unit(torch.randn(len(target), patterns.shape[1], generator=rng))
    distance = torch.rand(len(target), 1, generator=rng).mul(2).clamp(max=1)
    return patterns[target] + radius * distance * direction


def errors(patterns: Tensor, queries: Tensor, target: Tensor, beta: float, n: float = 1.0) -> Tensor:
    return (update(patterns, queries, beta, n) - patterns[target]).norm(dim=-1)


# Quantities


def test_separation_radius_and_largest_norm_by_hand():
    patterns = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    assert theory.separation(patterns).tolist() == [2.0, 0.0, 0.0]
    assert theory.radius(patterns) == 0.5
    assert theory.largest_norm(patterns) == 2.0


def test_gamma_is_the_mass_of_softmax1_and_delta_its_exponent(rng):
    patterns, queries = torch.randn(5, 8, generator=rng), torch.randn(3, 4, 8, generator=rng)
    for beta in (0.1, 1.0, 3.0):
        gamma = theory.gamma(patterns, queries, beta)
        torch.testing.assert_close(gamma, softmax1(beta * queries @ patterns.T).sum(-1))
        torch.testing.assert_close(gamma, torch.exp(-beta * theory.delta(patterns, queries, beta)))
    far = torch.tensor([[10.0]])  # lse = 100: γ rounds to 1, δ = log(1 + e^−100)
    assert theory.gamma(far, far, 1.0).item() == 1.0
    assert theory.delta(far, far, 1.0).item() == pytest.approx(math.exp(-100), rel=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_outeffhop_is_the_dense_model_with_one_pattern_at_the_origin(name, rng):
    patterns = family(name, 6, 9, rng)
    queries = torch.randn(20, patterns.shape[1], generator=rng)
    with_origin = torch.cat([patterns, torch.zeros(1, patterns.shape[1])])
    torch.testing.assert_close(update(patterns, queries, 1.7), update(with_origin, queries, 1.7, n=0))
    torch.testing.assert_close(energy(patterns, queries, 1.7), energy(with_origin, queries, 1.7, n=0))


def test_cosine_similarity_cannot_tell_one_update_from_the_dense_one(rng):
    patterns, queries = torch.randn(30, 16, generator=rng), torch.randn(50, 16, generator=rng)
    ours, dense = update(patterns, queries, 0.3), update(patterns, queries, 0.3, n=0)
    assert (ours - dense).norm(dim=-1).min() > 1e-3
    torch.testing.assert_close(torch.cosine_similarity(ours, dense), torch.ones(50))
    torch.testing.assert_close(ours, theory.gamma(patterns, queries, 0.3).unsqueeze(-1) * dense)
    # the second update starts from different lengths: the directions part
    twice, dense_twice = update(patterns, ours, 0.3), update(patterns, dense, 0.3, n=0)
    assert torch.cosine_similarity(twice, dense_twice).min() < 0.99995


# Convergence and the zero-energy point


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("beta", [0.2, 1.0, 5.0])
def test_energy_falls_by_half_the_squared_step(name, beta, rng):
    patterns = family(name, 8, 6, rng)
    x = 2 * torch.randn(40, patterns.shape[1], generator=rng)
    for _ in range(10):
        new = update(patterns, x, beta)
        drop = energy(patterns, x, beta) - energy(patterns, new, beta)
        assert (drop >= (new - x).square().sum(-1) / 2 - ROUND).all()
        x = new


def test_energy_rises_under_the_update_of_another_beta(rng):  # the control of the test above
    patterns, x = torch.randn(8, 6, generator=rng), torch.randn(40, 6, generator=rng)
    for _ in range(1000):
        x = update(patterns, x, 0.1)
    moved = update(patterns, x, 5.0)
    assert (energy(patterns, moved, 0.1) > energy(patterns, x, 0.1) + 0.1).any()


@pytest.mark.parametrize("beta", [0.2, 1.0, 5.0])
def test_limit_points_are_stationary(beta, rng):
    patterns, x = torch.randn(8, 6, generator=rng), torch.randn(20, 6, generator=rng).requires_grad_()
    (gradient,) = torch.autograd.grad(energy(patterns, x, beta).sum(), x)
    torch.testing.assert_close(gradient, x - update(patterns, x, beta))
    limit = x.detach()
    for _ in range(3000):
        limit = update(patterns, limit, beta)
    limit.requires_grad_()
    (gradient,) = torch.autograd.grad(energy(patterns, limit, beta).sum(), limit)
    assert gradient.norm(dim=-1).max() < 1e-8


def test_zero_is_not_a_stationary_point_counterexample():
    patterns = torch.eye(2)
    zero = torch.zeros(2)
    torch.testing.assert_close(update(patterns, zero, 1.0), torch.full((2,), 1 / 3))
    point = theory.zero_point(patterns, 1.0)
    assert point.drift == pytest.approx(math.sqrt(2) / 3)
    assert energy(patterns, zero, 1.0).item() == pytest.approx(-1.098612, abs=1e-6)  # −ln 3
    assert energy(patterns, torch.full((2,), 1 / 3), 1.0).item() == pytest.approx(-1.221578, abs=1e-6)


@pytest.mark.parametrize("beta", [0.3, 2.0])
def test_zero_point_agrees_with_autograd(beta, rng):
    patterns, zero = torch.randn(7, 5, generator=rng), torch.zeros(5)
    point = theory.zero_point(patterns, beta)
    hessian = torch.autograd.functional.hessian(lambda x: energy(patterns, x, beta), zero)
    assert point.curvature == pytest.approx(torch.linalg.eigvalsh(hessian)[0].item())
    assert point.drift == pytest.approx(update(patterns, zero, beta).norm().item())


def test_zero_of_centred_patterns_is_a_minimum_only_for_small_beta(rng):
    patterns = torch.randn(9, 4, generator=rng)
    patterns = patterns - patterns.mean(0)
    turning = 10 / torch.linalg.eigvalsh(patterns.T @ patterns)[-1].item()  # β λ_max(ΞΞᵀ) = M + 1
    below, above = (theory.zero_point(patterns, factor * turning) for factor in (0.99, 1.01))
    assert below.drift == pytest.approx(0.0, abs=1e-12)
    assert below.curvature > 0 > above.curvature
    # the escape from 0 above the turning point is real, and below it there is none
    nudge = 1e-3 * torch.randn(4, generator=rng)
    for factor, escapes in ((0.9, False), (1.1, True)):
        x = nudge
        for _ in range(2000):
            x = update(patterns, x, factor * turning)
        assert (x.norm() > nudge.norm()).item() is escapes


def test_small_beta_has_one_fixed_point_and_it_is_near_the_drift(rng):
    patterns = 0.9 * sphere(6, 5, rng) * torch.rand(6, 1, generator=rng)
    beta = 0.8
    rate = beta * theory.largest_norm(patterns) ** 2
    assert rate < 1
    x = 5 * torch.randn(30, 5, generator=rng)
    for _ in range(200):
        x = update(patterns, x, beta)
    torch.testing.assert_close(x, x[:1].expand_as(x))
    drift = theory.zero_point(patterns, beta).drift
    assert 0 < x[0].norm() <= drift / (1 - rate)


def test_no_op_vector_is_stored_when_the_extra_dimension_is_kept(rng):
    lifted = torch.cat([sphere(10, 6, rng), torch.zeros(10, 1)], dim=1)
    omega = torch.tensor([0.0] * 6 + [3.0])
    memory = torch.cat([lifted, omega[None]])
    after = update(memory, omega, 2.0, n=0)
    assert (after - omega).norm() < 1e-6  # M e^{−βC²} = 10 e^−18
    on_slice = update(lifted, torch.zeros(7), 2.0)  # the paper's dynamics never leaves the slice
    assert on_slice[-1] == 0
    assert on_slice.norm() > 0.05


def test_softmax1_vanishes_for_very_negative_scores_not_for_zero_scores():
    for count in (1, 3, 100):
        assert softmax1(torch.zeros(count)).sum().item() == pytest.approx(count / (count + 1))
    torch.testing.assert_close(softmax1(torch.full((3,), -10.0)), torch.full((3,), 4.539e-5), rtol=1e-3, atol=0)
    assert softmax1(torch.full((3,), -100.0)).sum() < 1e-42


# Retrieval error


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [2, 4, 20])
@pytest.mark.parametrize("beta", [0.5, 2.0, 8.0])
def test_dense_and_valid_bounds_hold(name, count, beta, rng):
    patterns = family(name, count, 7, rng)
    target = torch.randint(count, (300,), generator=rng)
    for radius in (0.02, theory.radius(patterns)):
        queries = in_balls(patterns, target, radius, rng)
        dense, ours = errors(patterns, queries, target, beta, n=0), errors(patterns, queries, target, beta)
        for sphere_radius in (None, radius):
            bounds = theory.retrieval_error_bounds(patterns, queries, target, beta, sphere_radius)
            assert (dense <= bounds.dense + ROUND).all()
            assert (ours <= bounds.valid + ROUND).all()
        assert (ours <= theory.ball_error_bound(patterns, beta, radius)[target] + ROUND).all()
        assert (dense <= theory.ball_error_bound(patterns, beta, radius, n=0)[target] + ROUND).all()
        three = theory.ball_error_bound(patterns, beta, radius, n=3)[target]
        assert (errors(patterns, queries, target, beta, n=3) <= three + ROUND).all()


def test_valid_bound_is_nearly_attained():
    """Antipodal patterns, query on the pattern: the error is 1 − γ + 2p, the bound γ·2e^{−2β} + (1 − γ)."""
    patterns, target = torch.tensor([[1.0], [-1.0]]), torch.tensor([0])
    bounds = theory.retrieval_error_bounds(patterns, patterns[:1], target, 4.0)
    assert 1 <= (bounds.valid / errors(patterns, patterns[:1], target, 4.0)).item() < 1.001


@pytest.mark.parametrize("name", FAMILIES)
def test_printed_bound_is_one_on_the_distance_to_the_shrunk_pattern(name, rng):
    patterns = family(name, 4, 6, rng)
    target = torch.randint(4, (300,), generator=rng)
    queries = in_balls(patterns, target, theory.radius(patterns), rng)
    for beta in (0.5, 4.0):
        bounds = theory.retrieval_error_bounds(patterns, queries, target, beta)
        shrunk = theory.gamma(patterns, queries, beta).unsqueeze(-1) * patterns[target]
        distance = (update(patterns, queries, beta) - shrunk).norm(dim=-1)
        assert (distance <= bounds.printed + ROUND).all()


def test_printed_error_bound_counterexample_orthogonal():
    """Two orthogonal unit patterns, query on the first, β = 4; any radius the query is in, here 0."""
    patterns, target = torch.eye(2), torch.tensor([0])
    error = errors(patterns, patterns[:1], target, 4.0).item()
    bounds = theory.retrieval_error_bounds(patterns, patterns[:1], target, 4.0)
    assert error == pytest.approx(math.sqrt(5) / (math.exp(4) + 2))
    assert error == pytest.approx(0.039508, abs=1e-6)
    assert bounds.printed.item() == pytest.approx(0.035984, abs=1e-6)
    assert bounds.valid.item() == pytest.approx(0.053653, abs=1e-6)
    assert not bounds.printed_proved.item()


def test_printed_error_bound_counterexample_antipodal():
    """ξ and −ξ, query on ξ, β = 4: the printed bound is 28 times too small."""
    patterns, target = torch.tensor([[1.0], [-1.0]]), torch.tensor([0])
    error = errors(patterns, patterns[:1], target, 4.0).item()
    bounds = theory.retrieval_error_bounds(patterns, patterns[:1], target, 4.0)
    assert error == pytest.approx(0.018638, abs=1e-6)
    assert bounds.printed.item() == pytest.approx(0.000659, abs=1e-6)
    assert bounds.valid.item() == pytest.approx(0.018639, abs=1e-6)


def test_printed_error_bound_counterexample_with_the_papers_radius():
    """The full printed form, Δ_μ − 2mR + δ with R = ½ min ‖ξ_μ − ξ_ν‖: two close patterns opposite a third."""
    c, s = math.cos(0.1), math.sin(0.1)
    patterns, target = torch.tensor([[1.0, 0.0], [-c, s], [-c, -s]]), torch.tensor([0])
    radius = theory.radius(patterns)
    assert radius == pytest.approx(0.099833, abs=1e-6)
    assert theory.separation(patterns)[0].item() == pytest.approx(1.995004, abs=1e-6)
    error = errors(patterns, patterns[:1], target, 4.0).item()
    bounds = theory.retrieval_error_bounds(patterns, patterns[:1], target, 4.0, radius)
    assert error == pytest.approx(0.019314, abs=1e-6)
    assert bounds.printed.item() == pytest.approx(0.002988, abs=1e-6)
    assert bounds.valid.item() == pytest.approx(0.020962, abs=1e-6)
    assert bounds.dense.item() < error  # and the dense model's own bound is below OutEffHop's error
    assert errors(patterns, patterns[:1], target, 4.0, n=0).item() <= bounds.dense.item()


@pytest.mark.parametrize("count", [3, 30, 1000])
def test_printed_error_bound_fails_for_any_number_of_patterns(count, rng):
    """One pattern, all others gathered opposite: the error is above 1 − γ ~ e^−β, the bound falls as e^−2β."""
    others = -torch.eye(16)[0] + 0.01 * torch.randn(count - 1, 16, generator=rng)
    patterns, target, beta = unit(torch.cat([torch.eye(16)[:1], others])), torch.tensor([0]), 12.0
    error = errors(patterns, patterns[:1], target, beta)
    for radius in (None, theory.radius(patterns)):
        bounds = theory.retrieval_error_bounds(patterns, patterns[:1], target, beta, radius)
        assert (bounds.printed < error / 2).all()
        assert (bounds.valid >= error).all()


def test_printed_gap_counterexample():
    """Δ̃ as printed, ⟨ξ_μ, x⟩ − max ⟨ξ_μ, ξ_ν⟩, does not bound even the dense error; ⟨ξ_ν, x⟩ is meant."""
    patterns, query, target = torch.eye(2), torch.tensor([[0.9, 0.4]]), torch.tensor([0])
    assert (query[0] - patterns[0]).norm() < theory.radius(patterns)
    printed = 2 * math.exp(-10 * (0.9 - 0.0))
    error = errors(patterns, query, target, 10.0, n=0).item()
    assert printed == pytest.approx(0.000247, abs=1e-6)
    assert error == pytest.approx(0.009465, abs=1e-6)
    assert theory.retrieval_error_bounds(patterns, query, target, 10.0).dense.item() >= error


def violation_rate(name: str, count: int, beta: float, rng: torch.Generator) -> float:
    """How often the error exceeds the printed bound (sharp form) for queries in the spheres S_μ; d = 16."""
    above = torch.zeros(())
    for _ in range(20):
        patterns = family(name, count, 16, rng)
        target = torch.randint(count, (50,), generator=rng)
        queries = in_balls(patterns, target, theory.radius(patterns), rng)
        bounds = theory.retrieval_error_bounds(patterns, queries, target, beta)
        exceeds = errors(patterns, queries, target, beta) > bounds.printed + ROUND
        assert not (exceeds & bounds.printed_proved).any()
        above += exceeds.sum()
    return above.item() / 1000


PRINTED_RATES = {
    ("sphere", 2): (0.08, 0.51),
    ("sphere", 3): (0.0, 0.05),
    ("sphere", 10): (0.0, 0.0),
    ("antipodal", 2): (1.0, 1.0),
    ("antipodal", 10): (0.0, 0.0),
    ("simplex", 3): (0.05, 0.52),
    ("simplex", 10): (0.0, 0.0),
    ("images", 2): (0.0, 0.0),
    ("images", 10): (0.0, 0.0),
}


@pytest.mark.parametrize(("name", "count"), PRINTED_RATES)
def test_where_the_printed_bound_holds(name, count, rng):
    for beta, rate in zip((1.0, 4.0), PRINTED_RATES[name, count], strict=True):
        measured = violation_rate(name, count, beta, rng)
        if rate in (0.0, 1.0):
            assert measured == rate
        else:
            assert measured == pytest.approx(rate, abs=0.03)


def test_outeffhops_valid_bound_is_lower_only_where_both_are_trivial(rng):
    patterns = sphere(20, 16, rng)
    target = torch.randint(20, (500,), generator=rng)
    queries = patterns[target] + 0.3 * torch.randn(500, 16, generator=rng)
    seen = set()
    for beta in (0.5, 4.0, 16.0):
        bounds = theory.retrieval_error_bounds(patterns, queries, target, beta)
        trivial = bounds.dense > 1.0  # ‖ξ_μ‖ = 1: answering 0 would do as well
        assert ((bounds.valid < bounds.dense) == trivial).all()
        seen |= set(trivial.tolist())
    assert seen == {True, False}


# Well-separation


def test_threshold_is_where_the_bound_equals_the_radius(rng):
    patterns, radius = 3 * sphere(5, 30, rng), 0.2
    for beta, gap in ((1.0, 0.0), (2.0, 0.3)):
        threshold = theory.separation_threshold(5, beta, 3.0, radius, gap)
        assert 2 * 3 * 4 * math.exp(-beta * (threshold - 2 * 3 * radius + gap)) == pytest.approx(radius)
        holds = theory.well_separated(patterns, beta, radius, gap)
        assert (holds == (theory.separation(patterns) >= threshold)).all()
    assert theory.well_separated(patterns, 4.0, radius).all()
    assert not theory.well_separated(patterns, 0.5, radius).any()
    dense = theory.ball_error_bound(patterns, 1.0, radius, n=0) <= radius
    assert (dense == theory.well_separated(patterns, 1.0, radius)).all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [2, 6, 30])
def test_the_papers_radius_never_separates_the_closest_pair(name, count, rng):
    patterns = family(name, count, 12, rng)
    radius = theory.radius(patterns)
    for beta in (0.1, 1.0, 10.0, 1e3, 1e6):
        dense = theory.well_separated(patterns, beta, radius)
        gap = theory.delta(patterns, patterns, beta)  # δ at the patterns themselves, [M]
        assert not dense.all()
        assert not all(theory.well_separated(patterns, beta, radius, g)[i] for i, g in enumerate(gap.tolist()))
    if name not in ("gaussian", "images"):  # unequal norms may leave Δ_μ < 0; else a free radius separates
        assert theory.well_separated(patterns, 1e3, 1e-3).all()


def test_paper_condition_holds_where_the_sphere_is_not_kept():
    """The printed condition with δ: it promises ‖T(x) − ξ_μ‖ ≤ R at x = ξ_μ, and the error is larger."""
    patterns, beta, radius = torch.tensor([[1.0], [-1.0]]), 4.0, 0.01
    gap = theory.delta(patterns, patterns[:1], beta).item()
    assert theory.separation_threshold(2, beta, 1.0, radius, gap) == pytest.approx(1.340043, abs=1e-6)
    assert theory.well_separated(patterns, beta, radius, gap).all()  # Δ = 2
    assert errors(patterns, patterns[:1], torch.tensor([0]), beta).item() > radius  # 0.0186
    assert (theory.ball_error_bound(patterns, beta, radius) > radius).all()


# The corollary


def corollary_cases(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """v = T_dense(x), w = ξ_μ and γ for unit patterns and unit queries at many β."""
    rows = []
    for beta in (0.1, 0.5, 1.0, 3.0, 10.0):
        patterns = sphere(10, 8, rng)
        target = torch.randint(10, (400,), generator=rng)
        noise = torch.rand(400, 1, generator=rng) * torch.randn(400, 8, generator=rng)
        queries = unit(patterns[target] + noise)
        rows.append((update(patterns, queries, beta, n=0), patterns[target], theory.gamma(patterns, queries, beta)))
    v, w, gamma = (torch.cat(column) for column in zip(*rows, strict=True))
    return v, w, gamma


def test_corollary_exact_condition_is_equivalent_and_implies_the_printed_one(rng):
    v, w, gamma = corollary_cases(rng)
    conditions = theory.corollary_conditions(v, w, gamma)
    closer = (gamma.unsqueeze(-1) * v - w).norm(dim=-1) <= (v - w).norm(dim=-1)
    assert (conditions.exact == closer).all()
    assert (conditions.printed | ~conditions.exact).all()
    assert closer.double().mean().item() == pytest.approx(0.24, abs=0.03)
    assert conditions.printed.double().mean().item() == pytest.approx(0.94, abs=0.03)
    wrong = (conditions.printed & ~closer).double().mean().item()
    assert wrong == pytest.approx(0.70, abs=0.03)


def test_corollary_counterexample():
    """Orthogonal unit patterns, the query between them, β = 1: (γ+1)/2 = 0.901 ≥ cos α = 0.707, yet farther."""
    patterns = torch.eye(2)
    query = unit(torch.ones(2))
    v, w, gamma = update(patterns, query, 1.0, n=0), patterns[0], theory.gamma(patterns, query, 1.0)
    assert (gamma.item() + 1) / 2 == pytest.approx(0.901112, abs=1e-6)
    assert torch.cosine_similarity(v, w, dim=0).item() == pytest.approx(0.707107, abs=1e-6)
    conditions = theory.corollary_conditions(v, w, gamma)
    assert conditions.printed.item()
    assert not conditions.exact.item()
    assert (gamma * v - w).norm().item() == pytest.approx(0.720803, abs=1e-6)
    assert (v - w).norm().item() == pytest.approx(0.707107, abs=1e-6)


def test_corollary_at_the_two_ends_of_retrieval(rng):
    w, gamma = sphere(100, 8, rng), torch.rand(100, generator=rng)
    done = theory.corollary_conditions(w, w, gamma)  # v = w: the dense model has retrieved
    assert not done.exact.any()
    assert not done.printed.any()
    v = sphere(100, 8, rng)
    against = v - ((v * w).sum(-1, keepdim=True) + 0.1) * w  # ⟨v, w⟩ < 0: a wrong answer is best shrunk
    assert theory.corollary_conditions(against, w, gamma).exact.all()


# Capacity


@pytest.mark.parametrize(("dim", "k", "c"), [(20, 3.0, 3.1546), (75, 1.0, 1.3718)])
def test_capacity_is_theorem_a5_of_ramsauer(dim, k, c):
    bound = theory.capacity_bound(dim, 1.0, k * math.sqrt(dim - 1), 0.001)
    assert bound.c == pytest.approx(c, abs=1e-4)
    assert bound.b == pytest.approx(2 * k**2 / 5)
    assert bound.c == pytest.approx(bound.b / lambertw(math.exp(bound.a) * bound.b).real)
    assert bound.a * bound.c + bound.c * math.log(bound.c) == pytest.approx(bound.b)
    assert bound.patterns == pytest.approx(math.sqrt(0.001) * bound.c ** ((dim - 1) / 4))


@pytest.mark.parametrize("count", [3, 10])
def test_smallest_angle_of_random_points(count, rng):
    """P(α_min < t M^{−2/(d−1)}) ≤ κ t^{d−1} / 2; at d = 3 κ = 1/4 and the bound is within reach."""
    points = unit(torch.randn(4000, count, 3, generator=rng))
    cosines = (points @ points.mT).masked_fill(torch.eye(count, dtype=torch.bool), -1).amax((1, 2))
    for t in (0.5, 1.0):
        rate = (cosines.clamp(max=1).acos() < t / count).double().mean().item()
        assert 0.3 * t**2 / 8 < rate <= t**2 / 8 + 0.01


CAPACITY = [(20, 3.0, 1.0, 0.1), (32, 2.0, 1.0, 0.1), (16, 4.0, 1.0, 0.2), (16, 4.0, 0.5, 0.05), (10, 5.0, 2.0, 0.2)]


@pytest.mark.parametrize(("dim", "k", "beta", "failure"), CAPACITY)
@pytest.mark.parametrize("optimal", [False, True])
def test_capacity_bound_on_random_spheres(dim, k, beta, failure, optimal, rng):
    norm = k * math.sqrt(dim - 1)
    best = 1 / (2 * beta * norm)
    bound = theory.capacity_bound(dim, beta, norm, failure, radius=best if optimal else None)
    assert not bound.note
    count = int(bound.patterns)
    radius = best if optimal else 1 / (beta * count * norm)
    separated = stored = control = 0
    for _ in range(60):
        patterns = norm * sphere(count, dim, rng)
        separated += bool(theory.well_separated(patterns, beta, radius).all())
        kept = bool((theory.ball_error_bound(patterns, beta, radius) <= radius).all())
        stored += kept
        weaker = radius if optimal else 16 * radius
        control += bool(theory.well_separated(patterns, beta / 16, weaker).all())
        target = torch.arange(count)
        assert theory.radius(patterns) > radius or not kept  # the balls are disjoint
        queries = in_balls(patterns, target, radius, rng)
        for n in (0.0, 1.0):
            assert not kept or (errors(patterns, queries, target, beta, n) <= radius).all()
    assert separated / 60 >= 1 - failure
    assert stored / 60 >= 1 - failure
    assert control / 60 < 1 - failure  # the same patterns at β/16 are not separated: the check can fail


def test_free_radius_is_best_at_one_over_two_beta_m():
    best = 1 / (2 * 0.5 * 12.0)
    at_best = theory.capacity_bound(16, 0.5, 12.0, 0.05, radius=best)
    assert at_best.patterns > theory.capacity_bound(16, 0.5, 12.0, 0.05).patterns
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert theory.capacity_bound(16, 0.5, 12.0, 0.05, radius=factor * best).patterns < at_best.patterns
    assert at_best.a == pytest.approx(4 / 15 * (math.log(4 * math.sqrt(0.05) * 0.5 * 144) + 1))


@pytest.mark.parametrize(("radius", "power"), [(None, 0.5), (0.05, 1.0)])
def test_delta_would_raise_capacity_by_at_most_one_over_gamma(radius, power, rng):
    dim, beta, norm, failure = 20, 1.0, 3 * math.sqrt(19), 0.001
    dense = theory.capacity_bound(dim, beta, norm, failure, radius=radius).patterns
    for gap in (1e-6, 0.1, 1.0, 5.0):  # βδ = −log γ
        claimed = theory.capacity_bound(dim, beta, norm, failure, radius=radius, delta=gap).patterns
        assert 1 < claimed / dense <= math.exp(power * beta * gap)
    patterns = norm * sphere(10, dim, rng)
    gap = theory.delta(patterns, patterns, beta)
    assert (beta * gap <= 1.0001 * math.exp(-beta * norm**2)).all()  # e^−171 at the patterns themselves
    assert (gap > 0).all()


def test_capacity_of_large_patterns_is_past_all_numbers():
    """d = 4096, the first example of Ramsauer et al. otherwise: c is as before, and c^1023.75 overflows."""
    norm = 3 * math.sqrt(4095)
    for radius in (None, 1 / (2 * norm)):
        bound = theory.capacity_bound(4096, 1.0, norm, 0.001, radius=radius)
        assert bound.a * bound.c + bound.c * math.log(bound.c) == pytest.approx(bound.b)
        assert bound.patterns == math.inf
        assert not bound.note
    assert theory.capacity_bound(20, 1.0, 3.0, 0.001, delta=1e5).patterns == math.inf


def test_capacity_does_not_change_with_the_unit_of_length():
    """ξ → sξ, β → β/s², R → sR, δ → s²δ leaves every weight as it was."""
    here = theory.capacity_bound(16, 1.0, 12.0, 0.1, radius=0.05, delta=0.2)
    there = theory.capacity_bound(16, 1.0 / 9, 36.0, 0.1, radius=0.15, delta=1.8)
    assert here.patterns == pytest.approx(there.patterns)


@pytest.mark.parametrize("failure", [0.001, 0.5, 1.0])
def test_printed_capacity_has_no_value(failure):
    norm = 3 * math.sqrt(19)
    printed = theory.printed_capacity_bound(20, 1.0, norm, failure, radius=0.04, delta=0.1)
    assert math.isnan(printed.patterns)
    assert "not positive" in printed.note
    assert failure != 0.001 or "-8279.63" in printed.note
    valid = theory.capacity_bound(20, 1.0, norm, failure, radius=0.04)
    assert valid.patterns > 10
    assert not valid.note
    assert printed.b == pytest.approx(valid.b)


def test_capacity_says_when_it_says_nothing():
    few = theory.capacity_bound(20, 1.0, 3.0, 0.9)
    assert few.patterns < 2
    assert "fewer than 2" in few.note
    # β m² = 0.01: the formula gives 4.29 patterns, each "stored" in a ball of radius 23 around the unit sphere
    wide = theory.capacity_bound(20, 0.01, 1.0, 0.001)
    assert wide.patterns == pytest.approx(4.290, abs=1e-3)
    assert "overlap" in wide.note


def test_outeffhop_forgets_where_the_dense_model_remembers():
    """±1 at β = 1.3: dense keeps x = tanh(1.3x), OutEffHop falls to 0 (its turning point is β = 1.5)."""
    patterns = torch.tensor([[1.0], [-1.0]])
    dense = ours = patterns
    for _ in range(2000):
        dense, ours = update(patterns, dense, 1.3, n=0), update(patterns, ours, 1.3)
    torch.testing.assert_close(dense.flatten(), torch.tensor([0.7521, -0.7521]), rtol=0, atol=1e-4)
    assert ours.abs().max() < 1e-9


# Generalization


def layer(y: Tensor, q: Tensor, wk: Tensor, wv: Tensor, beta: float) -> Tensor:
    """f_hop(Y, q) = W̃_Vᵀ Yᵀ softmax1(β Y W_K q): Y [M, a], q [d] → [d]."""
    return wv.T @ y.T @ softmax1(beta * (y @ wk @ q))


def test_softmax1_is_1_lipschitz_from_max_norm_to_sum_norm(rng):
    largest = 0.0
    for scale in (0.01, 1.0, 10.0):
        a = scale * torch.randn(20000, 6, generator=rng)
        b = a + torch.rand(20000, 1, generator=rng) * torch.randn(20000, 6, generator=rng).sign()
        ratio = (softmax1(a) - softmax1(b)).norm(p=1, dim=-1) / (a - b).abs().amax(-1)
        assert ratio.max() <= 1.0
        largest = max(largest, ratio.max().item())
    assert largest > 0.8  # the paper's 2 is valid and twice too large
    high, step = torch.tensor([30.0, 30.0]), torch.tensor([1e-3, -1e-3])  # 1 is attained in the limit
    assert ((softmax1(high + step) - softmax1(high)).norm(p=1) / 1e-3).item() == pytest.approx(1.0, abs=1e-5)


def test_jacobian_of_softmax1_in_the_1_1_norm(rng):
    for scale in (0.1, 1.0, 10.0):
        x = scale * torch.randn(7, generator=rng)
        p = softmax1(x)
        entries = torch.autograd.functional.jacobian(softmax1, x).abs().sum()
        torch.testing.assert_close(entries, p.sum() + p.sum() ** 2 - 2 * p.square().sum())
        assert entries < 2 * (p * (1 - p)).sum() <= 2


@pytest.mark.parametrize("constant", [1.0, 2.0])
def test_layer_is_lipschitz_in_its_weights(constant, rng):
    for _ in range(200):
        y, q, beta = torch.randn(6, 5, generator=rng), unit(torch.randn(4, generator=rng)), 0.7
        wk, wv = torch.randn(2, 5, 4, generator=rng), torch.randn(2, 5, 4, generator=rng)
        bounds = [theory.norm_bounds(k, v, y) for k, v in zip(wk, wv, strict=True)]
        b_v = max(bound.value for bound in bounds)
        moved = (layer(y, q, wk[0], wv[0], beta) - layer(y, q, wk[1], wv[1], beta)).norm()
        scores = beta * (y @ (wk[0] - wk[1]) @ q).abs().max()
        values = (y @ (wv[0] - wv[1])).norm(dim=1).max()
        assert moved <= constant * b_v * bounds[0].memory * scores + values


def test_norm_bounds_by_hand():
    weight = torch.tensor([[3.0, 0.0], [4.0, 2.0]])
    bounds = theory.norm_bounds(weight, torch.diag(torch.tensor([1.0, 7.0])), torch.tensor([[0.0, 2.0], [0.6, 0.8]]))
    assert (bounds.key_21, bounds.value, bounds.value_21, bounds.memory) == pytest.approx((7.0, 7.0, 8.0, 2.0))
    assert bounds.key == pytest.approx(torch.linalg.svdvals(weight)[0].item())


def test_generalization_terms_by_hand():
    bounds = theory.NormBounds(key=1.0, key_21=2.0, value=3.0, value_21=4.0, memory=5.0)
    log = math.log(8 * 100 * 10)
    printed = theory.generalization_terms(bounds, 0.5, 8, 100, 10, 0.05, printed=True)
    assert printed.e1 == pytest.approx((4 * 9 * 25 * (0.5 * 2) ** 2 * log) ** (1 / 3))
    assert printed.e2 == pytest.approx((16 * log) ** (1 / 3))
    assert printed.bracket == pytest.approx(math.sqrt((printed.e1 + printed.e2) ** 3) + math.sqrt(math.log(20)))
    assert printed.rate == pytest.approx(printed.bracket / 10)
    ours = theory.generalization_terms(bounds, 0.5, 8, 100, 10, 0.05)
    assert ours.e1 == pytest.approx((9 * 625 * (0.5 * 2) ** 2 * log) ** (1 / 3))
    assert ours.e2 == pytest.approx((25 * 16 * log) ** (1 / 3))


def test_allocation_of_the_two_covers_is_optimal(rng):
    """min α₁/x₁² + α₂/x₂² over β₁x₁ + β₂x₂ = C is (Σ αᵢ^{1/3} βᵢ^{2/3})³ / C²."""
    alpha, weight = torch.rand(2, generator=rng) + 0.1, torch.rand(2, generator=rng) + 0.1
    total = 1.7
    best = (alpha ** (1 / 3) * weight ** (2 / 3)).sum() ** 3 / total**2
    share = torch.linspace(1e-3, 1 - 1e-3, 20001)
    values = alpha[0] / (share * total / weight[0]) ** 2 + alpha[1] / ((1 - share) * total / weight[1]) ** 2
    assert best <= values.min()
    torch.testing.assert_close(best, values.min(), rtol=1e-6, atol=0)


def test_printed_generalization_counterexample(rng):
    """Y → sY, W → W/s leaves the layer as it was; the printed terms vanish with s, the valid ones stay."""
    y, q = torch.randn(6, 5, generator=rng), unit(torch.randn(4, generator=rng))
    wk, wv = torch.randn(5, 4, generator=rng), torch.randn(5, 4, generator=rng)
    before = layer(y, q, wk, wv, 0.7)
    at_one = theory.norm_bounds(wk, wv, y)
    for s in (10.0, 1e3):
        torch.testing.assert_close(layer(s * y, q, wk / s, wv / s, 0.7), before)
        scaled = theory.norm_bounds(wk / s, wv / s, s * y)
        for printed, expected in ((True, s ** (-2 / 3)), (False, 1.0)):
            one = theory.generalization_terms(at_one, 0.7, 4, 1000, 6, 0.05, printed=printed)
            other = theory.generalization_terms(scaled, 0.7, 4, 1000, 6, 0.05, printed=printed)
            assert other.e1 / one.e1 == pytest.approx(expected)
            assert other.e2 / one.e2 == pytest.approx(expected)


def test_rate_falls_with_samples_and_grows_with_the_logarithm_of_the_memory():
    bounds = theory.NormBounds(key=1.0, key_21=1.0, value=1.0, value_21=1.0, memory=1.0)

    def rate(samples: int, patterns: int) -> float:
        return theory.generalization_terms(bounds, 1.0, 64, samples, patterns, 0.05).rate

    assert rate(10_000, 100) < rate(100, 100) / 8
    assert rate(100, 100**2) < 1.3 * rate(100, 100)


# Errors


def test_no_queries_have_no_bounds():
    patterns, none = torch.eye(3), torch.zeros(2, 0, 3)
    for radius in (None, 0.1):
        bounds = theory.retrieval_error_bounds(patterns, none, torch.zeros(2, 0, dtype=torch.long), 1.0, radius)
        assert bounds.dense.shape == bounds.valid.shape == bounds.printed_proved.shape == (2, 0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: theory.separation([[1.0], [2.0]]), "patterns is a list"),
        (lambda: theory.radius(torch.eye(3).long()), "patterns has dtype torch.int64"),
    ],
)
def test_patterns_of_a_wrong_kind_are_named(call, says):
    with pytest.raises(TypeError, match=says):
        call()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: theory.separation(torch.zeros(1, 3)), r"patterns of shape \(1, 3\)"),
        (lambda: theory.gamma(torch.zeros(2, 3), torch.zeros(4), 1.0), r"queries of shape \(4,\)"),
        (lambda: theory.gamma(torch.zeros(2, 3), torch.zeros(()), 1.0), r"queries of shape \(\)"),
        (lambda: theory.gamma(torch.zeros(2, 3), torch.zeros(3), 0.0), "beta=0.0"),
        (lambda: theory.separation(torch.tensor([[1.0], [math.nan]])), "1 of 2 rows hold NaN"),
        (lambda: theory.ball_error_bound(torch.eye(2), 1.0, 0.1, n=-1), "n=-1"),
        (lambda: theory.separation_threshold(1, 1.0, 1.0, 1.0), "count=1"),
        (lambda: theory.well_separated(torch.ones(2, 3), 1.0, 0.0), r"radius=0.0"),
        (lambda: theory.capacity_bound(1, 1.0, 1.0, 0.1), "dim=1"),
        (lambda: theory.capacity_bound(5, 1.0, 1.0, 1.5), "failure=1.5"),
        (lambda: theory.norm_bounds(torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(4, 5)), "memory"),
        (
            lambda: theory.retrieval_error_bounds(torch.eye(2), torch.eye(2), torch.tensor([0, 2]), 1.0),
            r"target of shape \(2,\) with the value 2",
        ),
        (
            lambda: theory.retrieval_error_bounds(torch.eye(2), torch.eye(2), torch.tensor([], dtype=torch.long), 1.0),
            r"target of shape \(0,\).*shape \(2,\)",
        ),
        (lambda: theory.retrieval_error_bounds(torch.eye(2), torch.eye(2), torch.tensor([0, 0]), 1.0, 0.5), "radius"),
    ],
)
def test_errors_name_the_argument(call, says):
    with pytest.raises(ValueError, match=says):
        call()
