"""Pooling with learned queries: the paper's OutEffHopPooling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outeffhop.nn.hopfield import OutEffHop, learned_patterns

__all__ = ["OutEffHopPooling"]


class OutEffHopPooling(nn.Module):
    """Pooling: ``quantity`` learned queries retrieve from a set of patterns Y.

    Args:
        embed_dim: the size of the patterns.
        num_heads: H.
        quantity: how many queries, and so how many pooled vectors.
        project_query: the learned queries pass through W_Q; by default they already lie in the association space.
        options: other arguments of OutEffHop.
    """

    def __init__(
        self, embed_dim: int, num_heads: int = 1, *, quantity: int = 1, project_query: bool = False, **options: Any
    ) -> None:
        super().__init__()
        kdim = options.pop("kdim", None)
        self.hopfield = OutEffHop(
            embed_dim,
            num_heads,
            project_query=project_query,
            kdim=embed_dim if kdim is None else kdim,
            **{"vdim": kdim, **options},
        )
        self.queries = learned_patterns(self.hopfield, quantity, embed_dim)

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
