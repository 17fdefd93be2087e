"""One decision for every layer and model: fused attention, or eager attention with weights."""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from outeffhop.methods import Normalizer
from outeffhop.ops import attention, attention_varlen, clipped, entmax_gpu
from outeffhop.ops.call import prepare
from outeffhop.ops.eager import eager_attention
from outeffhop.ops.probe import is_probed
from outeffhop.ops.softcap import capped_mask
from outeffhop.ops.window import Packed

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
    window: tuple[int, int] | None = None,
    packed: Packed | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention by a method's normalizer: fused if a kernel has it and the weights are not needed, else eager.

    Args:
        normalizer: turns scores into weights.
        query: [B, H, L, D]
        key: [B, G, S, D], H a multiple of G
        value: [B, G, S, Dv]
        mask, dropout_p, is_causal, scale: as for ``outeffhop.attention``.
        learned: what the normalizer learns, the sink [H] or α (``MethodState.learned``).
        need_weights: also return the weights.
        window: as for ``outeffhop.attention``.
        packed: where the sequences of a packed batch begin; then B is 1, and there is no mask.
        softcap: c, which makes scores c·tanh(scores / c) before the mask; not with ``packed``.

    Returns:
        The output [B, H, L, Dv], and the weights [B, H, L, S] or None.
    """
    # only eager attention shows a probe the scores as they are capped
    fused = not need_weights and (softcap is None or not is_probed())
    if normalizer.sink is not None and fused:
        sink = normalizer.sink if learned is None else learned
        if packed is not None:
            query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))  # [L, H, D]
            out = attention_varlen(
                query, key, value, *packed, dropout_p, is_causal, scale, enable_gqa=True, sink=sink, window=window
            )
            return out.transpose(0, 1)[None], None  # type: ignore[union-attr]
        if softcap is not None:
            mask = capped_mask(query, key, mask, scale, softcap)
        out = attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa=True, sink=sink, window=window)
        return out, None  # type: ignore[return-value]  # without return_lse it is one tensor
    plain = query.is_cuda and not need_weights and learned is None and softcap is None
    clipping = normalizer.clipping(key.shape[-2]) if plain else None
    if clipping is not None:
        gamma, zeta, log_n = clipping
        call = prepare(query, key, value, mask, dropout_p, is_causal, scale, True, log_n, False, window, packed)
        if clipped.why_not(call) is None:
            return clipped.attend(call, gamma, zeta), None
    order = normalizer.entmax_order if query.is_cuda and not need_weights and learned is None else None
    if order is not None:
        call = prepare(query, key, value, mask, dropout_p, is_causal, scale, True, -math.inf, False, window, packed)
        if entmax_gpu.why_not(call, order) is None:
            return entmax_gpu.attend(call, order), None
    weigh = partial(normalizer, learned=learned)
    out, weights = eager_attention(
        query, key, value, weigh, mask, dropout_p, is_causal, scale, True, window, packed, softcap
    )
    return out, weights if need_weights else None
