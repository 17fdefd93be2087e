"""Gates: each head's output times an opening in (0, 1), predicted from the attention's input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from outeffhop.methods import GateSpec

__all__ = ["Gate"]


class Gate(nn.Module):
    """sigmoid(G(x) + logit(init)) per head, x [B, L, embed_dim] → openings [B, L or 1, H].

    G is 0 before training, so the opening is exactly ``init`` for every input. Its weights are bare
    parameters and the offset a constant: initialisers that walk a model's Linear layers leave both alone.

    Args:
        spec: which kind of gate, which predictor, the first opening.
        embed_dim: the size of the attention's input; per-head predictors see an equal part of it each.
        num_heads: H.
    """

    def __init__(
        self,
        spec: GateSpec,
        embed_dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.embed_dim, self.num_heads = spec, embed_dim, num_heads
        self.offset = math.log(spec.init) - math.log1p(-spec.init)
        per_head = embed_dim // num_heads
        if spec.gate != "constant" and spec.predictor != "features" and per_head * num_heads != embed_dim:
            raise ValueError(
                f"embed_dim={embed_dim} does not divide into num_heads={num_heads} equal parts, which "
                f"predictor={spec.predictor!r} needs; predictor='features' sees all of it"
            )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, device=device, dtype=dtype))

        self.bias = parameter(num_heads)
        if spec.gate == "constant":
            self.register_parameter("weight", None)
        elif spec.predictor == "features":
            self.weight = parameter(num_heads, embed_dim)
        elif spec.predictor == "linear":
            self.weight = parameter(num_heads, per_head)
        else:
            width = max(1, per_head // 4)
            self.weight = parameter(num_heads, width)  # the last layer, 0 at first
            self.hidden_weight = parameter(num_heads, width, per_head)
            self.hidden_bias = parameter(num_heads, width)
            for head in self.hidden_weight:
                nn.init.kaiming_uniform_(head.data, nonlinearity="relu")

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Openings for x [B, L, embed_dim]; gate="head" averages over the tokens ``seen`` (bool [B, L]) or over all."""
        logits = self.bias + self.offset  # [H]
        if self.weight is None:
            return torch.sigmoid(logits)
        predicted = self._predict(x)  # [B, L, H]
        if self.spec.gate == "head" and seen is None:
            predicted = predicted.mean(-2, keepdim=True)
        elif self.spec.gate == "head" and seen is not None:
            share = seen.to(predicted.dtype).unsqueeze(-1)  # [B, L, 1]
            predicted = (predicted * share).sum(-2, keepdim=True) / share.sum(-2, keepdim=True).clamp(min=1)
        return torch.sigmoid(logits + predicted)

    def _predict(self, x: Tensor) -> Tensor:
        if self.spec.predictor == "features":
            return x @ self.weight.T
        parts = x.unflatten(-1, (self.num_heads, -1))  # [B, L, H, d]
        if self.spec.predictor == "mlp":
            parts = torch.relu(torch.einsum("...hd,hwd->...hw", parts, self.hidden_weight) + self.hidden_bias)
        return (parts * self.weight).sum(-1)

    def extra_repr(self) -> str:
        return f"{self.spec}, embed_dim={self.embed_dim}, num_heads={self.num_heads}"
