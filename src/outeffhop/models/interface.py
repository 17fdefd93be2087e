"""The methods as attention implementations of transformers: one function for all of them.

    AutoModelForMaskedLM.from_config(config, attn_implementation="outeffhop")

A bare name stands for the method with its default parameters; other parameters reach the attention modules when
``outeffhop.from_config`` builds a model, ``outeffhop.convert`` converts it, or ``from_pretrained`` loads it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import output_capturing

from outeffhop.methods import METHODS, Method, Normalizer, SoftmaxN
from outeffhop.models.modules import NAME, extension_of
from outeffhop.nn.gate import gated
from outeffhop.ops import attention, eager_attention

__all__ = ["attend"]

# What some models hand to the attention function to change its scores or its keys; not to be passed over in silence.
_UNSERVED = ("softcap", "indices", "block_indices", "head_mask", "cache")


def attend(
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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention by the named method, as transformers calls it.

    A model's own sinks (``s_aux``, as in gpt-oss) win over the method's n. Where γ = −α/T, T is the
    number of keys in the call, padding and a static cache's empty places included: to serve padded or
    cached batches alike, give γ itself. QK-norm acts here, on queries and keys as they arrive: rotated where the
    model rotates them, and out of a cache that holds them as they were. Normalized scores are scaled by 1/√D:
    a model's own scaling, or a query it has scaled already (OPT's), is meant for vectors of any length.

    Args:
        name: of the method.
        module: the attention module; its extension holds the parameters.
        query: [B, H, T, D]
        key: [B, G, S, D], H a multiple of G
        value: [B, G, S, Dv]
        attention_mask: bool (True takes part) or additive, [B, 1 or H, T, S]; None is all, or causal.
        scaling: of the scores.
        dropout: the share of weights dropped.
        is_causal: where there is no mask; by default the module's.
        s_aux: [H], the model's own sinks.
        attn_gate: the gate's openings, from the module's hook.
        position_bias: added to the scores, [1 or B, H, T, S].

    Returns:
        [B, T, H, Dv], and the weights [B, H, T, S] where ``output_attentions`` asks for them.
    """
    extension = extension_of(module)
    given = extension is not None and extension.method.name == name
    method: Method = extension.method if given else METHODS[name].method  # type: ignore[union-attr]
    learned = extension.learned if given else None  # type: ignore[union-attr]
    if not given:
        _refuse_bare(module, name)
    _refuse(module, method, learned, s_aux, attn_gate, kwargs)
    if s_aux is not None:
        learned = s_aux

    length = query.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    # one query is the newest token and sees all keys
    causal = length > 1 and attention_mask is None and causal
    if causal and key.shape[2] > length:  # the first call with a static cache: its further places are empty
        key, value = key[:, :, :length], value[:, :, :length]
        position_bias = None if position_bias is None else position_bias[..., :length]
    mask = _with_bias(attention_mask, position_bias)
    norm = extension.qk_norm if given else None  # type: ignore[union-attr]
    if norm is not None:
        query, key = norm(query, key)
        scaling = None  # 1/√D

    normalizer = method.normalizer
    weights = None
    if normalizer.sink is not None and not _wants_weights(kwargs):
        sink = normalizer.sink if learned is None else learned
        out = attention(query, key, value, mask, dropout, causal, scaling, enable_gqa=True, sink=sink)
    else:
        weigh = partial(_weigh, normalizer, learned)
        out, weights = eager_attention(query, key, value, weigh, mask, dropout, causal, scaling, enable_gqa=True)
    context = out.transpose(1, 2)  # type: ignore[union-attr]  # [B, T, H, Dv]
    if attn_gate is not None:
        context = gated(context, attn_gate)
    return context.contiguous(), weights if _wants_weights(kwargs) else None


def _weigh(normalizer: Normalizer, learned: Tensor | None, scores: Tensor) -> Tensor:
    return normalizer(scores, learned)


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return mask
    if mask is None:
        return bias
    return torch.where(mask, bias, -torch.inf) if mask.dtype == torch.bool else bias + mask


def _wants_weights(kwargs: dict[str, Any]) -> bool:
    if kwargs.get("output_attentions"):
        return True
    # Some modules (OPT's) keep the keyword to themselves; what the model collects says it as well.
    # A trace cannot look there.
    if torch.compiler.is_compiling():
        return False
    collector = getattr(output_capturing, "_active_collector", None)
    collected = None if collector is None else collector.get()
    return any("attentions" in name for name in collected or ())


def _refuse_bare(module: Any, name: str) -> None:
    """A module without an extension runs the method's default parameters, which must be those its config names."""
    named = (getattr(module.config, NAME, None) or {}).get("method", name)
    if named != name and named.startswith(f"{name}("):
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
    """Nothing that would change the result is passed over."""
    kind = type(module).__name__
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{kind} asks its attention for {name!r}, which {method} does not serve; "
                "attn_implementation='eager' or 'sdpa' may"
            )
    if method.normalizer.learns is not None and learned is None:
        raise ValueError(
            f"{method} learns a tensor that this {kind} has not: outeffhop.convert(model, {str(method)!r}) adds it"
        )
    if (method.gate is not None) != (attn_gate is not None):
        raise ValueError(
            f"{method} is gated, but no openings reached the attention function of this {kind}: "
            f"outeffhop.convert(model, {str(method)!r}) adds the gates, where the module hands keyword arguments on"
            if method.gate is not None
            else f"a gate's openings reached {method}, which has no gate, in this {kind}"
        )
    if s_aux is not None and not isinstance(method.normalizer, SoftmaxN):
        raise ValueError(f"{kind} has sinks of its own (s_aux), which {method} cannot take; vanilla and outeffhop can")
    if s_aux is not None and learned is not None:
        raise ValueError(
            f"{kind} has sinks of its own (s_aux), which those of {method} would replace; take 'outeffhop'"
        )
