"""Lookup in learned patterns: the paper's OutEffHopLayer."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from outeffhop.nn.hopfield import OutEffHop, learned_patterns

__all__ = ["OutEffHopLayer"]


class OutEffHopLayer(nn.Module):
    """Lookup: inputs R retrieve from ``quantity`` learned patterns.

    Args:
        embed_dim: the size of the inputs.
        num_heads: H.
        quantity: how many patterns to store.
        project_key, project_value: the learned patterns and targets pass through W_K and W_V. By default
            they take the place of W_K and W_V (Y is the identity).
        options: other arguments of OutEffHop; connected=True computes the values from the patterns.
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
        connected = bool(options.get("connected", False))
        self.hopfield = OutEffHop(
            embed_dim,
            num_heads,
            project_key=project_key,
            project_value=connected if project_value is None else project_value,
            **options,
        )
        self.patterns = learned_patterns(self.hopfield, quantity, self.hopfield.kdim)
        self.targets = None if connected else learned_patterns(self.hopfield, quantity, self.hopfield.vdim)

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
