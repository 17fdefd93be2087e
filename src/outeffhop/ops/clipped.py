"""Attention with clipped softmax on a GPU: the Triton kernels as one differentiable op, and which calls they serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outeffhop.ops import clipped_triton
from outeffhop.ops.call import Call
from outeffhop.ops.probe import is_seen
from outeffhop.ops.torch_state import is_exporting

__all__ = ["attend", "why_not"]

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256

_library = torch.library.Library("outeffhop", "FRAGMENT")
_GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed"
_NUMBERS = "float gamma, float zeta, float dropout_p"
_library.define(f"clipped({_GIVEN}, bool is_causal, float scale, float sink, {_NUMBERS}) -> (Tensor out, Tensor lse)")
_library.define(
    f"clipped_backward(Tensor grad, {_GIVEN}, Tensor lse, bool is_causal, float scale, {_NUMBERS}) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value)"
)


def why_not(call: Call) -> str | None:
    """Why the kernels do not serve a call; None if they do."""
    if call.query.device.type != "cuda" or not clipped_triton.available():
        return "runs on CUDA with Triton only"
    if is_seen():
        return "shows a probe or a watch nothing"
    if is_exporting():
        return "is an op of this package, which exported programs do without"
    if call.query.dtype not in _HALF:  # float32 has no tensor cores unless it is rounded
        return "takes float16 and bfloat16"
    if call.query.dim() != 4 or call.empty:
        return "takes [B, H, L, D] that are not empty"
    if max(call.query.shape[-1], call.value.shape[-1]) > _LARGEST_HEAD:
        return f"takes heads of at most {_LARGEST_HEAD}"
    if call.banded:
        return "has no windows or packed batches"
    if call.transformed:
        return "is not transformed by torch.func"
    if call.mask is not None and call.mask.requires_grad:
        return "has no gradient for the mask"
    return None


def attend(call: Call, gamma: float, zeta: float) -> Tensor:
    """clip((ζ − γ)·softmax_n(scores) + γ, 0, 1)·v  [B, H, Lq, Dv]; n = exp(call.sink)."""
    mask = call.mask
    if mask is not None:
        mask = mask.expand(*call.query.shape[:-1], call.key.shape[-2])
    # on the device, from PyTorch's generator: a seeded run repeats, and a CUDA graph draws anew at each replay
    seed = torch.randint(2**31, (), device=call.query.device) if call.dropout_p else None
    given = (call.query, call.key, call.value, mask, seed)
    numbers = (gamma, zeta, call.dropout_p)
    return torch.ops.outeffhop.clipped(*given, call.is_causal, call.scale, call.sink, *numbers)[0]  # type: ignore[no-any-return]


def _forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return clipped_triton.forward(_dense_rows(query), _dense_rows(key), _dense_rows(value), *rest)


def _backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value = map(_dense_rows, (grad, query, key, value))
    return clipped_triton.backward(grad, query, key, value, *rest)


def _dense_rows(t: Tensor) -> Tensor:
    """The kernels read rows whose numbers lie side by side."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _traced_forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return clipped_triton.empty_like(query, value), query.new_empty(query.shape[:-1], dtype=torch.float32)


def _traced_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(clipped_triton.empty_like(t, t) for t in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, seed, ctx.is_causal, ctx.scale, _, *ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, mask, seed, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    *given, lse = ctx.saved_tensors
    grads = torch.ops.outeffhop.clipped_backward(grad, *given, lse, ctx.is_causal, ctx.scale, *ctx.numbers)
    return *grads, *[None] * 8


_library.impl("clipped", _forward, "CUDA")
_library.impl("clipped_backward", _backward, "CUDA")
torch.library.register_fake("outeffhop::clipped", _traced_forward, lib=_library)
torch.library.register_fake("outeffhop::clipped_backward", _traced_backward, lib=_library)
torch.library.register_autograd("outeffhop::clipped", _differentiate, setup_context=_keep, lib=_library)
