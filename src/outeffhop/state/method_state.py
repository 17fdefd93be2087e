"""The method of one attention together with the tensors it learns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.methods import Method, SoftmaxN
from outeffhop.state.gate import Gate
from outeffhop.state.qk_norm import QkNorm

__all__ = ["NO_SINK", "OPEN", "MethodState"]

# The logit of an open gate: 1 − 2e-9, which float32 rounds to 1.
OPEN = 20.0
# A sink that takes nothing: exp(sink − lse) is 0 in every dtype. Not −inf, since a checkpoint's weights must be finite.
NO_SINK = -3e4


class MethodState(nn.Module):
    """A method and what it learns: a gate, a sink or an α, QK-norm. What the method does not have is None.

    The method of a state is fixed. To change it, make a new state that inherits from the old one.

    While a schedule moves them, a fixed sink and a gate's offset are buffers. A checkpoint then holds their
    current values, and a compiled model sees them change without being compiled again.

    Args:
        method: how scores become weights, the gate and QK-norm.
        embed_dim: the size of the attention's input, from which the gate is predicted.
        num_heads: H, of the queries.
        head_dim: the size of each head's output; by default embed_dim / num_heads.
        annealing: a schedule moves the fixed sink and the gate's offset.
    """

    sink: nn.Parameter | Tensor | None  # [H]; a buffer while a schedule holds it
    sink_start: Tensor | None  # [H]; where a schedule started the sink
    raw_alpha: nn.Parameter | None  # α = 1 + softplus(raw_alpha) stays above 1
    gate: Gate | None
    qk_norm: QkNorm | None

    def __init__(
        self,
        method: Method,
        embed_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        annealing: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.method, self.embed_dim, self.num_heads = method, embed_dim, num_heads
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        learns = method.normalizer.learns
        self.gate = None if method.gate is None else Gate(method.gate, embed_dim, num_heads, head_dim, **place)
        self.qk_norm = None if method.qk_norm == "none" else QkNorm(num_heads, **place)
        self.sink = nn.Parameter(torch.empty(num_heads, **place)) if learns == "sink" else None
        self.sink_start = None
        self.raw_alpha = nn.Parameter(torch.empty((), **place)) if learns == "alpha" else None
        self.reset_parameters()
        if annealing:
            self.hold(**place)

    def reset_parameters(self) -> None:
        """Sets the learned sink and α to their first values; gate and QK-norm reset themselves."""
        normalizer = self.method.normalizer
        if isinstance(self.sink, nn.Parameter):
            nn.init.constant_(self.sink, normalizer.start)
        if self.raw_alpha is not None:
            nn.init.constant_(self.raw_alpha, math.log(math.expm1(normalizer.start - 1.0)))

    def inherit(self, old: MethodState) -> None:
        """Takes over the parameters of an old state that this one has as well."""
        if self.gate is not None and old.gate is not None and self.gate.spec == old.gate.spec:
            self.gate = old.gate
        if self.qk_norm is not None and old.qk_norm is not None:
            self.qk_norm = old.qk_norm
        if isinstance(self.sink, nn.Parameter) and isinstance(old.sink, nn.Parameter):
            self.sink = old.sink
        if self.raw_alpha is not None and old.raw_alpha is not None:
            self.raw_alpha = old.raw_alpha

    @property
    def learned(self) -> Tensor | None:
        """What the normalizer is called with: the sink [H], or α."""
        return self.sink if self.raw_alpha is None else 1.0 + nn.functional.softplus(self.raw_alpha)

    @property
    def extra(self) -> bool:
        """Whether the state has tensors, so that a checkpoint holds them."""
        return bool(self.state_dict())

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """The gate's openings, [B, L or 1, H], [B, L, H, head_dim] or [H]; None without a gate.

        A gate per head averages over the tokens that some query sees by the mask [B, 1 or H, L, L], not over padding.
        """
        if self.gate is None:
            return None
        if mask is None:
            return self.gate(hidden_states)
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return self.gate(hidden_states, visible.any(-2).any(1))

    def hold(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Turns what a schedule moves into buffers: a fixed sink, where it starts, and the gate's offset.

        They begin at the same function: a sink that takes nothing, and an open gate.
        """
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        if self.moves_sink and self.sink is None:
            del self.sink, self.sink_start
            for name in ("sink", "sink_start"):
                self.register_buffer(name, torch.full((self.num_heads,), NO_SINK, **place))
        if self.gate is not None and not isinstance(self.gate.offset, Tensor):
            del self.gate.offset
            self.gate.register_buffer("offset", torch.full((), OPEN, **place))

    def release(self) -> None:
        """Undoes ``hold``: the sink and the offset are the method's own numbers again."""
        if self._holds_sink:
            del self.sink, self.sink_start
            self.sink = self.sink_start = None
        if self.gate is not None and isinstance(self.gate.offset, Tensor):
            del self.gate.offset
            self.gate.offset = self.gate.first_offset

    def start_at(self, sink: Tensor) -> None:
        """Sets where a learned sink, or one that a schedule holds, starts; [H]."""
        if self._holds_sink:
            self.sink_start.copy_(sink)  # type: ignore[union-attr]
        with torch.no_grad():
            self.sink.copy_(sink)  # type: ignore[union-attr]

    def move(self, progress: float) -> None:
        """Moves what is held from where it starts (progress 0) to the method's own values (1).

        A sink that starts from nothing grows in n: log n = log(progress · n). One that starts at a number moves there
        in its logarithm, which is gentle to heads whose scores lie far below 0.
        """
        if self._holds_sink:
            end, start = self.method.normalizer.sink, self.sink_start
            grown = end + math.log(progress) if progress > 0 else NO_SINK  # type: ignore[operator]
            from_nothing = start < NO_SINK / 2  # type: ignore[operator]
            self.sink.copy_(torch.where(from_nothing, grown, start + progress * (end - start)))  # type: ignore
        if self.gate is not None and isinstance(self.gate.offset, Tensor):
            self.gate.offset.fill_(OPEN + progress * (self.gate.first_offset - OPEN))

    @property
    def moves_sink(self) -> bool:
        """Whether the method has a fixed sink, which a schedule can move."""
        normalizer = self.method.normalizer
        return isinstance(normalizer, SoftmaxN) and normalizer.learns is None and normalizer.n > 0

    @property
    def _holds_sink(self) -> bool:
        return isinstance(self.sink, Tensor) and not isinstance(self.sink, nn.Parameter)

    def extra_repr(self) -> str:
        return f"{self.method}, num_heads={self.num_heads}"
