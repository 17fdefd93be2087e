"""One call, many kernels: attention whose softmax can attend to nothing.

``attention`` is called like ``torch.nn.functional.scaled_dot_product_attention`` and computes
softmax_n; ``explain`` says which backends can serve a call, and why the others cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outeffhop._naming import known
from outeffhop.methods import Method, Normalizer
from outeffhop.ops import aten, clipped, eager, entmax_gpu, padded
from outeffhop.ops.call import Call, check_sink, prepare
from outeffhop.ops.kernels import KERNELS
from outeffhop.ops.probe import is_probed, watch
from outeffhop.ops.remember import Remembered, key_of
from outeffhop.ops.torch_state import is_exporting
from outeffhop.ops.window import Packed, check_lengths, check_sequences

__all__ = ["attention", "attention_varlen", "explain", "Explanation", "BACKENDS"]


@dataclass(frozen=True)
class Backend:
    why_not: Callable[[Call], str | None]
    attend: Callable[[Call], tuple[Tensor, Tensor | None]]


# In the order "auto" tries them.
BACKENDS: dict[str, Backend] = {
    **{name: Backend(kernel.why_not, partial(aten.attend, name)) for name, kernel in KERNELS.items()},
    "padded": Backend(padded.why_not, padded.attend),
    "eager": Backend(eager.why_not, eager.attend),
}


_REMEMBERED = Remembered()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: float | Tensor = 0.0,
    return_lse: bool = False,
    window: tuple[int | None, int | None] | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot product attention with softmax_n, exp(x_i) / (n + Σ exp(x_j)), n = exp(sink).

    Exact in output and gradients on every backend, in memory linear in the sequence length on the
    fused ones. A query whose keys are all masked gets output 0 and gradient 0.

    Args:
        query: [..., H, Lq, D]. This and the next arguments are those of
            ``torch.nn.functional.scaled_dot_product_attention``.
        key: [..., H, Lk, D]
        value: [..., H, Lk, Dv]
        attn_mask: broadcasts to [..., H, Lq, Lk]; bool (True: attend) or added to the scores. The CUDA
            kernels round an additive mask to the query's dtype.
        dropout_p: the probability of dropping a weight.
        is_causal: query i sees keys 0…i. Unlike in PyTorch, it can be combined with an attn_mask.
        scale: of the scores, by default 1/√D; the paper's β.
        enable_gqa: key and value may have fewer heads, a divisor of the query's.
        sink: log n. 0 is softmax1, −inf is softmax, log K is softmax_K; a tensor of shape (H,), or a
            scalar tensor, is learned.
        return_lse: also return log(n + Σ exp(scores)), [..., H, Lq], differentiable as well.
        window: (left, right), how many keys before and after its own position a query sees; −1 or None is
            unlimited. Query i is at key i. With is_causal, right is 0.
        backend: "auto" takes the fastest that can serve the call. A backend given by name raises ValueError
            with the reason if it cannot.

    Returns:
        The output [..., H, Lq, Dv], or (output, lse).
    """
    remembered = None
    if window is None and not torch.compiler.is_compiling():
        remembered = key_of(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, sink, return_lse, backend
        )
        found = _REMEMBERED.get(remembered)
        if found is not None:
            attend, c = found
            call = Call(
                query,
                key,
                value,
                attn_mask,
                c.dropout_p,
                c.is_causal,
                c.scale,
                check_sink(sink, query) if isinstance(sink, Tensor) else c.sink,
                return_lse,
                c.needs_grad,
            )
            out, lse = attend(call)
            return (out, lse) if return_lse else out  # type: ignore[return-value]
    wanted = return_lse or watch() is not None
    call = prepare(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, sink, wanted, window)
    if remembered is not None and _same_tensors(call, query, key, value, attn_mask):
        attend = BACKENDS[_choose(call, backend)].attend
        _REMEMBERED.put(remembered, attend, call)
        out, lse = attend(call)
    else:
        out, lse = _run(call, backend)
    lead = query.shape[:-1]
    if out.dim() != query.dim():
        out = out.reshape(*lead, out.shape[-1])
        lse = None if lse is None else lse.reshape(lead)
    return (out, lse) if return_lse else out  # type: ignore[return-value]


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: float | Tensor = 0.0,
    return_lse: bool = False,
    window: tuple[int | None, int | None] | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``attention`` over a packed batch: sequences of any lengths one behind the other, without padding.

    A query sees only keys of its own sequence. If a sequence has fewer queries than keys, its last query is at its
    last key, as in flash-attention, so that the queries continue a cache. A query without keys gets output 0.

    Args:
        query: [total_q, H, D]
        key: [total_k, H, D], or fewer heads with ``enable_gqa``
        value: [total_k, H, Dv]
        cu_seqlens_q: [sequences + 1], where each sequence begins, from 0 to total_q.
        cu_seqlens_k: [sequences + 1], from 0 to total_k.
        max_q: the longest sequence of queries. CUDA kernels trust it; longer sequences would be cut.
        max_k: the longest sequence of keys.
        dropout_p, is_causal, scale, enable_gqa, sink, window, backend: as for ``attention``.
        return_lse: also return log(n + Σ exp(scores)), [H, total_q].

    Returns:
        The output [total_q, H, Dv], or (output, lse).
    """
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor) or t.dim() != 3:
            found = tuple(t.shape) if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(f"{name} has shape {found}: expected a tensor [total, heads, size]")
    packed = Packed(
        check_lengths("cu_seqlens_q", cu_seqlens_q, query.shape[0], query.device),
        check_lengths("cu_seqlens_k", cu_seqlens_k, key.shape[0], query.device),
        int(max_q),
        int(max_k),
    )
    check_sequences(packed, query.shape[0], key.shape[0])
    wanted = return_lse or watch() is not None
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))  # [1, H, total, D]
    call = prepare(query, key, value, None, dropout_p, is_causal, scale, enable_gqa, sink, wanted, window, packed)
    out, lse = _run(call, backend)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out  # type: ignore[index]


@dataclass(frozen=True)
class Explanation:
    """Which backends can serve a call.

    Attributes:
        chosen: the one "auto" takes.
        reasons: backend → None if it can serve the call, else why not; in the order tried.
    """

    chosen: str
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        width = max(map(len, self.reasons))
        mark = {True: "chosen", False: "serves"}
        return "\n".join(
            f"{name:{width}}  {mark[name == self.chosen] if why is None else 'no: ' + why}"
            for name, why in self.reasons.items()
        )


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    sink: float | Tensor = 0.0,
    return_lse: bool = False,
    window: tuple[int | None, int | None] | None = None,
    method: str | Method | None = None,
) -> Explanation:
    """Which backends can serve ``attention`` with these arguments, and why the others cannot.

    With a ``method``, which backends can serve that method in a layer or model; it takes the place of ``sink``.
    """
    normalizer = None if method is None else Method.parse(method).normalizer
    if normalizer is not None:
        sink = -math.inf if normalizer.sink is None else normalizer.sink
    call = prepare(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, sink, return_lse, window)
    if normalizer is not None and normalizer.sink is None:
        return _explain_other_weights(normalizer, call)
    reasons = {name: backend.why_not(call) for name, backend in BACKENDS.items()}
    return Explanation(_choose(call, "auto"), reasons)


def _explain_other_weights(normalizer: Normalizer, call: Call) -> Explanation:
    """For methods whose weights are not a softmax, in the order ``outeffhop.state.attend`` tries."""
    reasons: dict[str, str | None] = {}
    if normalizer.clipping(call.key.shape[-2]) is not None:
        reasons["triton"] = clipped.why_not(call)
    order = normalizer.entmax_order
    if order is not None:
        reasons["adasplash"] = entmax_gpu.why_not(call, order, normalizer.learns is not None)
    reasons["eager"] = None
    return Explanation(next(name for name, why in reasons.items() if why is None), reasons)


def _same_tensors(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the checks have left the tensors as they came."""
    return call.query is query and call.key is key and call.value is value and call.mask is mask


