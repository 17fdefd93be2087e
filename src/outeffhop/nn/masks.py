"""The masks of torch.nn.MultiheadAttention (True: ignore) → the mask of ``attention`` (True: attend)."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge_masks"]


def merge_masks(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """One mask that broadcasts to ``shape`` (B, H, L, S), or None.

    Args:
        key_padding_mask: [B, S] (or [S]), bool (True: ignore this key) or added to the scores.
        attn_mask: [L, S], [B·H, L, S], or broadcasting to [B, H, L, S]; bool (True: ignore) or added.
        dtype: of the scores.
    """
    batch, _, _, keys = shape
    masks = []
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) not in ((batch, keys), *(((keys,),) if batch == 1 else ())):
            raise ValueError(f"key_padding_mask has shape {tuple(key_padding_mask.shape)}: expected ({batch}, {keys})")
        masks.append(_check(key_padding_mask, "key_padding_mask").reshape(batch, 1, 1, keys))
    if attn_mask is not None:
        masks.append(_four_dimensions(_check(attn_mask, "attn_mask"), shape))
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~(masks[0] | masks[1]) if len(masks) == 2 else ~masks[0]
    added = [torch.zeros_like(m, dtype=dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m for m in masks]
    return sum(m.to(dtype) for m in added)  # type: ignore[return-value]


def _four_dimensions(mask: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    batch, heads, queries, keys = shape
    given = tuple(mask.shape)
    if given == (queries, keys):
        return mask[None, None]
    if given == (batch * heads, queries, keys):
        return mask.view(batch, heads, queries, keys)
    if len(given) == 4 and all(m in (1, n) for m, n in zip(given, shape, strict=True)):
        return mask
    raise ValueError(
        f"attn_mask has shape {given}: expected ({queries}, {keys}), ({batch * heads}, {queries}, {keys}) or "
        f"({batch}, {heads}, {queries}, {keys})"
    )


def _check(mask: Tensor, name: str) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}: expected a tensor")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} has dtype {mask.dtype}: expected bool (True: ignore) or floating point (added)")
    return mask
