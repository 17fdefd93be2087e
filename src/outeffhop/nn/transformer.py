"""PyTorch's transformer layers with OutEffHop in place of their attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from outeffhop.methods import Method
from outeffhop.nn.hopfield import OutEffHop

__all__ = ["OutEffHopEncoderLayer", "OutEffHopDecoderLayer"]


class OutEffHopEncoderLayer(nn.TransformerEncoderLayer):
    """``torch.nn.TransformerEncoderLayer`` with an attention method of choice.

    Args:
        d_model, nhead, arguments, options: as for that class.
        method: any method, with or without a gate.
        hopfield: other arguments of OutEffHop, such as ``{"steps": 2, "learn_beta": True}``.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *arguments: Any,
        method: str | Method = "outeffhop",
        hopfield: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, nhead, *arguments, **options)
        self.self_attn = _replacement(self.self_attn, method, hopfield)  # type: ignore[assignment]


class OutEffHopDecoderLayer(nn.TransformerDecoderLayer):
    """``torch.nn.TransformerDecoderLayer`` with an attention method of choice, for both of its attentions."""

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *arguments: Any,
        method: str | Method = "outeffhop",
        hopfield: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(d_model, nhead, *arguments, **options)
        self.self_attn = _replacement(self.self_attn, method, hopfield)  # type: ignore[assignment]
        self.multihead_attn = _replacement(self.multihead_attn, method, hopfield)  # type: ignore[assignment]


def _replacement(old: nn.MultiheadAttention, method: str | Method, hopfield: dict[str, Any] | None) -> OutEffHop:
    weight = old.out_proj.weight
    return OutEffHop(
        old.embed_dim,
        old.num_heads,
        old.dropout,
        old.in_proj_bias is not None,
        batch_first=old.batch_first,
        device=weight.device,
        dtype=weight.dtype,
        method=method,
        **(hopfield or {}),
    )
