"""Attention with a sink over PyTorch's own flash kernels, as one op registered with torch.library.

``outeffhop::attend`` runs a kernel and gives its output and logsumexp the sink (sink.py);
``outeffhop::attend_backward`` hands the corrected pair to the kernel's own backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outeffhop.ops.call import Call
from outeffhop.ops.kernels import KERNELS, Kernel, Options, Saved
from outeffhop.ops.sink import apply_sink, fold_lse_gradient, sink_gradient
from outeffhop.ops.torch_state import below_autograd, is_plain
from outeffhop.ops.window import Packed

__all__ = ["attend"]

_library = torch.library.Library("outeffhop", "DEF")
_library.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sinks, float sink, float dropout_p, "
    "bool is_causal, float scale, str kernel, int[]? window=None, Tensor? cu_q=None, Tensor? cu_k=None, int max_q=0, "
    "int max_k=0) -> (Tensor out, Tensor lse, Tensor rng0, Tensor rng1)",
    tags=torch.Tag.needs_fixed_stride_order,
)
_library.define(
    "attend_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor? bias, "
    "Tensor? sinks, Tensor out, Tensor lse, Tensor rng0, Tensor rng1, float dropout_p, bool is_causal, float scale, "
    "str kernel, int[]? window=None, Tensor? cu_q=None, Tensor? cu_k=None, int max_q=0, int max_k=0) -> "
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_sinks)",
    tags=torch.Tag.needs_fixed_stride_order,
)


def attend(name: str, call: Call) -> tuple[Tensor, Tensor | None]:
    """Reshapes and pads the call for the kernel, differentiably, and runs the op."""
    kernel = KERNELS[name]
    call = call if kernel.wide_bias else call.with_mask_as_query()
    query, key, value = call.query, call.key, call.value
    if call.grouped and not kernel.grouped:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    size = max(query.shape[-1], value.shape[-1])
    size = -(-size // kernel.size_multiple) * kernel.size_multiple
    query, key, value = (_last_dim(t, size) for t in (query, key, value))
    sinks, sink = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink)
    inputs = (
        query,
        key,
        value,
        None if call.mask is None else _bias(call.mask, query, key, kernel),
        sinks,
        sink,
        call.dropout_p,
        call.is_causal,
        call.scale,
        name,
        call.window,
        *(call.packed or (None, None, 0, 0)),
    )
    if not is_plain(query, key, value):
        out, lse, _, _ = _attend(*inputs)
    elif call.needs_grad:
        out, lse, _, _ = _Attend.apply(True, *inputs)
    else:
        out, lse, _, _ = _forward(*inputs)
    if out.shape[-1] != call.value.shape[-1]:
        out = out[..., : call.value.shape[-1]]
    return out, _public_lse(lse, call) if call.return_lse else None


def _last_dim(t: Tensor, size: int) -> Tensor:
    """Pads with zeros to the head size the kernel takes; kernels need the last dimension to be contiguous."""
    if t.shape[-1] != size:
        return pad(t, (0, size - t.shape[-1]))
    return t if t.stride(-1) == 1 or size == 1 else t.contiguous()


def _bias(mask: Tensor, query: Tensor, key: Tensor, kernel: Kernel) -> Tensor:
    """The mask as the kernel takes it: additive, with four dimensions."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    mask = mask.expand(*mask.shape[:3], key.shape[2])
    rest = -key.shape[2] % kernel.bias_alignment
    if rest:
        mask = pad(mask, (0, rest))[..., : key.shape[2]]
    elif mask.stride(-1) != 1:
        mask = mask.contiguous()
    return mask if kernel.broadcast_bias else mask.expand(*query.shape[:3], key.shape[2])


def _public_lse(lse: Tensor, call: Call) -> Tensor:
    """lse' as [B, H, Lq]; s where all keys are masked, since kernels differ in what they leave there."""
    lse = lse[:, :, : call.query.shape[2]].reshape(call.query.shape[:3])
    rows = call.rows_without_keys()
    if rows is None:
        return lse
    sink = call.sink[:, None].to(lse.dtype) if isinstance(call.sink, Tensor) else call.sink
    return torch.where(rows, sink, lse)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    sink: float,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    kernel: str,
    *band: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = _options(dropout_p, is_causal, scale, kernel, *band)
    out, lse, rng0, rng1 = KERNELS[kernel].forward(query, key, value, bias, options)
    if sinks is not None or sink != -math.inf or bias is not None or KERNELS[kernel].banded:
        out, lse = apply_sink(out, lse, sink if sinks is None else sinks)
    return out, lse, rng0, rng1


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rng0: Tensor,
    rng1: Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
    kernel: str,
    *band: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = query.shape[-1]
    grad_sinks = query.new_empty(0) if sinks is None else sink_gradient(grad_out, grad_lse, out, lse, sinks)
    if grad_lse is not None:
        multiple = KERNELS[kernel].size_multiple
        grad_out, query, key, value, out = fold_lse_gradient(grad_out, grad_lse, query, key, value, out, multiple)
    grads = KERNELS[kernel].backward(
        grad_out,
        query,
        key,
        value,
        bias,
        Saved(out, lse, rng0, rng1),
        _options(dropout_p, is_causal, scale, kernel, *band),
    )
    if grad_lse is not None:
        dq, dk, dv = (g[..., :size].contiguous() for g in grads)
        grads = dq, dk, dv
    return *grads, grad_sinks


