"""The mask of a transformers model for the methods: none where a sliding window reaches the kernel by itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.masking_utils import sdpa_mask

from outeffhop.ops.torch_state import is_plain

__all__ = ["WINDOWED", "window_mask"]

# Architectures whose attention modules pass on ``sliding_window``; tests/models/test_sliding_windows.py runs each.
WINDOWED = ("gpt_oss", "mistral", "qwen2", "qwen3")


def window_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """``sdpa_mask``, but None for a causal sliding window over a whole sequence without padding.

    The attention function then gets ``sliding_window`` from the module, and no mask of all pairs is made.
    """
    whole = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length > 1
    windowed = local_size is not None and getattr(config, "model_type", None) in WINDOWED
    # a trace cannot read whether there is padding, and transformers takes every trace for one of packed sequences
    traced = not is_plain()
    if allow_is_causal_skip and windowed and whole and not traced and _without_padding(attention_mask, kv_length):
        return None
    return sdpa_mask(  # type: ignore[no-any-return]
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        config=config,
        **kwargs,
    )


def _without_padding(mask: Tensor | None, length: int) -> bool:
    return mask is None or (mask.shape[-1] == length and bool(mask.all()))
