"""The method of one attention together with the tensors it learns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.methods import Method, SoftmaxN
from outeffhop.state.gate import Gate
from outeffhop.state.qk_norm import QkNorm

__all__ = ["MethodState"]


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
        """Turns what a schedule moves into buffers, at their current values."""
        normalizer = self.method.normalizer
        if isinstance(normalizer, SoftmaxN) and normalizer.learns is None and normalizer.n > 0 and self.sink is None:
            del self.sink
            self.register_buffer("sink", torch.full((self.num_heads,), normalizer.sink, device=device, dtype=dtype))
        if self.gate is not None and not isinstance(self.gate.offset, Tensor):
            offset = self.gate.offset
            del self.gate.offset
            self.gate.register_buffer("offset", torch.full((), offset, device=device, dtype=dtype))

    def release(self) -> None:
        """Undoes ``hold``: the sink and the offset are the method's own numbers again."""
        if isinstance(self.sink, Tensor) and not isinstance(self.sink, nn.Parameter):
            del self.sink
            self.sink = None
        if self.gate is not None and isinstance(self.gate.offset, Tensor):
            del self.gate.offset
            self.gate.offset = self.gate.first_offset

    def move(self, sink: float, progress: float, start: float) -> None:
        """Sets the held sink, and the held offset between an open gate (−start) and the method's own."""
        if isinstance(self.sink, Tensor) and not isinstance(self.sink, nn.Parameter):
            self.sink.fill_(sink)
        if self.gate is not None and isinstance(self.gate.offset, Tensor):
            self.gate.offset.fill_(-start + progress * (self.gate.first_offset + start))

    def extra_repr(self) -> str:
        return f"{self.method}, num_heads={self.num_heads}"
