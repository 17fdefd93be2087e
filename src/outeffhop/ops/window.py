"""Which keys a query sees by its position: causal masks, windows, and the sequences of a packed batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outeffhop.ops.torch_state import is_concrete

__all__ = ["Packed", "check_window", "check_lengths", "check_sequences", "rows_without_keys", "visible"]


class Packed(NamedTuple):
    """Sequences one behind the other: sequence i is rows cu[i] to cu[i + 1]."""

    cu_q: Tensor  # [N + 1], int32
    cu_k: Tensor  # [N + 1], int32
    max_q: int  # the longest sequence
    max_k: int

    def bounds(self) -> list[tuple[int, int, int, int]]:
        """(first query, end, first key, end) of every sequence; waits for the device."""
        q, k = self.cu_q.tolist(), self.cu_k.tolist()
        return list(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))


def check_window(window: Any, is_causal: bool) -> tuple[tuple[int, int] | None, bool]:
    """(left, right) with −1 for unlimited, or None; and whether the call is causal without a window."""
    if window is None:
        return None, is_causal
    try:
        left, right = (-1 if side is None else int(side) for side in window)
    except (TypeError, ValueError):
        raise TypeError(f"window={window!r}: expected (left, right), two whole numbers; -1 is unlimited") from None
    if left < -1 or right < -1:
        raise ValueError(f"window={window!r}: left and right must be at least 0, or -1 for unlimited")
    if is_causal:
        right = 0
    if left == -1 and right <= 0:  # all keys, or all up to the query's own
        return None, right == 0
    return (left, right), False


def check_lengths(name: str, cu: Any, total: int, device: torch.device) -> Tensor:
    """Cumulative lengths as the kernels take them, int32 on the tensors' device."""
    if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64) or cu.dim() != 1 or len(cu) < 1:
        found = f"{cu.dtype} {tuple(cu.shape)}" if isinstance(cu, Tensor) else repr(cu)
        raise TypeError(f"{name} is {found}: expected a tensor of whole numbers [sequences + 1], from 0 to {total}")
    if cu.device != device:
        raise ValueError(f"{name} is on {cu.device} and query on {device}: move them to one device")
    return cu.to(torch.int32)


def check_sequences(packed: Packed, queries: int, keys: int) -> None:
    """Raises an error for lengths that do not fit; on a GPU, reading them would wait for the device."""
    if len(packed.cu_q) != len(packed.cu_k):
        raise ValueError(
            f"cu_seqlens_q has {len(packed.cu_q)} entries and cu_seqlens_k {len(packed.cu_k)}: they must be equal"
        )
    if packed.cu_q.device.type != "cpu" or torch.compiler.is_compiling() or not is_concrete(packed.cu_q):
        return
    for side, cu, total, longest in (
        ("q", packed.cu_q, queries, packed.max_q),
        ("k", packed.cu_k, keys, packed.max_k),
    ):
        starts = cu.tolist()
        lengths = [end - start for start, end in pairwise(starts)]
        if starts[0] != 0 or starts[-1] != total or min(lengths, default=0) < 0:
            raise ValueError(f"cu_seqlens_{side}={starts}: must rise from 0 to {total}, the number of rows")
        if max(lengths, default=0) > longest:
            raise ValueError(f"max_{side}={longest}: the longest sequence of cu_seqlens_{side} has {max(lengths)}")


def visible(
    queries: int,
    keys: int,
    is_causal: bool,
    window: tuple[int, int] | None,
    packed: Packed | None,
    device: torch.device,
    offset: int = 0,
) -> Tensor | None:
    """True where a query sees a key, [Lq, Lk]; None if every query sees all of them."""
    left, right = _sides(is_causal, window)
    if left < 0 and right < 0 and packed is None:
        return None
    sequence, position, _ = _queries(queries, keys, packed, device)
    key = torch.arange(keys, device=device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if packed is not None:
        of_key = torch.searchsorted(packed.cu_k.to(key.dtype), key, right=True) - 1
        seen = sequence[:, None] == of_key
        key = key - packed.cu_k[of_key]
    ahead = key - (position[:, None] + offset)  # how far a key is behind the query's own position
    if left >= 0:
        seen = seen & (ahead >= -left)
    if right >= 0:
        seen = seen & (ahead <= right)
    return seen


def rows_without_keys(
    queries: int,
    keys: int,
    is_causal: bool,
    window: tuple[int, int] | None,
    packed: Packed | None,
    device: torch.device,
) -> Tensor:
    """Queries that see no key, [Lq], in memory linear in their number."""
    left, right = _sides(is_causal, window)
    _, position, count = _queries(queries, keys, packed, device)
    first = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(position)
    last = count - 1
    if right >= 0:
        last = torch.minimum(last, position + right)
    return first > last


def _sides(is_causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    return window if window is not None else (-1, 0 if is_causal else -1)


def _queries(queries: int, keys: int, packed: Packed | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For every query: its sequence, the key at its own position, and how many keys its sequence has.  Each [Lq]

    The last query of a packed sequence is at its last key, as flash kernels have it; without packing, the first query
    is at the first key, as PyTorch has it.
    """
    position = torch.arange(queries, device=device)
    if packed is None:
        return torch.zeros_like(position), position, torch.full_like(position, keys)
    sequence = torch.searchsorted(packed.cu_q.to(position.dtype), position, right=True) - 1
    count = packed.cu_k.diff().to(position.dtype)[sequence]
    return sequence, position - packed.cu_q[sequence + 1] + count, count