def _options(
    dropout_p: float,
    is_causal: bool,
    scale: float,
    kernel: str,
    window: Sequence[int] | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    max_q: int = 0,
    max_k: int = 0,
) -> Options:
    band = None if window is None else (window[0], window[1])
    packed = None if cu_q is None or cu_k is None else Packed(cu_q, cu_k, max_q, max_k)
    return Options(dropout_p, is_causal, scale, band, packed)


def _traced(options: Sequence[Any]) -> tuple[Kernel, Options]:
    """The kernel and options that give the shapes: a kernel that loops over blocks has those of the whole."""
    kernel = KERNELS[options[3]]
    found = _options(*options)
    return (KERNELS[kernel.shaped_as], Options(*found[:3])) if kernel.shaped_as else (kernel, found)


def _fake_forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # the sink changes no shape, and PyTorch knows the shapes of its own kernels
    query, key, value, bias, _, _, *rest = inputs
    kernel, options = _traced(rest)
    return kernel.forward(query, key, value, bias, options)


def _fake_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, query, key, value, bias, sinks, out, lse, rng0, rng1, *rest = inputs
    saved = Saved(out, lse, rng0, rng1)
    kernel, options = _traced(rest)
    grads = kernel.backward(grad_out, query, key, value, bias, saved, options)
    if grad_lse is not None:
        dq, dk, dv = (torch.empty_like(g, memory_format=torch.contiguous_format) for g in grads)
        grads = dq, dk, dv
    return *grads, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


# With short sequences on a GPU, Python takes most of the time. So the Functions are old-style, with ctx in
# forward (setup_context and torch.library.register_autograd cost 20 to 40 µs more), and where nothing traces
# or watches the dispatcher they call the kernels directly instead of through the op.


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direct, *inputs):  # type: ignore[no-untyped-def]
        output = _forward(*inputs) if direct else below_autograd(_attend, inputs)
        query, key, value, bias, sinks, _, dropout_p, is_causal, scale, kernel, *band = inputs
        ctx.options, ctx.direct = (dropout_p, is_causal, scale, kernel), direct
        band += [None, None, None, 0, 0][len(band) :]  # the op leaves out defaults
        window, cu_q, cu_k, *longest = band
        ctx.window, ctx.longest, ctx.inputs = window, longest, len(inputs)
        ctx.save_for_backward(query, key, value, bias, sinks, cu_q, cu_k, *output)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *_):  # type: ignore[no-untyped-def]
        query, key, value, bias, sinks, cu_q, cu_k, out, lse, rng0, rng1 = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if grad_lse is not None:
            grad_lse = grad_lse[:, :, : out.shape[2]].reshape(out.shape[:3])
        # with gradients enabled, autograd prepares for a second derivative, which the op refuses
        run = _backward if ctx.direct and not torch.is_grad_enabled() else _attend_backward
        band = ctx.window, cu_q, cu_k, *ctx.longest
        *grads, grad_sinks = run(
            grad_out, grad_lse, query, key, value, bias, sinks, out, lse, rng0, rng1, *ctx.options, *band
        )
        rest = (None,) * (ctx.inputs - 5)
        return None, *grads, None, None if sinks is None else grad_sinks, *rest


class _AttendBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direct, *inputs):  # type: ignore[no-untyped-def]
        ctx.kernel = inputs[14]
        return below_autograd(_attend_backward, inputs)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        raise RuntimeError(
            f"attention's fused backend {ctx.kernel!r} has only first derivatives; "
            "for a second derivative call attention(..., backend='eager')"
        )


def _autograd(function: type[torch.autograd.Function], op, *inputs):  # type: ignore[no-untyped-def]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
        return function.apply(False, *inputs)
    return below_autograd(op, inputs)


_attend = torch.ops.outeffhop.attend.default
_attend_backward = torch.ops.outeffhop.attend_backward.default
_library.impl("attend", _forward, "CompositeExplicitAutograd")
_library.impl("attend_backward", _backward, "CompositeExplicitAutograd")
_library.impl("attend", partial(_autograd, _Attend, _attend), "Autograd")
_library.impl("attend_backward", partial(_autograd, _AttendBackward, _attend_backward), "Autograd")
torch.library.register_fake("outeffhop::attend", _fake_forward, lib=_library)
torch.library.register_fake("outeffhop::attend_backward", _fake_backward, lib=_library)
