"""Attention with a sink over PyTorch's own flash kernels.

A kernel runs, and its output and logsumexp get the sink (sink.py); the backward hands the corrected pair to the
kernel's own backward. All of it is aten ops in an autograd Function, which torch.compile traces through: a compiled
graph calls the kernels without Python, and fuses the sink with what comes after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outeffhop.ops.call import Call
from outeffhop.ops.kernels import KERNELS, Grads, Kernel, Options, Saved
from outeffhop.ops.sink import apply_sink, fold_lse_gradient, sink_gradient
from outeffhop.ops.torch_state import is_exporting
from outeffhop.ops.window import Packed

__all__ = ["attend"]

_UNPACKED = (None, None, 0, 0)


def attend(name: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """Reshapes and pads the call for the kernel, differentiably, and runs it."""
    kernel = KERNELS[name]
    query, key, value, bias = call.query, call.key, call.value, None
    if call.mask is not None:
        call = call if kernel.wide_bias else call.with_mask_as_query()
        bias = _bias(call.mask, query, key, kernel)  # type: ignore[arg-type]
    if not kernel.grouped and call.grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    value_size = value.shape[3]
    size = max(query.shape[3], value_size)
    size = -(-size // kernel.size_multiple) * kernel.size_multiple
    query, key, value = _last_dim(query, size), _last_dim(key, size), _last_dim(value, size)
    learned, number = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink)
    inputs = (
        query,
        key,
        value,
        bias,
        learned,
        number,
        call.dropout_p,
        call.is_causal,
        call.scale,
        call.window,
        *(call.packed or _UNPACKED),
    )
    if torch.compiler.is_compiling() and not is_exporting():
        out, lse = torch.ops.outeffhop.attend.default(*inputs, name)
    elif call.needs_grad:
        out, lse = _Attend.apply(name, *inputs)
    else:
        out, lse, _, _ = _forward(name, call.return_lse, *inputs)
    if size != value_size:
        out = out[..., :value_size]
    return out, _public_lse(lse, call) if call.return_lse else None


def _last_dim(t: Tensor, size: int) -> Tensor:
    """Pads with zeros to the head size the kernel takes; kernels need the last dimension to be contiguous."""
    if t.shape[3] != size:
        return pad(t, (0, size - t.shape[3]))
    return t if t.stride(3) == 1 or size == 1 else t.contiguous()


def _bias(mask: Tensor, query: Tensor, key: Tensor, kernel: Kernel) -> Tensor:
    """The mask as the kernel takes it: additive, with four dimensions."""
    if mask.dtype == torch.bool:
        mask = mask.to(query.dtype).log_()  # log 1 = 0 and log 0 = −inf, in two launches
    if mask.dim() != 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    keys = key.shape[2]
    if mask.shape[3] != keys:
        mask = mask.expand(*mask.shape[:3], keys)
    rest = -keys % kernel.bias_alignment
    if rest:
        mask = pad(mask, (0, rest))[..., :keys]
    elif mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask if kernel.broadcast_bias else mask.expand(*query.shape[:3], keys)


def _public_lse(lse: Tensor, call: Call) -> Tensor:
    """lse' as [B, H, Lq]; s where all keys are masked, since kernels differ in what they leave there."""
    lse = lse[:, :, : call.query.shape[2]].reshape(call.query.shape[:3])
    rows = call.rows_without_keys()
    if rows is None:
        return lse
    sink = call.sink[:, None].to(lse.dtype) if isinstance(call.sink, Tensor) else call.sink
    return torch.where(rows, sink, lse)


def _options(
    dropout_p: float,
    is_causal: bool,
    scale: float,
    window: Sequence[int] | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
) -> Options:
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    band = None if window is None else (window[0], window[1])  # an op has it as a list
    return Options(dropout_p, is_causal, scale, band, packed)


