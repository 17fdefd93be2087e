"""One decision for every layer and model: fused attention, or eager attention with weights."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from outeffhop.methods import Normalizer
from outeffhop.ops import attention
from outeffhop.ops.eager import eager_attention

__all__ = ["attend"]


def attend(
    normalizer: Normalizer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    learned: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention by a method's normalizer: fused if it is softmax_n and the weights are not needed, else eager.

    Args:
        normalizer: turns scores into weights.
        query: [B, H, L, D]
        key: [B, G, S, D], H a multiple of G
        value: [B, G, S, Dv]
        mask, dropout_p, is_causal, scale: as for ``outeffhop.attention``.
        learned: what the normalizer learns, the sink [H] or α (``MethodState.learned``).
        need_weights: also return the weights.

    Returns:
        The output [B, H, L, Dv], and the weights [B, H, L, S] or None.
    """
    if normalizer.sink is not None and not need_weights:
        sink = normalizer.sink if learned is None else learned
        out = attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa=True, sink=sink)
        return out, None  # type: ignore[return-value]  # without return_lse it is one tensor
    weigh = partial(normalizer, learned=learned)
    out, weights = eager_attention(query, key, value, weigh, mask, dropout_p, is_causal, scale, enable_gqa=True)
    return out, weights if need_weights else None
