"""The methods as attention implementations of transformers: one function for all of them.

    AutoModelForMaskedLM.from_config(config, attn_implementation="outeffhop")

A bare name means the method with its default parameters. Other parameters reach the attention modules when
``outeffhop.from_config`` builds a model, ``outeffhop.convert`` converts it, or ``from_pretrained`` loads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from outeffhop.methods import METHODS, Method
from outeffhop.models.modules import NAME, state_of
from outeffhop.models.recording import UNSERVED
from outeffhop.ops.probe import shown
from outeffhop.ops.softcap import joined
from outeffhop.ops.window import Packed
from outeffhop.state import attend
from outeffhop.state.gate import gated

__all__ = ["attention_function"]


def attention_function(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    attn_gate: Tensor | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the named method, as transformers calls it.

    A model's own sinks (``s_aux``, as in gpt-oss) replace the method's n. With γ = −α/T, T is the number of keys
    in the call, including padding and the empty places of a static cache; give γ itself if results must not depend
    on padding or a cache. QK-norm acts here, on queries and keys as they arrive: rotated if the model rotates them,
    and from a cache that holds them not normalized. Normalized scores are scaled by 1/√D: a model's own scaling,
    or that of a query scaled before (OPT's), is meant for vectors of any length.

    Args:
        name: the method's.
        module: the attention module, whose ``outeffhop`` holds the method's state.
        query: [B, H, T, D]
        key: [B, G, S, D], H a multiple of G
        value: [B, G, S, Dv]
        attention_mask: bool (True: attend) or additive, [B, 1 or H, T, S]; None: all keys, or causal.
        scaling: of the scores.
        dropout: the probability of dropping a weight.
        is_causal: used without a mask; by default the module's.
        s_aux: [H], the model's own sinks.
        attn_gate: the gate's openings, from the module's hook.
        position_bias: added to the scores, [1 or B, H, T, S].
        sliding_window: how many keys a query sees, its own included; used without a mask, which holds it already.
        softcap: c, which makes scores c·tanh(scores / c) before the bias and the mask, as in Gemma 2.
        kwargs: with ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, a flattened batch
            [1, H, total, D]: they replace the mask.

    Returns:
        [B, T, H, Dv], and the weights [B, H, T, S] if ``output_attentions`` is set.
    """
    state = state_of(module)
    given = state is not None and state.method.name == name
    method: Method = state.method if given else METHODS[name].method  # type: ignore[union-attr]
    learned = state.learned if given else None  # type: ignore[union-attr]
    if not given:
        _refuse_bare(module, name)
    _refuse(module, method, learned, s_aux, attn_gate, kwargs)
    if s_aux is not None:
        learned = s_aux

    key, value = shown("key", key), shown("value", value)  # as a cache holds them

    length = query.shape[2]
    packed = None
    if kwargs.get("cu_seq_lens_q") is not None:
        packed = _packed(query, position_bias, softcap, kwargs)
        attention_mask = None  # the sequences' lengths replace it
    causal = False  # one query is the newest token and sees all keys
    if length > 1 and attention_mask is None:
        causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    window = (sliding_window - 1, 0) if causal and sliding_window is not None else None
    if causal and key.shape[2] > length:  # the first call with a static cache, whose other places are empty
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    mask = joined(attention_mask, position_bias)
    norm = state.qk_norm if given else None  # type: ignore[union-attr]
    if norm is not None:
        query, key = norm(query, key)
        scaling = None  # 1/√D

    out, weights = attend(
        method.normalizer,
        query,
        key,
        value,
        mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        learned=learned,
        window=window,
        packed=packed,
        softcap=softcap,
        need_weights=bool(kwargs.get("output_attentions")) or _collects_weights(),
    )
    context = out.transpose(1, 2)  # [B, T, H, Dv]
    if attn_gate is not None:
        context = gated(context, attn_gate)
    return context.contiguous(), weights


def _packed(query: Tensor, position_bias: Tensor | None, softcap: float | None, kwargs: dict[str, Any]) -> Packed:
    """The sequences of a flattened batch, whose lengths reached the attention function."""
    if position_bias is not None or softcap is not None:
        name = "softcap" if position_bias is None else "position_bias"
        raise ValueError(
            f"cu_seq_lens_q came with a {name}, which would need all pairs of queries and keys: pad the batch, "
            "without return_flash_attn_kwargs"
        )
    if query.shape[0] != 1:
        raise ValueError(
            f"cu_seq_lens_q came with a batch of {query.shape[0]}: a flattened batch is one row, as "
            "DataCollatorWithFlattening makes it; leave the lengths out if the rows are padded"
        )
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    missing = [name for name in names if kwargs.get(name) is None]
    if missing:
        raise ValueError(f"cu_seq_lens_q came without {', '.join(missing)}: a flattened batch needs all of {names}")
    cu_q, cu_k, max_q, max_k = (kwargs[name] for name in names)
    return Packed(cu_q, cu_k, int(max_q), int(max_k))


def _collects_weights() -> bool:
    """Whether the running model was called with ``output_attentions=True``.

    Some attention modules (OPT's) take the keyword and do not pass it on. transformers has no public way to ask then
    (a config may not set it for an implementation like ours), so this reads one of its private names. In a version
    without that name, such a model returns no weights.
    """
    if torch.compiler.is_compiling():  # a trace cannot read a context variable
        return False
    collector = getattr(output_capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    return any("attentions" in name for name in collected or ())


def _refuse_bare(module: Any, name: str) -> None:
    """A module without a state runs the method's default parameters: its config may not name others."""
    entry = vars(module.config).get(NAME)  # faster than an attribute that is not there
    if entry is None:
        return
    named = entry.get("method", name)
    if named.startswith(f"{name}("):
        raise ValueError(
            f"config.{NAME} names {named!r}, but this {type(module).__name__} was built without its parameters: build "
            f"the model with outeffhop.from_config, or outeffhop.convert(model, {named!r})"
        )


def _refuse(
    module: nn.Module,
    method: Method,
    learned: Tensor | None,
    s_aux: Tensor | None,
    attn_gate: Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Raises an error for arguments that would change the result and cannot be served."""
    kind = type(module).__name__
    for name in UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{kind} passes {name!r} to its attention, which {method} does not support; "
                "attn_implementation='eager' or 'sdpa' may"
            )
    if method.normalizer.learns is not None and learned is None:
        raise ValueError(
            f"{method} learns a tensor that this {kind} lacks: outeffhop.convert(model, {str(method)!r}) adds it"
        )
    if (method.gate is not None) != (attn_gate is not None):
        raise ValueError(
            f"{method} is gated, but no openings reached the attention function of this {kind}: "
            f"outeffhop.convert(model, {str(method)!r}) adds the gates, if the module passes keyword arguments on"
            if method.gate is not None
            else f"a gate's openings reached {method}, which has no gate, in this {kind}"
        )
    if s_aux is not None and not method.normalizer.takes_sinks:
        raise ValueError(
            f"{kind} has its own sinks (s_aux), which {method} does not support; vanilla, outeffhop and clipped do"
        )
    if s_aux is not None and learned is not None:
        raise ValueError(f"{kind} has its own sinks (s_aux), which those of {method} would replace; use 'outeffhop'")