def _run(call: Call, backend: str) -> tuple[Tensor, Tensor | None]:
    watcher = watch()
    if watcher is not None:
        call = call.with_positions_as_mask()  # a watch computes scores, and reads only masks
    out, lse = BACKENDS[_choose(call, backend)].attend(call)
    if watcher is not None:
        watcher(call, lse, None)
    return out, lse


def _choose(call: Call, backend: str) -> str:
    if backend == "auto":
        return next(name for name in _order(call) if BACKENDS[name].why_not(call) is None)
    why = BACKENDS[known("backend", backend, ["auto", *BACKENDS])].why_not(call)
    if why is not None:
        raise ValueError(
            f"backend={backend!r} cannot serve this call: it {why}. "
            "backend='auto' takes one that can; outeffhop.explain lists them"
        )
    return backend


def _order(call: Call) -> tuple[str, ...]:
    if is_probed():  # only the eager backend has what the probe asks for
        return ("eager",)
    # An exported program should run without this package, and ONNX has no form of the fused kernels (PyTorch exports
    # its CPU kernel's logsumexp as zeros), so only public ops serve.
    if is_exporting():
        return ("padded", "eager")
    names = [name for name, kernel in KERNELS.items() if kernel.device == call.query.device.type]
    if call.query.shape[-2] == 1 and call.mask is None:
        # A token that is generated has one key more than the last; a plan for each would cost more than attention.
        # With a mask the keys may be a static cache, whose shape stays, and kernels without plans would copy it.
        names.sort(key=lambda name: KERNELS[name].plans)
    return *names, "padded", "eager"
