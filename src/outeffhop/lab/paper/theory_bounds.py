"""Section 3: bounds against measured errors; which claims hold as printed and which do not.

docs/theory.md has the counterexamples, and the README of outeffhop/memory the proofs. The numbers here are from random
memories in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from outeffhop.lab.paper import theory_result
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings, Values
from outeffhop.lab.paper.running import one_thread
from outeffhop.memory import HopfieldMemory, theory

__all__ = ["EXPERIMENT"]

DIM = 16
BETAS = (0.5, 1.0, 2.0, 4.0, 8.0)
FAMILIES = ("sphere", "antipodal", "simplex", "cube")
COUNTS = (2, 4, 10)
SPHERES = ((20, 3.0, 1.0, 0.1), (16, 4.0, 0.5, 0.05), (10, 5.0, 2.0, 0.2))  # d, K = m/√(d − 1), β, p
ROUND = 1e-12


def cells(settings: Settings) -> list[Cell]:
    memories, queries = (1, 5) if settings.quick else (20, 50)
    sizes = {"memories": memories, "queries": queries, "betas": list(BETAS)}
    return [
        Cell(f"{topic}-seed{seed}", {"topic": topic, "seed": seed, **sizes})
        for topic in TOPICS
        for seed in range(1 if settings.quick else settings.seeds)
    ]


@one_thread()
def measure(cell: Cell, settings: Settings) -> Values:
    rng = torch.Generator().manual_seed(cell.values["seed"])
    return TOPICS[cell.values["topic"]](rng, cell.values["memories"], cell.values["queries"])


def family(name: str, count: int, rng: torch.Generator) -> Tensor:
    """M patterns [M, d]."""
    if name == "cube":  # as images are: no negative product
        return torch.rand(count, DIM, generator=rng, dtype=torch.float64)
    if name == "simplex":  # as far from each other as unit patterns can be
        return _unit(torch.eye(count, dtype=torch.float64) - 1 / count)
    if name == "antipodal":
        half = _gaussian(count // 2, rng)
        return _unit(torch.cat([half, -half]))
    return _unit(_gaussian(count, rng))


def near(patterns: Tensor, radius: float, queries: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries in balls around patterns, half of them on the boundary, and the pattern that each belongs to."""
    target = torch.randint(len(patterns), (queries,), generator=rng)
    direction = _unit(torch.randn(queries, patterns.shape[1], generator=rng, dtype=torch.float64))
    distance = torch.rand(queries, 1, generator=rng, dtype=torch.float64).mul(2).clamp(max=1)
    return patterns[target] + radius * distance * direction, target


def bounds(rng: torch.Generator, memories: int, queries: int) -> Values:
    """Errors of one update from S_μ against their bounds, for each family, size and β."""
    found = {}
    for name in FAMILIES:
        for count in COUNTS:
            drawn = [family(name, count, rng) for _ in range(memories)]
            asked = [(p, *near(p, theory.radius(p), queries, rng)) for p in drawn]
            for beta in BETAS:
                found[f"{name} {count} {beta:g}"] = _against_bounds(asked, beta)
    return found


def _against_bounds(asked: list[tuple[Tensor, Tensor, Tensor]], beta: float) -> Values:
    parts = []
    for patterns, x, target in asked:
        limit = theory.retrieval_error_bounds(patterns, x, target, beta)
        dense, ours = (_error(patterns, x, target, beta, method) for method in ("vanilla", "outeffhop"))
        parts.append(torch.stack([dense, ours, limit.dense, limit.printed, limit.valid]))
    dense, ours, dense_limit, printed, valid = torch.cat(parts, 1)
    return {
        "dense_exceeds": _share(dense > dense_limit + ROUND),
        "printed_exceeds": _share(ours > printed + ROUND),
        "valid_exceeds": _share(ours > valid + ROUND),
        "closer": _share(ours < dense - ROUND),
        "medians": {
            "dense": float(dense.median()),
            "outeffhop": float(ours.median()),
            "printed": float(printed.median()),
            "valid": float(valid.median()),
        },
    }


def dynamics(rng: torch.Generator, memories: int, queries: int) -> Values:
    """The energy along retrieval, and one update of OutEffHop against γ times a dense one."""
    rises, resting, apart, total = 0, 0, 0.0, 0
    for index in range(memories):
        patterns = family(FAMILIES[index % len(FAMILIES)], 10, rng)
        beta = BETAS[index % len(BETAS)]
        x = torch.randn(queries, patterns.shape[1], generator=rng, dtype=torch.float64)
        ours, dense = (HopfieldMemory(patterns, beta, method) for method in ("outeffhop", "vanilla"))
        along = ours.retrieve(x, None, tol=1e-9, max_steps=3000, trace=True)
        steps = along.energy.diff(dim=0) if along.energy is not None else x.new_zeros(0)
        rises += int((steps > 1e-9).sum())
        resting += int(along.converged.sum())
        shrunk = theory.gamma(patterns, x, beta)[:, None] * dense.retrieve(x).state
        apart = max(apart, float((ours.retrieve(x).state - shrunk).abs().max()))
        total += queries
    return {"rises": rises, "resting": resting, "queries": total, "apart": apart}


