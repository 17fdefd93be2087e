"""PyTorch's own flash kernels: how each is called, and which calls it serves.

They are internal ops of PyTorch. Their signatures are checked when this module is imported; a kernel whose
signature has changed serves no call and says why. Forwards are called as ``torch._op``, which reads its arguments
faster than ``torch.ops.aten._op``; backwards have no such name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outeffhop.ops import cpu_blocks
from outeffhop.ops.call import Call
from outeffhop.ops.torch_state import constant
from outeffhop.ops.window import Packed

__all__ = ["Kernel", "KERNELS"]

aten = torch.ops.aten


class Saved(NamedTuple):
    """What a kernel's forward leaves for its backward."""

    out: Tensor  # [B, H, Lq, Dv]
    lse: Tensor  # [B, H, Lq or more, ...], in the kernel's own layout
    rng0: Tensor | None  # replays the dropout, together with rng1
    rng1: Tensor | None


class Options(NamedTuple):
    """What a kernel reads of a ``Call``, for autograd to keep without the call's tensors."""

    dropout_p: float
    is_causal: bool
    scale: float
    window: tuple[int, int] | None = None
    packed: Packed | None = None


Grads = tuple[Tensor, Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor, Tensor | None, Options | Call], Saved]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Saved, Options], Grads]


@dataclass(frozen=True)
class Kernel:
    name: str
    device: str
    forward: Forward
    backward: Backward
    ops: dict[str, str]  # name of the op → its arguments, as this module calls it
    dtypes: tuple[torch.dtype, ...]
    capability: tuple[int, int] = (0, 0)  # the lowest CUDA compute capability
    size_multiple: int = 1  # head sizes are padded to this
    largest_size: float = math.inf
    bias: bool = True  # takes an additive mask
    wide_bias: bool = False  # takes a float32 mask with half precision; else it is rounded
    broadcast_bias: bool = True  # takes a mask with dimensions of size 1; else it is expanded
    bias_alignment: int = 1  # the mask's rows begin at multiples of this
    grouped: bool = True  # takes fewer key than query heads; else they are repeated
    dropout: bool = True
    dropout_steps: int = 0  # probabilities are multiples of 1 / this; 0: any
    deterministic: bool = True
    ragged_causal: bool = True  # top-left causal with Lq ≠ Lk
    one_key: bool = True  # takes a single key
    plans: bool = False  # makes a plan for each shape it has not seen
    banded: bool = False  # serves windows and packed batches, and only those
    ragged_window: bool = True  # top-left windows with Lq ≠ Lk
    node: bool = False  # autograd's node of the forward hands what it returned, out and lse, to the backward

    def missing(self) -> str | None:
        """Why this PyTorch cannot run the kernel at all; None if it can."""
        for op, arguments in self.ops.items():
            packet = getattr(aten, op, None)
            if packet is None:
                return f"PyTorch {torch.__version__} has no op aten::{op}"
            known = arguments.count(",") + 1
            names = [a.name for a in packet.default._schema.arguments]
            found = ", ".join(names)
            rest = packet.default._schema.arguments[known:]
            if ", ".join(names[:known]) != arguments or not all(a.has_default_value() for a in rest):
                return f"PyTorch {torch.__version__} changed aten::{op} to take ({found}), not ({arguments})"
        return None

    def why_not(self, call: Call) -> str | None:
        """Why the kernel does not serve this call; None if it does."""
        query, mask = call.query, call.mask
        if query.device.type != self.device:
            return f"serves {self.device} tensors, got {query.device.type}"
        if _MISSING[self.name] is not None:
            return _MISSING[self.name]
        if call.transformed:
            return "has no rule for torch.func transforms and forward-mode differentiation"
        if query.dim() != 4:
            return f"serves 4 dimensions (batch, heads, length, size), got {query.dim()}"
        if call.empty:
            return "does not take tensors without elements"
        if call.banded != self.banded:
            return "serves only windows and packed batches" if self.banded else "takes no window and no packed batch"
        if query.dtype not in self.dtypes:
            return f"serves {', '.join(str(d) for d in self.dtypes)}, got {query.dtype}"
        if self.device == "cuda" and _capability(query.device.index) < self.capability:
            return f"needs compute capability {self.capability}, this device has {_capability(query.device.index)}"
        size = max(query.shape[-1], call.value.shape[-1])
        if size > self.largest_size:
            return f"serves head sizes up to {self.largest_size}, got {size}"
        if call.return_lse and call.needs_grad and size + self.size_multiple > self.largest_size:
            return f"needs {self.size_multiple} columns beside a head size of {size} for the gradient of the logsumexp"
        if call.dropout_p > 0 and not self.dropout:
            return f"has no dropout, got dropout_p={call.dropout_p}"
        if self.dropout_steps and call.dropout_p * self.dropout_steps % 1:
            return f"drops with multiples of 1/{self.dropout_steps}, got dropout_p={call.dropout_p}"
        if not self.deterministic and torch.are_deterministic_algorithms_enabled():
            return "is not deterministic, which torch.use_deterministic_algorithms asks for"
        if mask is not None and not self.bias:
            return "takes no attn_mask"
        if mask is not None and mask.requires_grad:
            return "gives no gradient to attn_mask, which requires one"
        if call.key.shape[-2] == 1 and not self.one_key:
            return "does not take a single key"
        ragged = query.shape[-2] != call.key.shape[-2]
        if call.window is not None and call.packed is None and ragged and not self.ragged_window:
            lengths = f"{query.shape[-2]} and {call.key.shape[-2]}"
            return f"takes a window only with as many queries as keys, got {lengths}"
        if call.is_causal and query.shape[-2] != call.key.shape[-2] and not self.ragged_causal:
            lengths = f"{query.shape[-2]} and {call.key.shape[-2]}"
            return f"takes is_causal=True only with as many queries as keys, got {lengths}"
        return None


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Options | Call) -> Saved:
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, o.dropout_p, o.is_causal, attn_mask=bias, scale=o.scale
    )
    return Saved(out, lse, None, None)


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, saved: Saved, o: Options
) -> Grads:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, saved.out, saved.lse, o.dropout_p, o.is_causal, attn_mask=bias, scale=o.scale
    )


