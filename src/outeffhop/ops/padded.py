"""Attention with a sink by the public scaled_dot_product_attention: one more key and value, both zero.

The zero key scores 0, to which its column of the mask adds the sink; the zero value adds nothing to the output.
Since this uses no internals of PyTorch, it serves other devices and exports.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from outeffhop.ops.call import Call

__all__ = ["attend", "why_not"]


def why_not(call: Call) -> str | None:
    if call.return_lse:
        return "has no logsumexp, which scaled_dot_product_attention does not return (return_lse=True, or a watch)"
    if call.transformed:
        return "may reach kernels without a rule for torch.func transforms and forward-mode differentiation"
    if call.empty:
        return "does not take tensors without elements"
    return None


def attend(call: Call) -> tuple[Tensor, None]:
    dtype = call.query.dtype
    if call.mask is not None and call.mask.dtype not in (torch.bool, dtype):
        # most devices, and ONNX, need a mask of the query's dtype, and rounding the mask would change the scores
        query, key, value = (t.to(call.mask.dtype) for t in (call.query, call.key, call.value))
        call = replace(call, query=query, key=key, value=value)
    mask, is_causal, key, value = call.mask, call.is_causal, call.key, call.value
    if isinstance(call.sink, Tensor) or call.sink != -math.inf:
        if mask is not None or is_causal or call.banded or isinstance(call.sink, Tensor) or call.sink != 0.0:
            bias = _additive(call)
            mask, is_causal = torch.cat([bias, _column(call, bias.shape[:-1])], dim=-1), False
        key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    elif call.banded or (mask is not None and (is_causal or mask.dtype != torch.bool or mask.dim() < 2)):
        # PyTorch takes either a mask or is_causal; the mask needs the query's dtype and both lengths
        mask, is_causal = _additive(call), False
    out = scaled_dot_product_attention(
        call.query,
        key,
        value,
        attn_mask=mask,
        dropout_p=call.dropout_p,
        is_causal=is_causal,
        scale=call.scale,
        enable_gqa=call.grouped,
    )
    if isinstance(call.sink, Tensor) or call.sink == -math.inf:
        # without a sink, what PyTorch's kernels leave in a row without keys is undefined
        rows = call.rows_without_keys()
        out = out if rows is None else out.masked_fill(rows.unsqueeze(-1), 0.0)
    return out.to(dtype), None


def _additive(call: Call) -> Tensor:
    """The mask and the causal mask as one additive mask.  [..., H or 1, Lq, Lk]"""
    query, lengths = call.query, (call.query.shape[-2], call.key.shape[-2])
    bias = torch.zeros(1, *lengths, dtype=query.dtype, device=query.device)
    if call.mask is not None:
        bias = bias.masked_fill(~call.mask, -math.inf) if call.mask.dtype == torch.bool else bias + call.mask
    seen = call.visible()
    if seen is not None:
        bias = bias.masked_fill(~seen, -math.inf)
    if isinstance(call.sink, Tensor):  # one column per head needs one mask per head
        bias = bias.expand(*bias.shape[:-3], query.shape[-3], *lengths)
    return bias


def _column(call: Call, shape: torch.Size) -> Tensor:
    """The mask's column for the zero key: the sink.  [..., H or 1, Lq, 1]"""
    sink, dtype = call.sink, call.query.dtype
    # clamped to the largest number, since inf would give NaN
    if isinstance(sink, Tensor):
        return sink.to(dtype).clamp(max=torch.finfo(dtype).max)[:, None, None].expand(*shape, 1)
    return call.query.new_full((*shape, 1), min(max(sink, torch.finfo(dtype).min), torch.finfo(dtype).max))
