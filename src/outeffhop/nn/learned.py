"""The paper's layers whose queries or stored patterns are learned: OutEffHopPooling and OutEffHopLayer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.nn.hopfield import OutEffHop

__all__ = ["OutEffHopPooling", "OutEffHopLayer"]


class OutEffHopPooling(nn.Module):
    """Pooling: ``quantity`` learned queries retrieve from a set of patterns Y.

    Args:
        embed_dim: the size of the patterns.
        num_heads: H.
        quantity: how many queries, hence pooled vectors.
        project_query: the learned queries pass through W_Q; by default they lie in the association space already.
        options: everything else that OutEffHop takes.
    """

    def __init__(
        self, embed_dim: int, num_heads: int = 1, *, quantity: int = 1, project_query: bool = False, **options: Any
    ) -> None:
        super().__init__()
        _check_quantity(quantity)
        kdim = options.pop("kdim", None)
        self.hopfield = OutEffHop(
            embed_dim,
            num_heads,
            project_query=project_query,
            kdim=embed_dim if kdim is None else kdim,
            **{"vdim": kdim, **options},
        )
        weight = self.hopfield.association.log_beta
        self.queries = nn.Parameter(torch.empty(quantity, embed_dim, device=weight.device, dtype=weight.dtype))
        nn.init.normal_(self.queries, std=0.02)

    def forward(
        self,
        patterns: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, S, kdim] (or [S, B, kdim]) → [B, quantity, out] (or [quantity, B, out]).

        With ``need_weights`` also the association weights [B, H, quantity, S].
        """
        queries: Tensor = self.queries
        if patterns.dim() == 3:
            queries = queries.unsqueeze(0 if self.hopfield.batch_first else 1)
        out, weights = self.hopfield(
            queries,
            patterns,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            need_weights=need_weights,
            average_attn_weights=False,
        )
        return out if weights is None else (out, weights)


class OutEffHopLayer(nn.Module):
    """Lookup: inputs R retrieve from ``quantity`` learned patterns.

    Args:
        embed_dim: the size of the inputs.
        num_heads: H.
        quantity: how many patterns are stored.
        project_key, project_value: the learned patterns and targets pass through W_K and W_V; by default
            they *are* W_K and W_V (Y is the identity).
        options: everything else that OutEffHop takes; connected=True takes the values from the patterns.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        *,
        quantity: int,
        project_key: bool = False,
        project_value: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        _check_quantity(quantity)
        connected = bool(options.get("connected", False))
        self.hopfield = OutEffHop(
            embed_dim,
            num_heads,
            project_key=project_key,
            project_value=connected if project_value is None else project_value,
            **options,
        )
        weight = self.hopfield.association.log_beta
        kept: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        self.patterns = nn.Parameter(torch.empty(quantity, self.hopfield.kdim, **kept))
        nn.init.normal_(self.patterns, std=0.02)
        self.targets = None
        if not connected:
            self.targets = nn.Parameter(torch.empty(quantity, self.hopfield.vdim, **kept))
            nn.init.normal_(self.targets, std=0.02)

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[B, L, embed_dim] (or [L, B, embed_dim]) → the same with the output's size.

        With ``need_weights`` also the association weights [B, H, L, quantity].
        """
        patterns: Tensor = self.patterns
        targets: Tensor | None = self.targets
        if query.dim() == 3:
            at = 0 if self.hopfield.batch_first else 1
            patterns = patterns.unsqueeze(at)
            targets = None if targets is None else targets.unsqueeze(at)
        out, weights = self.hopfield(
            query,
            patterns,
            targets,
            key_padding_mask=key_padding_mask,
            attn_mask=attn_mask,
            need_weights=need_weights,
            average_attn_weights=False,
        )
        return out if weights is None else (out, weights)


def _check_quantity(quantity: int) -> None:
    if quantity < 1:
        raise ValueError(f"quantity={quantity}: at least 1 is needed")
