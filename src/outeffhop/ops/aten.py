"""Attention with a sink over PyTorch's own flash kernels.

A kernel runs, and its output and logsumexp get the sink (sink.py); the backward hands the corrected pair to the
kernel's own backward. All of it is aten ops in an autograd Function, which torch.compile traces through: a compiled
graph calls the kernels without Python, and fuses the sink with what comes after.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from outeffhop.ops.call import Call
from outeffhop.ops.kernels import KERNELS, Kernel, Options, Saved
from outeffhop.ops.sink import apply_sink, fold_lse_gradient, sink_gradient
from outeffhop.ops.torch_state import is_exporting
from outeffhop.ops.window import Packed

__all__ = ["attend"]


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
    size, value_size = query.shape[3], value.shape[3]
    if size != value_size or size % kernel.size_multiple:
        size = max(size, value_size)
        size = -(-size // kernel.size_multiple) * kernel.size_multiple
        query, key, value = (pad(t, (0, size - t.shape[3])) for t in (query, key, value))
    if not (query.stride(3) == key.stride(3) == value.stride(3) == 1 or size == 1):  # as the kernels need it
        query, key, value = (t if t.stride(3) == 1 else t.contiguous() for t in (query, key, value))
    options = Options(call.dropout_p, call.is_causal, call.scale, call.window, call.packed)
    learned, number = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink)
    if torch.compiler.is_compiling() and not is_exporting():
        flat = *options[:4], *(call.packed or (None, None, 0, 0))
        out, lse = torch.ops.outeffhop.attend.default(query, key, value, bias, learned, number, *flat, name)
    elif call.needs_grad:
        out, lse = _Attend.apply(name, query, key, value, bias, learned, number, options)
    else:
        out, lse, _, _ = _forward(name, query, key, value, bias, learned, number, options, call.return_lse)
    if size != value_size:
        out = out[..., :value_size]
    return out, _public_lse(lse, call) if call.return_lse else None


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


def _forward(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    learned: Tensor | None,
    number: float,
    options: Options,
    needs_lse: bool = True,
) -> Saved:
    """What the kernel leaves, with the sink in it; without ``needs_lse``, its logsumexp is not of use."""
    kernel = KERNELS[name]
    out, lse, rng0, rng1 = kernel.forward(query, key, value, bias, options)
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
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
    return *grads, grad_sink


def _composite(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    learned: Tensor | None,
    number: float,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    window: list[int] | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    max_q: int,
    max_k: int,
    name: str,
) -> tuple[Tensor, Tensor]:
    """The op: nothing but what stands in it, so that what traces below Dynamo finds aten ops."""
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    options = Options(dropout_p, is_causal, scale, None if window is None else (window[0], window[1]), packed)
    inputs = query, key, value, bias, learned, number, options
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return _Attend.apply(name, *inputs)  # type: ignore[no-any-return]
    return _forward(name, *inputs)[:2]


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
    def forward(ctx, name, query, key, value, bias, learned, number, options):  # type: ignore[no-untyped-def]
        saved = _forward(name, query, key, value, bias, learned, number, options)
        ctx.name, ctx.options = name, options
        ctx.save_for_backward(query, key, value, bias, learned, *saved)
        ctx.set_materialize_grads(False)
        return saved.out, saved.lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):  # type: ignore[no-untyped-def]
        query, key, value, bias, learned, *saved = ctx.saved_tensors
        out = saved[0]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if grad_lse is not None:
            grad_lse = grad_lse[:, :, : out.shape[2]].reshape(out.shape[:3])
        run = _Backward.apply if torch.is_grad_enabled() else _backward
        inputs = query, key, value, bias, learned, Saved(*saved), ctx.options
        dq, dk, dv, grad_sink = run(ctx.name, grad_out, grad_lse, *inputs)
        return None, dq, dk, dv, None, grad_sink, None, None


class _Backward(torch.autograd.Function):
    """The backward where autograd prepares for a second derivative, which there is not."""

    @staticmethod
    def forward(ctx, name, *inputs):  # type: ignore[no-untyped-def]
        ctx.name = name
        return _backward(name, *inputs)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"attention's fused backend {ctx.name!r} has only first derivatives; "
            "for a second derivative call attention(..., backend='eager')"
        )
