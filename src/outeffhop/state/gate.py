"""Gates: each head's output times an opening in (0, 1), predicted from the attention's input."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from outeffhop.methods import GateSpec

__all__ = ["Gate", "gated"]

_MANY = 64  # tokens for which a matrix product pays; generation has fewer


class Gate(nn.Module):
    """sigmoid(G(x) + logit(init)) per head, x [B, L, embed_dim] → openings [B, L or 1, H], or [B, L, H, head_dim].

    G is 0 before training, so the first opening is exactly ``init`` for every input. The weights are bare
    parameters and the offset is a constant, so initializers of a model's Linear layers do not change them.

    Args:
        spec: the kind of gate, the predictor, the first opening.
        embed_dim: the size of the attention's input; each per-head predictor sees an equal part of it.
        num_heads: H.
        head_dim: the size of each head's output, whose channels gate="element" opens separately; by default
            embed_dim / num_heads.
    """

    def __init__(
        self,
        spec: GateSpec,
        embed_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.embed_dim, self.num_heads = spec, embed_dim, num_heads
        self.offset: float | Tensor = self.first_offset
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads)):
            if size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        per_head = embed_dim // num_heads
        if spec.gate != "constant" and spec.predictor != "features" and per_head * num_heads != embed_dim:
            raise ValueError(
                f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}, as "
                f"predictor={spec.predictor!r} needs; predictor='features' sees all of the input"
            )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        openings: tuple[int, ...] = (num_heads,)
        if spec.gate == "element":
            openings = (num_heads, per_head if head_dim is None else head_dim)
        self.bias = parameter(*openings)
        if spec.gate == "constant":
            self.register_parameter("weight", None)
        elif spec.predictor == "features":
            self.weight = parameter(*openings, embed_dim)
        elif spec.predictor == "linear":
            self.weight = parameter(*openings, per_head)
        else:
            width = max(1, per_head // 4)
            self.weight = parameter(*openings, width)  # the last layer, 0 before training
            self.hidden_weight = parameter(num_heads, width, per_head)
            self.hidden_bias = parameter(num_heads, width)
        self.reset_parameters()

    @property
    def first_offset(self) -> float:
        """logit(init), which makes the first opening ``init``."""
        return math.log(self.spec.init) - math.log1p(-self.spec.init)

    def reset_parameters(self) -> None:
        """Sets G to 0; an MLP's hidden layer gets random weights."""
        nn.init.zeros_(self.bias)
        if self.weight is not None:
            nn.init.zeros_(self.weight)
        if self.spec.gate != "constant" and self.spec.predictor == "mlp":
            bound = math.sqrt(6.0 / self.hidden_weight.shape[-1])  # Kaiming's for ReLU, head by head
            nn.init.uniform_(self.hidden_weight, -bound, bound)
            nn.init.zeros_(self.hidden_bias)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Openings for x [B, L, embed_dim]; gate="head" averages over all tokens, or those ``seen`` (bool [B, L])."""
        logits = self.bias + self.offset  # [H] or [H, head_dim]
        if self.weight is None:
            return torch.sigmoid(logits)
        predicted = self._predict(x)  # [B, L, H] or [B, L, H, head_dim]
        if self.spec.gate == "head" and seen is None:
            predicted = predicted.mean(-2, keepdim=True)
        elif self.spec.gate == "head" and seen is not None:
            share = seen.to(predicted.dtype).unsqueeze(-1)  # [B, L, 1]
            predicted = (predicted * share).sum(-2, keepdim=True) / share.sum(-2, keepdim=True).clamp(min=1)
        return torch.sigmoid(logits + predicted)

    def _predict(self, x: Tensor) -> Tensor:
        if self.spec.predictor == "features":
            return nn.functional.linear(x, self.weight.flatten(0, -2)).unflatten(-1, self.weight.shape[:-1])
        parts = x.unflatten(-1, (self.num_heads, -1))  # [B, L, H, d]
        if self.spec.predictor == "mlp":
            parts = torch.relu(torch.einsum("...hd,hwd->...hw", parts, self.hidden_weight) + self.hidden_bias)
        if self.spec.gate == "element":
            return torch.einsum("...hd,hcd->...hc", parts, self.weight)
        if self.spec.predictor == "mlp" or math.prod(x.shape[:-1]) < _MANY:
            return (parts * self.weight).sum(-1)
        # Each head's weights beside zeros for the others' parts: one matrix product reads x once and writes next to
        # nothing, where parts * weight would be as large as x.
        alone = torch.diag_embed(self.weight.T, dim1=0, dim2=1)  # [H, H, d]
        return nn.functional.linear(x, alone.flatten(1))

    def extra_repr(self) -> str:
        return f"{self.spec}, embed_dim={self.embed_dim}, num_heads={self.num_heads}"


def gated(context: Tensor, opening: Tensor) -> Tensor:
    """Heads' outputs [B, L, H, head_dim] times a gate's openings: [H], [B, L or 1, H] or [B, L, H, head_dim]."""
    opening = opening.to(context.dtype)
    return context * (opening if opening.dim() == 4 else opening.unsqueeze(-1))
