"""What a method adds to an attention module: itself, and the parameters it learns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.methods import Method, SoftmaxN
from outeffhop.nn.gate import Gate
from outeffhop.nn.qk_norm import QkNorm

__all__ = ["Extension"]


class Extension(nn.Module):
    """The method of one attention module, with its gate, its sink, its α and its QK-norm where it has them.

    While a schedule moves them, a fixed sink and a gate's offset are buffers, so that a checkpoint
    holds how far they are and a compiled model sees them move without compiling anew.

    Args:
        method: how scores become weights, and the gate.
        embed_dim: the size of the attention's input.
        num_heads: H, of the queries.
        head_dim: the size of each head's output.
        annealing: a schedule moves the fixed sink and the gate's offset.
    """

    sink: nn.Parameter | Tensor | None
    raw_alpha: nn.Parameter | None

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
        kept: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate = None if method.gate is None else Gate(method.gate, embed_dim, num_heads, head_dim, **kept)
        self.qk_norm = None if method.qk_norm == "none" else QkNorm(num_heads, **kept)
        normalizer = method.normalizer
        learned = None
        if normalizer.learns == "sink":
            learned = nn.Parameter(torch.full((num_heads,), normalizer.start, **kept))
        self.register_parameter("sink", learned)
        raw = None
        if normalizer.learns == "alpha":
            # α = 1 + softplus(raw) stays above 1
            raw = nn.Parameter(torch.full((), math.log(math.expm1(normalizer.start - 1.0)), **kept))
        self.register_parameter("raw_alpha", raw)
        for module in self.modules():  # transformers' initialisers and loaders leave alone what says so
            module._is_hf_initialized = True  # type: ignore[assignment]
        if annealing:
            self.hold(**kept)

    @property
    def learned(self) -> Tensor | None:
        """What the normalizer is called with: the sink [H], or α."""
        return self.sink if self.raw_alpha is None else 1.0 + nn.functional.softplus(self.raw_alpha)

    @property
    def extra(self) -> bool:
        """Whether a checkpoint holds tensors of this extension."""
        return bool(self.state_dict())

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor | None:
        """The gate's openings, [B, L or 1, H], [B, L, H, head_dim] or [H]; None without a gate.

        A gate per head averages over the tokens some query sees by the mask [B, 1 or H, L, L], not over padding.
        """
        if self.gate is None:
            return None
        if mask is None:
            return self.gate(hidden_states)
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return self.gate(hidden_states, visible.any(-2).any(1))

    def hold(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> None:
        """Turns what a schedule moves into buffers, at their present values."""
        normalizer = self.method.normalizer
        if isinstance(normalizer, SoftmaxN) and normalizer.learns is None and normalizer.n > 0 and self.sink is None:
            del self.sink
            self.register_buffer("sink", torch.full((self.num_heads,), normalizer.sink, device=device, dtype=dtype))
        if self.gate is not None and not isinstance(self.gate.offset, Tensor):
            offset = self.gate.offset
            del self.gate.offset
            self.gate.register_buffer("offset", torch.full((), offset, device=device, dtype=dtype))

    def release(self) -> None:
        """The inverse of ``hold``: the method's own sink and offset, as numbers."""
        if isinstance(self.sink, Tensor) and not isinstance(self.sink, nn.Parameter):
            del self.sink
            self.register_parameter("sink", None)
        if self.gate is not None and isinstance(self.gate.offset, Tensor):
            del self.gate.offset
            init = self.gate.spec.init
            self.gate.offset = math.log(init) - math.log1p(-init)

    def move(self, sink: float, progress: float, start: float) -> None:
        """Sets the held sink, and the held offset between an open gate (−start) and the method's own."""
        if isinstance(self.sink, Tensor) and not isinstance(self.sink, nn.Parameter):
            self.sink.fill_(sink)
        if self.gate is not None and isinstance(self.gate.offset, Tensor):
            init = self.gate.spec.init
            target = math.log(init) - math.log1p(-init)
            self.gate.offset.fill_(-start + progress * (target + start))

    def extra_repr(self) -> str:
        return f"{self.method}, num_heads={self.num_heads}"