def corollary(rng: torch.Generator, memories: int, queries: int) -> Values:
    """Noisy queries of normalized patterns: when OutEffHop is closer, and when the printed condition says so."""
    rows = []
    for index in range(memories):
        patterns = _unit(_gaussian(10, rng))
        beta = 0.1 * 10 ** (2 * index / max(1, memories - 1))  # from 0.1 to 10
        target = torch.randint(10, (queries,), generator=rng)
        x = _unit(patterns[target] + 0.5 * _gaussian(queries, rng) / DIM**0.5)
        dense = HopfieldMemory(patterns, beta, "vanilla").retrieve(x).state
        mass = theory.gamma(patterns, x, beta)
        said = theory.corollary_conditions(dense, patterns[target], mass)
        closer = (mass[:, None] * dense - patterns[target]).norm(dim=1) <= (dense - patterns[target]).norm(dim=1)
        rows.append(torch.stack([closer, said.printed, said.printed & ~closer, said.exact != closer]))
    closer, printed, wrong, differs = torch.cat(rows, 1)
    return {
        "closer": _share(closer),
        "printed": _share(printed),
        "printed_wrong": _share(wrong),
        "exact_wrong": _share(differs),
    }


def separation(rng: torch.Generator, memories: int, queries: int) -> Values:
    """How many memories of 10 patterns meet the storage condition with the paper's R, at any of the β."""
    met, largest = 0, 64.0
    for _ in range(memories):
        patterns = family("sphere", 10, rng)
        radius = theory.radius(patterns)
        met += any(bool(theory.well_separated(patterns, beta, radius).all()) for beta in (*BETAS, largest))
    return {"met": met, "memories": memories}


def capacity(rng: torch.Generator, memories: int, queries: int) -> Values:
    """Random memories with as many patterns as the valid bound allows: do both models store them?"""
    found = {}
    for dim, k, beta, failure in SPHERES:
        norm = k * (dim - 1) ** 0.5
        bound = theory.capacity_bound(dim, beta, norm, failure)
        printed = theory.printed_capacity_bound(dim, beta, norm, failure, 1 / (beta * bound.patterns * norm))
        count = int(bound.patterns)
        kept = {"vanilla": 0, "outeffhop": 0}
        for _ in range(memories):
            patterns = norm * _unit(torch.randn(count, dim, generator=rng, dtype=torch.float64))
            radius = 1 / (beta * count * norm)
            x, target = near(patterns, radius, queries, rng)
            for method in kept:
                kept[method] += bool((_error(patterns, x, target, beta, method) <= radius).all())
        found[f"d = {dim}, K = {k:g}, β = {beta:g}, p = {failure:g}"] = {
            "bound": bound.patterns,
            "printed": printed.patterns,
            "note": printed.note,
            "memories": memories,
            **kept,
        }
    return found


def examples(rng: torch.Generator, memories: int, queries: int) -> Values:
    """Small cases, each of which decides a claim."""
    pair = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    rest = {
        method: float(HopfieldMemory(pair, 1.3, method).retrieve(pair[:1], None, tol=1e-12).state)
        for method in ("vanilla", "outeffhop")
    }
    key, value = _gaussian(8, rng).T[:8], _gaussian(8, rng).T[:8]  # [8, 8] each
    memory = torch.randn(32, 8, generator=rng, dtype=torch.float64)
    terms = {}
    for scale in (1.0, 10.0):  # the same layer: the weights shrink by the factor that the memory grows by
        norms = theory.norm_bounds(key / scale, value / scale, memory * scale)
        for printed in (True, False):
            name = f"{'printed' if printed else 'valid'} {scale:g}"
            terms[name] = theory.generalization_terms(norms, 1.0, 8, 1000, 32, 0.05, printed=printed).e1
    return {"rest": rest, "terms": terms}


TOPICS: dict[str, Callable[[torch.Generator, int, int], Values]] = {
    "bounds": bounds,
    "dynamics": dynamics,
    "corollary": corollary,
    "separation": separation,
    "capacity": capacity,
    "examples": examples,
}


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    seeds = {topic: [v for key, v in found.items() if key.startswith(f"{topic}-seed")] for topic in TOPICS}
    theory_result.draw(seeds["bounds"], BETAS, folder)
    return EXPERIMENT.result(
        theory_result.tables(seeds["bounds"], seeds["capacity"]),
        theory_result.FIGURES,
        theory_result.verdicts(seeds),
        {
            "patterns": f"random, size {DIM}, double precision; families {', '.join(FAMILIES)}",
            "seeds": len(seeds["bounds"]),
        },
    )


def _error(patterns: Tensor, x: Tensor, target: Tensor, beta: float, method: str) -> Tensor:
    return (HopfieldMemory(patterns, beta, method).retrieve(x).state - patterns[target]).norm(dim=1)


def _gaussian(count: int, rng: torch.Generator) -> Tensor:
    return torch.randn(count, DIM, generator=rng, dtype=torch.float64)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def _share(condition: Tensor) -> float:
    return float(condition.double().mean())


EXPERIMENT = Experiment(
    "theory",
    "Section 3",
    "The paper's bounds against measured errors, on random memories: which claims hold as printed.",
    cells,
    measure,
    conclude,
)
