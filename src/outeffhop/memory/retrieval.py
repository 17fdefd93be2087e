"""Retrieval as an iteration: x ← T(x), each query separately, until it is at rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outeffhop.functional import compute_dtype

__all__ = ["Retrieval", "Update", "iterate"]


@dataclass(frozen=True, eq=False)
class Retrieval:
    """The result of retrieval for queries x [..., d].

    Attributes:
        state: [..., d], the queries after their last update.
        steps: [...], how many updates each took.
        converged: [...], whether the last update moved the query by at most the tolerance.
        energy: [T + 1, ...], before the first and after each of the T updates, constant once a query
            is at rest; None unless requested.
        no_op: [...], the weight of the no-op patterns in the last update, n/(n + Σ exp) = 1 − γ; 0 for models
            without them.
        value: [..., d_v], the memory's values by the weights of the last update, 0 where all weight went to the
            no-op; None for a memory without values.
    """

    state: Tensor
    steps: Tensor
    converged: Tensor
    energy: Tensor | None
    no_op: Tensor
    value: Tensor | None = None


class Update(NamedTuple):
    """T(x) for queries x [Q, d]."""

    state: Tensor  # [Q, d]
    no_op: Tensor  # [Q]
    energy: Tensor | None  # [Q], of x, not of the new state


_MANY = 1000  # updates after which a query that is not at rest is given up


def iterate(
    update: Callable[[Tensor], Update],
    x: Tensor,
    steps: int | None,
    tol: float,
    max_steps: int | None,
    trace: bool,
    read: Callable[[Tensor], Tensor] | None = None,
    agree: Callable[[Tensor], Tensor] = lambda stop: stop,
) -> Retrieval:
    """``steps`` updates of every query; with None or ``max_steps``, updates of each query until it is at rest.

    A query at rest leaves the batch, so its result and cost do not depend on the other queries.
    ``read`` turns the queries [Q, d] before their last update into values [Q, d_v]. ``agree`` lets processes that
    iterate together agree on which queries stop.
    """
    limit, to_rest = _check_steps(steps, tol, max_steps)
    lead, device = x.shape[:-1], x.device
    # two roundings of one number may differ by the dtype's resolution
    tol = max(tol, torch.finfo(x.dtype).eps)
    state = x.reshape(-1, x.shape[-1])  # [Q, d]
    if not to_rest:
        return _exactly(update, x, state, limit, tol, trace, read)
    active = torch.arange(len(state), device=device)
    taken = torch.zeros(len(state), dtype=torch.long, device=device)
    converged = torch.zeros(len(state), dtype=torch.bool, device=device)
    left: list[tuple[Tensor, ...]] = []  # of the queries that stopped: index, before and after the last update, no_op
    energies: list[Tensor] = []
    for step in range(1, limit + 1):
        after = update(state)
        new = after.state.to(x.dtype)
        if after.energy is not None and trace:
            energies.append(energies[-1].index_copy(0, active, after.energy) if energies else after.energy)
        change, bound = _norm(new - state), tol * _norm(state).clamp(min=1.0)
        # a NaN query never comes to rest: it stops as well
        stop = ~(change > bound) if step < limit else torch.ones_like(change, dtype=torch.bool)
        stop = agree(stop)
        taken[active] = step
        converged[active] = change <= bound
        if stop.any() or len(stop) == 0:
            left.append((active[stop], state[stop], new[stop], after.no_op[stop]))
            active, new = active[~stop], new[~stop]
        state = new
        if len(active) == 0:
            break
    index, before, states, no_op = (torch.cat(parts) for parts in zip(*left, strict=True))
    order = index.argsort()
    state = states[order]
    value = None if read is None else read(before[order])
    last = update(state).energy if trace else None
    energy = None if last is None else _trace(energies, taken, last)  # [T + 1, Q]
    return Retrieval(
        state=state.reshape(x.shape),
        steps=taken.reshape(lead),
        converged=converged.reshape(lead),
        energy=None if energy is None else energy.reshape(len(energy), *lead),
        no_op=no_op[order].reshape(lead),
        value=None if value is None else value.reshape(*lead, value.shape[-1]),
    )


def _exactly(
    update: Callable[[Tensor], Update],
    x: Tensor,
    state: Tensor,
    steps: int,
    tol: float,
    trace: bool,
    read: Callable[[Tensor], Tensor] | None,
) -> Retrieval:
    """``steps`` updates of all queries. Nothing depends on what they find, so that a GPU need not wait for Python."""
    lead, energies = x.shape[:-1], []
    for _ in range(steps):
        before, after = state, update(state)
        state = after.state.to(x.dtype)
        energies.append(after.energy)
    at_rest = _norm(state - before) <= tol * _norm(before).clamp(min=1.0)
    value = None if read is None else read(before)
    energy = torch.stack([*energies, update(state).energy]) if trace else None  # type: ignore[list-item]
    return Retrieval(
        state=state.reshape(x.shape),
        steps=torch.full(lead, steps, dtype=torch.long, device=x.device),
        converged=at_rest.reshape(lead),
        energy=None if energy is None else energy.reshape(len(energy), *lead),
        no_op=after.no_op.reshape(lead),
        value=None if value is None else value.reshape(*lead, value.shape[-1]),
    )


def _trace(energies: list[Tensor], taken: Tensor, last: Tensor) -> Tensor:
    """Energies before each update, and those of the final states from where each query stopped.  [T + 1, Q]"""
    stacked = torch.stack([*energies, last])
    step = torch.arange(len(stacked), device=last.device)
    return torch.where(step[:, None] >= taken, last, stacked)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x.detach(), dim=-1, dtype=compute_dtype(x.dtype))


def _check_steps(steps: int | None, tol: float, max_steps: int | None) -> tuple[int, bool]:
    """The largest number of updates, and whether a query at rest stops before it."""
    if steps is not None and steps < 1:
        raise ValueError(f"steps={steps}: must be at least 1, or None to update until every query is at rest")
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps={max_steps}: must be at least 1")
    if max_steps is not None and steps is not None and steps > 1:
        raise ValueError(
            f"steps={steps} and max_steps={max_steps}: give steps for exactly that many updates, or max_steps to "
            "update until every query is at rest, at most that often"
        )
    if not tol >= 0.0:
        raise ValueError(f"tol={tol}: must not be negative")
    if max_steps is None and steps is not None:
        return steps, False
    return _MANY if max_steps is None else max_steps, True