def _cpu_window_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Options | Call) -> Saved:
    out, lse = cpu_blocks.forward(q, k, v, bias, o.is_causal, o.scale, o.window, o.packed)
    return Saved(out, lse, None, None)


def _cpu_window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, saved: Saved, o: Options
) -> Grads:
    return cpu_blocks.backward(grad, q, k, v, bias, saved.out, saved.lse, o.is_causal, o.scale, o.window, o.packed)


def _packed_rows(t: Tensor, o: Options | Call) -> Tensor:
    """[B, H, L, D] → [B, L, H, D], or [L, H, D] for a packed batch: the layouts of the flash op. And back."""
    return t.transpose(1, 2) if o.packed is None else t[0].transpose(0, 1)


def _heads_first(t: Tensor, o: Options | Call) -> Tensor:
    return t.transpose(1, 2) if o.packed is None else t.transpose(0, 1)[None]


def _lengths(q: Tensor, k: Tensor, o: Options | Call) -> tuple[Tensor | None, Tensor | None, int, int]:
    return (None, None, q.shape[2], k.shape[2]) if o.packed is None else o.packed


def _window_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Options | Call) -> Saved:
    left, right = (-1, -1) if o.window is None else o.window
    out, lse, rng0, rng1, _ = aten._flash_attention_forward(
        *(_packed_rows(t, o) for t in (q, k, v)),
        *_lengths(q, k, o),
        o.dropout_p,
        o.is_causal,
        False,
        scale=o.scale,
        window_size_left=left,
        window_size_right=right,
    )
    # lse is [B, H, L], or [H, L] for a packed batch
    return Saved(_heads_first(out, o), lse if o.packed is None else lse[None], rng0, rng1)


def _window_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, saved: Saved, o: Options
) -> Grads:
    left, right = (-1, -1) if o.window is None else o.window
    grads = aten._flash_attention_backward(
        *(_packed_rows(t, o) for t in (grad, q, k, v, saved.out)),
        saved.lse if o.packed is None else saved.lse[0],
        *_lengths(q, k, o),
        o.dropout_p,
        o.is_causal,
        saved.rng0,
        saved.rng1,
        scale=o.scale,
        window_size_left=left,
        window_size_right=right,
    )
    dq, dk, dv = (_heads_first(g, o) for g in grads)
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Options | Call) -> Saved:
    out, lse, _, _, _, _, rng0, rng1, _ = torch._scaled_dot_product_flash_attention(
        q, k, v, o.dropout_p, o.is_causal, False, scale=o.scale
    )
    return Saved(out, lse, rng0, rng1)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, saved: Saved, o: Options
) -> Grads:
    out, lse, rng0, rng1 = saved
    lengths = None, None, q.shape[2], k.shape[2]  # no nested tensors
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, o.dropout_p, o.is_causal, rng0, rng1, scale=o.scale
    )


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Options | Call) -> Saved:
    out, lse, _, _, _, _, rng0, rng1, _ = torch._scaled_dot_product_cudnn_attention(
        q, k, v, bias, True, o.dropout_p, o.is_causal, False, scale=o.scale
    )
    return Saved(out, lse, rng0, rng1)


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, saved: Saved, o: Options
) -> Grads:
    out, lse, rng0, rng1 = saved
    lengths = None, None, q.shape[2], k.shape[2]  # no nested tensors
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, rng0, rng1, bias, *lengths, o.dropout_p, o.is_causal, scale=o.scale
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, o: Options | Call) -> Saved:
    out, lse, rng0, rng1 = torch._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, o.dropout_p, o.is_causal, scale=o.scale
    )
    return Saved(out, lse, rng0, rng1)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, saved: Saved, o: Options
) -> Grads:
    wanted = [True, True, True, False]  # q, k, v, not the mask
    return aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, bias, *saved, o.dropout_p, wanted, o.is_causal, scale=o.scale
    )[:3]


