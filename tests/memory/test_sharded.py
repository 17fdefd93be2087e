"""ShardedMemory: 2 and 4 gloo processes agree with one, whoever holds how much."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from outeffhop.memory import HopfieldMemory, NoOp, ShardedMemory

# rows per rank, for each number of ranks: even, uneven, and a rank without any
SPLITS = {2: [(20, 20), (37, 3), (0, 40)], 4: [(10, 10, 10, 10), (1, 25, 0, 14)]}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(40, 6, dtype=torch.float64, generator=generator)
    queries = 1.5 * torch.randn(3, 7, 6, dtype=torch.float64, generator=generator)
    return patterns.to(dtype), queries.to(dtype)


def agree_with_one_process(rank: int, ranks: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        patterns, x = inputs(dtype)
        close = {"rtol": tolerance, "atol": 5 * tolerance}
        for rows in SPLITS[ranks]:
            mine = patterns.split(rows)[rank]
            for method in ("outeffhop", "outeffhop(n=5)", "dense"):
                whole, sharded = HopfieldMemory(patterns, 0.9, method), ShardedMemory(mine, 0.9, method)
                assert len(sharded) == 40
                torch.testing.assert_close(sharded.energy(x), whole.energy(x), **close)
                for steps in (1, 3):
                    here, there = sharded.retrieve(x, steps, trace=True), whole.retrieve(x, steps, trace=True)
                    torch.testing.assert_close(here.state, there.state, **close)
                    torch.testing.assert_close(here.no_op, there.no_op, **close)
                    torch.testing.assert_close(here.energy, there.energy, **close)
        here, there = sharded.retrieve(x, None), whole.retrieve(x, None)
        assert here.converged.all()
        assert torch.equal(here.steps, there.steps)
        torch.testing.assert_close(here.state, there.state, rtol=1e-5, atol=1e-5)


def stay_finite_at_large_scores(rank: int, ranks: int) -> None:
    patterns, x = (1000 * t for t in inputs(torch.float32))
    whole, sharded = HopfieldMemory(patterns), ShardedMemory.split(patterns)
    torch.testing.assert_close(sharded.retrieve(x).state, whole.retrieve(x).state)
    torch.testing.assert_close(sharded.energy(x), whole.energy(x))


def classify(rank: int, ranks: int) -> None:
    patterns, x = inputs(torch.float64)
    for distinct in (False, True):
        no_op = NoOp.assign(40, [0, 1, 17, 39], distinct=distinct)
        whole = HopfieldMemory(patterns, no_op=no_op)
        sharded = ShardedMemory.split(patterns, no_op=no_op)
        assert sharded.n == whole.n
        torch.testing.assert_close(sharded.retrieve(x, 2).state, whole.retrieve(x, 2).state)
        torch.testing.assert_close(sharded.energy(x), whole.energy(x))


def read_values(rank: int, ranks: int) -> None:
    patterns, x = inputs(torch.float64)
    values = patterns[:, :2].square()
    no_op = NoOp.assign(40, [0, 1, 17, 39], distinct=True)
    for steps in (1, 3, None):
        whole = HopfieldMemory(patterns, no_op=no_op, values=values)(x, steps)
        sharded = ShardedMemory.split(patterns, no_op=no_op, values=values)(x, steps)
        torch.testing.assert_close(sharded.value, whole.value)
    mine = patterns if rank == 0 else patterns[:0]  # a rank without patterns takes part
    alone = ShardedMemory(mine, values=values[: len(mine)])(x)
    torch.testing.assert_close(alone.value, HopfieldMemory(patterns, values=values)(x).value)
    with pytest.raises(ValueError, match=r"rank 1 has values none and rank 0 of size 2"):
        ShardedMemory(patterns, values=None if rank == 1 else values)
    with pytest.raises(ValueError, match=r"rank 0: values has shape \(\d+, 2\)"):
        ShardedMemory.split(patterns, values=torch.cat([values, values]))


def refuse_together(rank: int, ranks: int) -> None:
    """What is wrong on one rank raises on all: none may wait for one that has left."""
    patterns, x = inputs(torch.float64)
    for method in ("sparse", "gsh", "polynomial", "clipped"):
        with pytest.raises(ValueError, match="all scores of a query at once"):
            ShardedMemory(patterns, method=method)
    broken = patterns.clone()
    broken[3, 0] = torch.nan
    with pytest.raises(ValueError, match=r"rank 1: patterns: 1 of 40 rows"):
        ShardedMemory(broken if rank == 1 else patterns)
    with pytest.raises(ValueError, match=r"rank 1 has beta 2\.0 and rank 0 1\.0"):
        ShardedMemory(patterns, beta=1.0 + (rank == 1))
    with pytest.raises(ValueError, match="no rank has any"):
        ShardedMemory(patterns[:0])
    memory = ShardedMemory(patterns)
    with pytest.raises(ValueError, match="not the same on all ranks"):
        memory.retrieve(x + rank)
    with pytest.raises(ValueError, match="not the same on all ranks"):
        memory.retrieve(x[: 1 + rank])
    with pytest.raises(ValueError, match="not the same on all ranks"):
        memory.retrieve(x.flip(1) if rank == 1 else x)  # the same numbers in another order
    with pytest.raises(ValueError, match="not the same on all ranks"):
        memory.retrieve(x.sign() * (-1) ** rank)  # ±1, whose lower bits are all 0
    with pytest.raises(ValueError, match=r"rank 1: no_op classifies 19 patterns and there are 20"):
        ShardedMemory.split(patterns, no_op=NoOp.assign(40 - (rank == 1), [0]))
    with pytest.raises(ValueError, match=r"rank 0: no_op is a Tensor"):
        ShardedMemory(patterns, no_op=torch.zeros(40, dtype=torch.bool))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x was refused on another rank" if rank else r"x has shape \(3, 7, 5\)"):
        memory.retrieve(x if rank else x[..., :5])
    with pytest.raises(ValueError, match="requires a gradient"):
        memory.retrieve(x.clone().requires_grad_())
    assert f"80 patterns of size 6 over {ranks} ranks" in repr(memory)


def work(rank: int, ranks: int, folder: str, checks: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        for check in checks:
            globals()[check](rank, ranks)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "checks"),
    [
        (2, ("agree_with_one_process", "stay_finite_at_large_scores", "classify", "read_values", "refuse_together")),
        pytest.param(4, ("agree_with_one_process", "classify"), marks=pytest.mark.slow),
    ],
)
def test_processes(ranks: int, checks: tuple[str, ...], tmp_path: Path) -> None:
    mp.spawn(work, (ranks, str(tmp_path), checks), nprocs=ranks)


def test_without_a_process_group() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        ShardedMemory(torch.ones(2, 3))