def _forward(
    name: str,
    needs_lse: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    learned: Tensor | None,
    number: float,
    *options: Any,
) -> Saved:
    """What the kernel leaves, with the sink in it; without ``needs_lse``, its logsumexp is not of use."""
    kernel = KERNELS[name]
    out, lse, rng0, rng1 = kernel.forward(query, key, value, bias, _options(*options))
    without_keys = bias is not None or kernel.banded  # then a query may see no key
    if learned is not None or number != -math.inf or without_keys:
        out, lse = apply_sink(out, lse, number if learned is None else learned, without_keys, needs_lse)
    return Saved(out, lse, rng0, rng1)


def _backward(
    name: str,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    learned: Tensor | None,
    saved: Saved,
    options: Options,
) -> tuple[Grads, Tensor | None]:
    """The gradients of query, key and value, and of a learned sink."""
    size, out, lse = query.shape[-1], saved.out, saved.lse
    grad_sink = None if learned is None else sink_gradient(grad_out, grad_lse, out, lse, learned)
    if grad_lse is not None:
        multiple = KERNELS[name].size_multiple
        grad_out, query, key, value, out = fold_lse_gradient(grad_out, grad_lse, query, key, value, out, multiple)
    grads = KERNELS[name].backward(grad_out, query, key, value, bias, saved._replace(out=out), options)
    if grad_lse is not None:
        dq, dk, dv = (g[..., :size].contiguous() for g in grads)
        grads = dq, dk, dv
    return grads, grad_sink


def _composite(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The op: nothing but what stands in it, so that what traces below Dynamo finds aten ops."""
    *arguments, name = inputs
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in arguments):
        return _Attend.apply(name, *arguments)  # type: ignore[no-any-return]
    return _forward(name, True, *arguments)[:2]


# Only Dynamo sees it: it cannot trace into every autograd Function (that of PyTorch 2.11 drops this one's gradients),
# and autograd, which runs when the graph is compiled, can.
_library = torch.library.Library("outeffhop", "FRAGMENT")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? learned, float number, float dropout_p, "
    "bool is_causal, float scale, int[]? window, Tensor? cu_q, Tensor? cu_k, SymInt max_q, SymInt max_k, str name) "
    "-> (Tensor out, Tensor lse)"
)
_library.impl("attend", _composite, "CompositeImplicitAutograd")


# With short sequences on a GPU, Python takes most of the time. So the Functions are old-style, with ctx in forward:
# setup_context costs 20 µs more.


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, query, key, value, bias, learned, number, *options):  # type: ignore[no-untyped-def]
        saved = _forward(name, True, query, key, value, bias, learned, number, *options)
        ctx.name, ctx.options = name, options
        ctx.save_for_backward(query, key, value, bias, learned, *saved)
        ctx.set_materialize_grads(False)
        return saved.out, saved.lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
        query, key, value, bias, learned, out, lse, rng0, rng1 = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if grad_lse is not None:
            grad_lse = grad_lse[:, :, : out.shape[2]].reshape(out.shape[:3])
        inputs = query, key, value, bias, learned
        rest = Saved(out, lse, rng0, rng1), _options(*ctx.options)
        if torch.is_grad_enabled():
            dq, dk, dv, grad_sink = _Backward.apply(ctx.name, grad_out, grad_lse, *inputs, *rest)
        else:
            (dq, dk, dv), grad_sink = _backward(ctx.name, grad_out, grad_lse, *inputs, *rest)
        return None, dq, dk, dv, None, grad_sink, *(None,) * 9


class _Backward(torch.autograd.Function):
    """The backward where autograd prepares for a second derivative, which there is not."""

    @staticmethod
    def forward(ctx, name, *inputs):  # type: ignore[no-untyped-def]
        ctx.name = name
        grads, grad_sink = _backward(name, *inputs)
        return *grads, grad_sink

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"attention's fused backend {ctx.name!r} has only first derivatives; "
            "for a second derivative call attention(..., backend='eager')"
        )
