"""Looking into attention: while a probe is set, attention runs in plain PyTorch and shows the probe its parts.

A fused kernel never holds the scores or the probabilities, so ``backend="auto"`` takes the eager one while a
probe is set. Attention continues with what the probe returns: an observer returns the tensor it was given,
a simulated quantizer a rounded one.

A watch costs less: attention runs on its usual kernel, and the watch then gets the arguments of the call and the
logsumexp of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from outeffhop.ops.call import Call

__all__ = ["Probe", "Watch", "probing", "is_probed", "is_seen", "shown", "watching", "watch"]

Probe = Callable[[str, Tensor], Tensor]

# the call, and log(n + Σ exp(scores)) [..., H, Lq], or the weights [..., H, Lq, Lk] if only the eager backend can serve
Watch = Callable[[Call, Tensor | None, Tensor | None], None]

_PROBE: ContextVar[Probe | None] = ContextVar("outeffhop_probe", default=None)
_WATCH: ContextVar[Watch | None] = ContextVar("outeffhop_watch", default=None)


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Within it, attention calls show their parts: ``probe(part, tensor) -> tensor``.

    The parts are "scores" before the mask, so that they are finite, and "probabilities" from the normalizer, both
    [..., H, Lq, Lk], and the "context" of each head, [..., H, Lq, Dv]. A call that names a fused
    backend or "padded" runs on it and shows nothing. The attention of a transformers model also shows its "key" and
    "value" as a cache holds them: after rotary positions, before QK-norm, [B, G, S, D] with G heads that several
    queries may share. Compiled code ignores the probe, since it may have been compiled without one.
    """
    token = _PROBE.set(probe)
    try:
        yield
    finally:
        _PROBE.reset(token)


def is_probed() -> bool:
    return not torch.compiler.is_compiling() and _PROBE.get() is not None


def is_seen() -> bool:
    """Whether a probe or a watch is set."""
    return _PROBE.get() is not None or _WATCH.get() is not None


def shown(part: str, tensor: Tensor) -> Tensor:
    """The tensor, or what the probe makes of it."""
    if torch.compiler.is_compiling():
        return tensor
    probe = _PROBE.get()
    return tensor if probe is None else probe(part, tensor)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Within it, every attention call calls ``watch(call, lse, None)`` or ``watch(call, None, weights)``.

    Calls with backend="padded", which has no logsumexp, are refused.
    """
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def watch() -> Watch | None:
    """The current watch, if any."""
    return None if torch.compiler.is_compiling() else _WATCH.get()
