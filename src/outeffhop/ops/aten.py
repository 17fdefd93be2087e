"""Attention with a sink over PyTorch's own flash kernels.

A kernel runs, and its output and logsumexp get the sink (sink.py); the backward hands the corrected pair to the
kernel's own backward. All of it is aten ops in an autograd Function, which torch.compile traces through: a compiled
graph calls the kernels without Python, and fuses the sink with what comes after.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from outeffhop.ops.call import Call
from outeffhop.ops.kernels import KERNELS, Kernel, Options, Saved
from outeffhop.ops.sink import apply_sink, fold_lse_gradient, sink_gradient
from outeffhop.ops.torch_state import is_exporting, is_plain, saves_unchanged
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
    learned, number = (call.sink, 0.0) if isinstance(call.sink, Tensor) else (None, call.sink)
    if torch.compiler.is_compiling() and not is_exporting():
        flat = call.dropout_p, call.is_causal, call.scale, call.window, *(call.packed or (None, None, 0, 0))
        out, lse = torch.ops.outeffhop.attend.default(query, key, value, bias, learned, number, *flat, name)
    elif not call.needs_grad:
        out, lse, _, _ = kernel.forward(query, key, value, bias, call)
        out, lse = _with_sink(out, lse, call.sink, bias is not None or kernel.banded, call.return_lse)
    else:
        options = Options(call.dropout_p, call.is_causal, call.scale, call.window, call.packed)
        if learned is None and not call.return_lse and _has_node(kernel, query, key, value):
            out, lse = _by_node(kernel, query, key, value, bias, number, options)
        else:
            out, lse = _Attend.apply(name, query, key, value, bias, learned, number, options)
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
) -> Saved:
    """What the kernel leaves, with the sink in it."""
    kernel = KERNELS[name]
    out, lse, rng0, rng1 = kernel.forward(query, key, value, bias, options)
    sink = number if learned is None else learned
    out, lse = _with_sink(out, lse, sink, bias is not None or kernel.banded)
    return Saved(out, lse, rng0, rng1)


def _with_sink(
    out: Tensor,
    lse: Tensor,
    sink: float | Tensor,
    without_keys: bool,
    needs_lse: bool = True,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """``apply_sink`` where there is something to do; ``without_keys``: a query may see no key."""
    if without_keys or isinstance(sink, Tensor) or sink != -math.inf:
        return apply_sink(out, lse, sink, without_keys, needs_lse, in_place)
    return out, lse


# Whether a kernel's node has been seen to save the tensors that the kernel returned, and not copies of them.
_KEPT: dict[str, bool] = {}


def _has_node(kernel: Kernel, *tensors: Tensor) -> bool:
    """Whether PyTorch's own node can carry the gradients of this call: what it saves is what the kernel returns."""
    # a hook on saved tensors (offloading, checkpointing) sees them before the sink is in them
    return kernel.node and _KEPT.get(kernel.name, True) and is_plain(*tensors) and saves_unchanged()


def _by_node(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, number: float, options: Options
) -> tuple[Tensor, Tensor]:
    """A call that trains with a constant sink, whose backward is PyTorch's own node, which costs no Python.

    The node has saved ``out`` and ``lse``, to hand them to the kernel's backward. The sink goes into their memory, so
    the backward gets the corrected pair. It goes there through ``.data``: to autograd nothing has changed since the
    forward.
    """
    out, lse, _, _ = kernel.forward(query, key, value, bias, options)
    node: Any = out.grad_fn
    if kernel.name not in _KEPT:
        _KEPT[kernel.name] = _keeps(node, out) and _keeps(node, lse)
        if not _KEPT[kernel.name]:
            return _Attend.apply(kernel.name, query, key, value, bias, None, number, options)  # type: ignore[no-any-return]
    _with_sink(out.data, lse.data, number, without_keys=bias is not None, in_place=True)
    node.register_hook(_ONLY_FIRST[kernel.name])
    return out, lse


def _keeps(node: Any, tensor: Tensor) -> bool:
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    return any(isinstance(t, Tensor) and t.data_ptr() == tensor.data_ptr() for t in saved)


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
        _refuse_second(ctx.name)


class _OnlyFirst(torch.autograd.Function):
    """Gradients as they are, for which there is no second derivative."""

    @staticmethod
    def forward(ctx, name, *grads):  # type: ignore[no-untyped-def]
        ctx.name = name
        return grads

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        _refuse_second(ctx.name)


def _only_first(name: str, grads: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
    """A hook on a kernel's node, whose own error for a second derivative does not name the remedy."""
    return _OnlyFirst.apply(name, *grads) if torch.is_grad_enabled() else None  # type: ignore[no-any-return]


_ONLY_FIRST = {name: partial(_only_first, name) for name in KERNELS}


def _refuse_second(name: str) -> NoReturn:
    raise RuntimeError(
        f"attention's fused backend {name!r} has only first derivatives; "
        "for a second derivative call attention(..., backend='eager')"
    )