_HALF = (torch.float16, torch.bfloat16)
_QKV = "query, key, value"
_LENGTHS = "cum_seq_q, cum_seq_k, max_q, max_k"
_CPU_OPS = {
    "_scaled_dot_product_flash_attention_for_cpu": f"{_QKV}, dropout_p, is_causal, attn_mask, scale",
    "_scaled_dot_product_flash_attention_for_cpu_backward": f"grad_out, {_QKV}, out, logsumexp, "
    "dropout_p, is_causal, attn_mask, scale",
}

# Fastest first
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            name="cudnn",
            device="cuda",
            forward=_cudnn_forward,
            backward=_cudnn_backward,
            ops={
                "_scaled_dot_product_cudnn_attention": f"{_QKV}, attn_bias, compute_log_sumexp, dropout_p, "
                "is_causal, return_debug_mask, scale",
                "_scaled_dot_product_cudnn_attention_backward": f"grad_out, {_QKV}, out, logsumexp, philox_seed, "
                f"philox_offset, attn_bias, {_LENGTHS}, dropout_p, is_causal, scale",
            },
            dtypes=_HALF,
            capability=(9, 0),
            size_multiple=8,
            largest_size=128,
            dropout_steps=16,
            deterministic=False,
            one_key=False,
            plans=True,
            node=True,
        ),
        Kernel(
            name="cuda_flash",
            device="cuda",
            forward=_flash_forward,
            backward=_flash_backward,
            ops={
                "_scaled_dot_product_flash_attention": f"{_QKV}, dropout_p, is_causal, return_debug_mask, scale",
                "_scaled_dot_product_flash_attention_backward": f"grad_out, {_QKV}, out, logsumexp, {_LENGTHS}, "
                "dropout_p, is_causal, philox_seed, philox_offset, scale",
            },
            dtypes=_HALF,
            capability=(8, 0),
            size_multiple=8,
            largest_size=256,
            bias=False,
            ragged_causal=False,
            node=True,
        ),
        Kernel(
            name="efficient",
            device="cuda",
            forward=_efficient_forward,
            backward=_efficient_backward,
            ops={
                "_scaled_dot_product_efficient_attention": f"{_QKV}, attn_bias, compute_log_sumexp, dropout_p, "
                "is_causal, scale",
                "_scaled_dot_product_efficient_attention_backward": f"grad_out_, {_QKV}, attn_bias, out, logsumexp, "
                "philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal, scale",
            },
            dtypes=(*_HALF, torch.float32),
            capability=(8, 0),
            size_multiple=8,
            broadcast_bias=False,
            bias_alignment=8,
            grouped=False,
            node=True,
        ),
        Kernel(
            name="cpu",
            device="cpu",
            forward=_cpu_forward,
            backward=_cpu_backward,
            ops=_CPU_OPS,
            dtypes=(*_HALF, torch.float32, torch.float64),
            wide_bias=True,
            dropout=False,
            node=True,
        ),
        Kernel(
            name="cuda_window",
            device="cuda",
            forward=_window_forward,
            backward=_window_backward,
            ops={
                "_flash_attention_forward": f"{_QKV}, {_LENGTHS}, dropout_p, is_causal, return_debug_mask, scale, "
                "window_size_left, window_size_right",
                "_flash_attention_backward": f"grad_out, {_QKV}, out, logsumexp, {_LENGTHS}, dropout_p, is_causal, "
                "rng_state, unused, scale, window_size_left, window_size_right",
            },
            dtypes=_HALF,
            capability=(8, 0),
            size_multiple=8,
            largest_size=256,
            bias=False,
            banded=True,
            ragged_window=False,
        ),
        Kernel(
            name="cpu_window",
            device="cpu",
            forward=_cpu_window_forward,
            backward=_cpu_window_backward,
            ops=_CPU_OPS,
            dtypes=(*_HALF, torch.float32, torch.float64),
            wide_bias=True,
            dropout=False,
            banded=True,
        ),
    )
}

# Looked up once: under torch.compile it is a constant.
_MISSING = {name: kernel.missing() for name, kernel in KERNELS.items()}


@constant
def _capability(index: int | None) -> tuple[int, int]:
    # called once a tensor is on the device: at import it would start CUDA in every process
    return torch.cuda.get_device_capability(index)
