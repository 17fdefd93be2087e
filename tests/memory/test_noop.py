"""The no-op classification Λ, and that softmax_n in d dimensions is softmax with Ω in d + 1."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from outeffhop.memory import HopfieldMemory, NoOp, noop


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_assign() -> None:
    by_index = NoOp.assign(6, [1, -1])
    assert by_index.outliers.tolist() == [False, True, False, False, False, True]
    assert (by_index.count, by_index.n) == (2, 1)
    by_mask = NoOp.assign(6, by_index.outliers, distinct=True)
    assert torch.equal(by_mask.outliers, by_index.outliers)
    assert by_mask.n == 2
    assert NoOp.assign(6, torch.tensor([1, 5])).count == 2
    none = NoOp.assign(6, [])
    assert (none.count, none.n, NoOp.assign(6, [], distinct=True).n) == (0, 1, 0)


def test_bad_assignments() -> None:
    with pytest.raises(ValueError, match="outliers holds 6 and there are 6"):
        NoOp.assign(6, [0, 6])
    with pytest.raises(ValueError, match=r"mask of shape \(3,\)"):
        NoOp.assign(6, [True, False, True])
    with pytest.raises(TypeError, match=r"outliers has dtype .*integers"):
        NoOp.assign(6, torch.tensor([0.5]))
    with pytest.raises(ValueError, match=r"int64 of shape \(2,\)"):
        NoOp(torch.tensor([0, 1]))
    with pytest.raises(TypeError, match="outliers is a list"):
        NoOp([True])  # type: ignore[arg-type]


def clusters() -> Tensor:
    """Two clusters of 5 around e₁ and e₂, and two loners: −e₃ and e₄, short."""
    patterns = torch.zeros(12, 6, dtype=torch.float64)
    patterns[:5, 0] = patterns[5:10, 1] = 3.0
    patterns[:10] += 0.2 * torch.randn(10, 6, dtype=torch.float64)
    patterns[10, 2], patterns[11, 3] = -1.0, 0.01
    return patterns


def by_similarity_reference(patterns: Tensor, threshold: float, share: float, cosine: bool) -> list[bool]:
    result = []
    for i, a in enumerate(patterns):
        dissimilar = 0
        for j, b in enumerate(patterns):
            score = a @ b / (a.norm() * b.norm() if cosine else 1.0)
            dissimilar += i != j and bool(score < threshold)
        result.append(dissimilar >= share * (len(patterns) - 1))
    return result


def test_by_similarity_finds_the_loners() -> None:
    found = NoOp.by_similarity(clusters(), 0.5)
    assert found.outliers.nonzero().squeeze(1).tolist() == [10, 11]
    # 4 of 11 others are like a pattern of a cluster, so each is unlike 7 of them
    assert NoOp.by_similarity(clusters(), 0.5, share=7 / 11).outliers.all()
    assert NoOp.by_similarity(clusters(), 0.5, share=7.1 / 11).count == 2
    assert NoOp.by_similarity(clusters(), 0.5, distinct=True).n == 2


@pytest.mark.parametrize("measure", ["cosine", "dot"])
@pytest.mark.parametrize("share", [0.4, 0.8, 1.0])
@pytest.mark.parametrize("threshold", [-0.2, 0.1, 0.6])
def test_by_similarity_against_loops(
    threshold: float, share: float, measure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns = torch.randn(23, 3, dtype=torch.float64)
    expected = by_similarity_reference(patterns, threshold, share, measure == "cosine")
    assert NoOp.by_similarity(patterns, threshold, share=share, measure=measure).outliers.tolist() == expected
    monkeypatch.setattr(noop, "_BLOCK", 50)
    assert NoOp.by_similarity(patterns, threshold, share=share, measure=measure).outliers.tolist() == expected


def test_by_similarity_edges() -> None:
    assert NoOp.by_similarity(torch.ones(1, 3), 2.0).count == 0
    assert NoOp.by_similarity(torch.zeros(4, 3), 0.5).count == 4  # nothing is similar to nothing
    assert NoOp.by_similarity(clusters().to(torch.bfloat16), 0.5).count == 2
    # the first is short, so unlike itself by inner product; that does not count: it is like the second
    short = torch.tensor([[0.1, 0.0], [10.0, 0.0], [0.0, 10.0]])
    assert NoOp.by_similarity(short, 0.5, measure="dot").outliers.tolist() == [False, False, True]
    # an angle has no unit of length
    for scale in (1e-13, 1e-100):
        assert NoOp.by_similarity(scale * clusters(), 0.5).outliers.nonzero().squeeze(1).tolist() == [10, 11]
    for wrong in (dict(share=0.0), dict(share=1.1), dict(measure="l2")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NoOp.by_similarity(torch.ones(3, 2), 0.5, **wrong)  # type: ignore[arg-type]


class Extended(NamedTuple):
    """Patterns and queries in d + 1 dimensions."""

    queries: Tensor  # x̄ = (x, 0)  [..., d + 1]
    patterns: Tensor  # ξ̄ = (ξ, ω), ω = 0 except for outliers  [M, d + 1]
    op: Tensor  # Λ(ξ̄) of the patterns that are not outliers, ξ̄_op  [M − K, d + 1]
    omega: Tensor  # Λ(ξ̄) of the outliers without repetition, Ω  [1 or K, d + 1]


def extend(patterns: Tensor, queries: Tensor, no_op: NoOp, C: float) -> Extended:
    """The paper's extra dimension, spelled out: Ω has the extra coordinate C, distinct ones C, 2C, 3C, …

    After an update the extra coordinate of a query is C times the no-op weight. ⟨Ω, x̄⟩ = 0 needs a 0 there, so it is
    dropped before the next update.
    """
    last = torch.zeros_like(patterns[:, :1])  # ω  [M, 1]
    heights = C * torch.arange(1, no_op.n + 1, dtype=patterns.dtype)  # [n]
    last[no_op.outliers, 0] = heights if no_op.distinct else heights.expand(no_op.count)
    extended = torch.cat([patterns, last], 1)
    omega = torch.cat([patterns.new_zeros(no_op.n, patterns.shape[1]), heights[:, None]], 1)
    x = torch.cat([queries, torch.zeros_like(queries[..., :1])], -1)
    return Extended(x, extended, extended[~no_op.outliers], omega)


@pytest.mark.parametrize("C", [1.0, -7.5])
@pytest.mark.parametrize("distinct", [False, True])
@pytest.mark.parametrize("outliers", [[], [4], [0, 3, 8]])
def test_extended_space(outliers: list[int], distinct: bool, C: float) -> None:
    patterns, x = torch.randn(11, 5, dtype=torch.float64), torch.randn(2, 6, 5, dtype=torch.float64)
    beta, classified = 1.7, NoOp.assign(11, outliers, distinct=distinct)
    bar = extend(patterns, x, classified, C)
    assert bar.patterns.shape == (11, 6)
    assert (bar.patterns[:, -1] != 0).nonzero().squeeze(1).tolist() == outliers
    assert torch.equal(bar.patterns[:, :-1], patterns)
    assert (bar.op[:, -1] == 0).all()
    assert bar.omega.shape == (len(outliers) if distinct else 1, 6)
    assert (bar.omega[:, :-1] == 0).all()
    assert bar.omega[:, -1].tolist() == [C * (i + 1) for i in range(len(bar.omega))]
    assert (bar.queries @ bar.omega.T == 0).all()

    # three updates with plain softmax over the ξ̄_op and Ω; the extra coordinate is dropped after each
    memory = HopfieldMemory(patterns, beta, "outeffhop", classified)
    everything = torch.cat([bar.op, bar.omega])
    state = bar.queries
    for step in (1, 2, 3):
        weights = torch.softmax(beta * state @ everything.T, -1)
        energy = -torch.logsumexp(beta * state @ everything.T, -1) / beta + 0.5 * state.square().sum(-1)
        new = weights @ everything
        result = memory.retrieve(x, step, trace=True)
        assert result.energy is not None
        torch.testing.assert_close(result.state, new[..., :-1], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(result.no_op, weights[..., len(bar.op) :].sum(-1), rtol=1e-12, atol=1e-13)
        if not distinct:
            torch.testing.assert_close(new[..., -1], C * result.no_op, rtol=1e-12, atol=1e-13)
        constant = math.log(len(everything)) / beta + 0.5 * bar.op.square().sum(1).max()
        torch.testing.assert_close(result.energy[step - 1], energy + constant, rtol=1e-12, atol=1e-12)
        state = torch.cat([new[..., :-1], torch.zeros_like(new[..., -1:])], -1)


@pytest.mark.parametrize("distinct", [False, True])
def test_outliers_stay_stored_and_leave_the_sum(distinct: bool) -> None:
    patterns, x = torch.randn(9, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    classified = NoOp.assign(9, [2, 5, 6], distinct=distinct)
    memory = HopfieldMemory(patterns, 1.5, no_op=classified)
    active = [0, 1, 3, 4, 7, 8]
    assert len(memory) == 9
    assert memory.indices.tolist() == active
    assert torch.equal(memory.patterns, patterns[active])
    assert torch.equal(memory.outliers, patterns[[2, 5, 6]])
    assert memory.n == (3 if distinct else 1)
    assert memory.association(x).shape == (5, 6)
    same = HopfieldMemory(patterns[active], 1.5, f"outeffhop(n={memory.n:g})")
    assert torch.equal(memory.retrieve(x, 3).state, same.retrieve(x, 3).state)
    torch.testing.assert_close(memory.association(x).sum(-1) + memory.retrieve(x).no_op, torch.ones_like(x[:, 0]))


@pytest.mark.parametrize("name", ["vanilla", "sparse", "gsh", "polynomial", "clipped-outeffhop"])
def test_models_without_no_op_patterns_lose_the_outliers(name: str) -> None:
    patterns, x = torch.randn(9, 4), torch.randn(5, 4)
    memory = HopfieldMemory(patterns, 1.5, name, NoOp.assign(9, [2, 5], distinct=True))
    same = HopfieldMemory(patterns[[0, 1, 3, 4, 6, 7, 8]], 1.5, name)
    assert torch.equal(memory.retrieve(x, 2).state, same.retrieve(x, 2).state)
    assert torch.equal(memory.outliers, patterns[[2, 5]])


def test_add_and_remove_keep_the_classification() -> None:
    patterns = torch.randn(9, 4)
    memory = HopfieldMemory(patterns[:5], no_op=NoOp.assign(5, [1, 3], distinct=True))
    memory.add(patterns[5:7]).add(patterns[7:], outliers=[True, False])
    assert memory.indices.tolist() == [0, 2, 4, 5, 6, 8]
    assert memory.n == 3
    memory.remove([0, 1])
    assert torch.equal(memory.outliers, patterns[[3, 7]])
    assert torch.equal(memory.patterns, patterns[[2, 4, 5, 6, 8]])
    assert memory.n == 2
    with pytest.raises(ValueError, match="outliers of all 2 patterns"):
        memory.remove([0, 2, 3, 4, 6])
    assert len(memory) == 7
    unclassified = HopfieldMemory(patterns[:5]).add(patterns[5:], outliers=[True] * 4)
    assert torch.equal(unclassified.outliers, patterns[5:])
    # 0 and 1 meant as a mask would be taken for indices
    for numbers in ([0, 1, 0, 0], torch.tensor([0, 1, 0, 0], dtype=torch.uint8)):
        with pytest.raises(TypeError, match=r"outliers has dtype .*int.*bool"):
            unclassified.add(patterns[5:], outliers=numbers)  # type: ignore[arg-type]
    assert len(unclassified) == 9


def test_outliers_no_longer_pull() -> None:
    """What the classification is for: a long outlier draws every query to itself, until Λ takes it out."""
    common = torch.nn.functional.one_hot(torch.tensor(0), 32).double()
    patterns = torch.nn.functional.normalize(common + torch.randn(20, 32, dtype=torch.float64) / 32**0.5, dim=1)
    unlike = torch.nn.functional.one_hot(torch.tensor(1), 32).double()
    stored = torch.cat([patterns, 20 * (unlike + 0.15 * common)[None]])
    queries = patterns + 0.05 * torch.randn(20, 32, dtype=torch.float64)
    no_op = NoOp.by_similarity(stored, 0.3)
    assert no_op.outliers.nonzero().tolist() == [[20]]

    def error(memory: HopfieldMemory) -> float:
        return float((memory.retrieve(queries).state - patterns).norm(dim=1).mean())

    assert error(HopfieldMemory(stored, 20.0, "dense")) > 10
    assert error(HopfieldMemory(stored, 20.0, "outeffhop")) > 10  # softmax1 alone does not help
    assert error(HopfieldMemory(stored, 20.0, "outeffhop", no_op)) < 0.1
