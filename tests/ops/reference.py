"""An independent reference in float64, and the calls every backend is held against it with.

softmax_n is taken as plain softmax with one more logit, the sink, whose probability is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def reference(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    sink=0.0,
    window=None,
    offset=0,
    **_,
):
    """(output, lse) in float64, differentiable; a row without keys gives 0 by construction."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = torch.einsum("...qd,...kd->...qk", query, key) * scale
    allowed = torch.ones(scores.shape, dtype=torch.bool, device=scores.device)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        allowed = allowed & attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    if is_causal:
        i, j = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        allowed = allowed & (j[None, :] <= i[:, None] + offset)
    if window is not None:
        i, j = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        left, right = (10**6 if side in (-1, None) else side for side in window)
        allowed = allowed & (j[None, :] >= i[:, None] + offset - left) & (j[None, :] <= i[:, None] + offset + right)
    scores = torch.where(allowed, scores, -math.inf)
    sink = torch.as_tensor(sink, dtype=torch.float64, device=scores.device).reshape(-1, 1, 1)
    column = sink.expand(*scores.shape[:-1], 1)
    everything = torch.cat([scores, column], -1)
    nothing = torch.isneginf(everything).all(-1, keepdim=True)  # no key, and no sink either
    weights = torch.softmax(torch.where(nothing, 0.0, everything), -1)[..., :-1]
    lse = torch.where(nothing.squeeze(-1), -math.inf, torch.logsumexp(torch.where(nothing, 0.0, everything), -1))
    return torch.where(nothing, 0.0, weights) @ value, lse


@dataclass(frozen=True)
class Case:
    """A call: shapes, a mask made from the shape of the scores, and the rest of the arguments."""

    shape: tuple[int, int, int, int, int] = (2, 3, 63, 63, 24)  # B, H, Lq, Lk, D
    mask: Callable[[tuple[int, ...], torch.Generator], Tensor] | None = None
    value_size: int | None = None
    groups: int | None = None
    strided: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)


def _bool(shape, generator):
    return torch.rand(shape, generator=generator) > 0.3


def _padding(shape, generator):
    lengths = torch.randint(1, shape[-1] + 1, (shape[0],), generator=generator)
    return (torch.arange(shape[-1]) < lengths[:, None])[:, None, None, :]


def _some_rows_masked(shape, generator):
    mask = _bool(shape, generator)
    mask[0, :, 3] = False
    mask[-1, 0] = False
    return mask


def _additive(shape, generator):
    return 2 * torch.randn(shape, generator=generator)


def _infinite(shape, generator):
    mask = _additive(shape, generator)
    return mask.masked_fill(~_some_rows_masked(shape, generator), -math.inf)


CASES: dict[str, Case] = {
    "plain": Case(),
    "longer_keys": Case((2, 3, 33, 150, 64)),
    "longer_queries": Case((1, 2, 130, 47, 64)),
    "one_key": Case((2, 2, 5, 1, 8)),
    "one_query": Case((2, 2, 1, 100, 16)),
    "odd_size": Case((2, 2, 31, 31, 13)),
    "wide_value": Case((2, 2, 31, 45, 16), value_size=40),
    "narrow_value": Case((2, 2, 31, 45, 24), value_size=5),
    "strided": Case((2, 3, 40, 50, 16), strided=True),
    "grouped": Case((2, 6, 33, 47, 16), groups=2, arguments={"enable_gqa": True}),
    "scale": Case(arguments={"scale": 0.7}),
    "softmax": Case(arguments={"sink": -math.inf}),
    "softmax_4": Case(arguments={"sink": math.log(4)}),
    "large_sink": Case(arguments={"sink": 30.0}),
    "learned_sink": Case(arguments={"sink": "learned"}),
    "scalar_sink": Case(arguments={"sink": "learned scalar"}),
    "causal": Case(arguments={"is_causal": True}),
    "causal_longer_keys": Case((2, 2, 33, 63, 16), arguments={"is_causal": True}),
    "causal_longer_queries": Case((2, 2, 63, 33, 16), arguments={"is_causal": True}),
    "causal_learned_sink": Case(arguments={"is_causal": True, "sink": "learned"}),
    "bool_mask": Case(mask=_bool),
    "bool_mask_of_queries_and_keys": Case(mask=lambda s, g: _bool(s[-2:], g)),
    "bool_mask_per_head": Case(mask=lambda s, g: _bool((s[1], 1, s[-1]), g)),
    "padding": Case((3, 2, 40, 40, 16), mask=_padding),
    "padding_causal": Case((3, 2, 40, 40, 16), mask=_padding, arguments={"is_causal": True}),
    "padding_learned_sink": Case((3, 2, 40, 40, 16), mask=_padding, arguments={"sink": "learned"}),
    "additive_mask": Case(mask=_additive),
    "additive_mask_per_query": Case(mask=lambda s, g: _additive((s[0], 1, s[2], 1), g)),
    "masked_rows": Case(mask=_some_rows_masked),
    "masked_rows_softmax": Case(mask=_some_rows_masked, arguments={"sink": -math.inf}),
    "masked_rows_learned_sink": Case(mask=_infinite, arguments={"sink": "learned"}),
    "window": Case((2, 2, 150, 150, 16), arguments={"window": (7, 11)}),
    "window_causal": Case((2, 2, 150, 150, 16), arguments={"window": (16, -1), "is_causal": True}),
    "window_learned_sink": Case((2, 2, 131, 131, 16), arguments={"window": (20, 0), "sink": "learned"}),
    "window_grouped": Case((2, 4, 70, 70, 8), groups=2, arguments={"window": (5, 3), "enable_gqa": True}),
    "window_longer_keys": Case((2, 2, 33, 150, 16), arguments={"window": (4, None), "sink": 1.0}),
    "window_longer_queries": Case((2, 2, 150, 47, 16), arguments={"window": (4, 4), "sink": "learned"}),
    "window_longer_queries_softmax": Case((2, 2, 150, 47, 16), arguments={"window": (4, 4), "sink": -math.inf}),
    "window_padding": Case((3, 2, 80, 80, 16), mask=_padding, arguments={"window": (9, 2), "sink": "learned"}),
    "window_additive_mask": Case((2, 2, 80, 80, 16), mask=_infinite, arguments={"window": (30, 0)}),
    "masked_rows_grouped_causal": Case(
        (2, 4, 33, 33, 16), mask=_some_rows_masked, groups=1, arguments={"enable_gqa": True, "is_causal": True}
    ),
}


def make(case: Case, dtype: torch.dtype, device: str, seed: int = 0) -> dict[str, Any]:
    """The arguments of a call to attention, all tensors requiring gradients but the mask."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, queries, keys, size = case.shape
    groups = case.groups or heads
    value_size = case.value_size or size

    def tensor(*shape):
        t = torch.randn(shape, generator=generator, dtype=torch.float64)
        if case.strided:  # [B, L, H, D] seen as [B, H, L, D], and every second column
            t = torch.stack([t, -t], -1).transpose(1, 2).contiguous().to(device, dtype).transpose(1, 2)[..., 0]
            assert not t.is_contiguous()
            return t.requires_grad_()
        return t.to(device, dtype).requires_grad_()

    arguments = dict(
        query=tensor(batch, heads, queries, size),
        key=tensor(batch, groups, keys, size),
        value=tensor(batch, groups, keys, value_size),
        **case.arguments,
    )
    if arguments.get("sink") in ("learned", "learned scalar"):
        shape = (heads,) if arguments["sink"] == "learned" else ()
        sink = torch.randn(shape, generator=generator, dtype=torch.float64)
        arguments["sink"] = sink.to(device, torch.promote_types(dtype, torch.float32)).requires_grad_()
    if case.mask is not None:
        mask = case.mask((batch, heads, queries, keys), generator)
        arguments["attn_mask"] = mask.to(device) if mask.dtype == torch.bool else mask.to(device, dtype)
    return arguments


def in_double(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same numbers, as float64 leaves of their own."""
    return {
        name: a.detach().double().requires_grad_(a.requires_grad)
        if isinstance(a, Tensor) and a.is_floating_point()
        else a
        for name, a in arguments.items()
    }


def run(function, arguments: dict[str, Any], weights: Tensor, lse_weights: Tensor | None = None) -> dict[str, Tensor]:
    """Output and gradients of Σ out∘weights (+ Σ lse∘lse_weights), by name."""
    result = function(**arguments)
    out, lse = result if isinstance(result, tuple) else (result, None)
    loss = (out * weights.to(out)).sum()
    found = {"out": out}
    if lse_weights is not None:
        found["lse"] = lse
        finite = torch.isfinite(lse)
        loss = loss + (torch.where(finite, lse, 0.0) * lse_weights.to(lse)).sum()
    leaves = {n: a for n, a in arguments.items() if isinstance(a, Tensor) and a.requires_grad}
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found |= {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: t.detach().double() for name, t in found.items()}


def reference_run(arguments, weights, lse_weights=None):
    return run(lambda **a: reference(**a), in_double(arguments), weights, lse_weights)


__all__ = ["CASES", "DEVICES", "Case", "in_double", "make", "reference", "reference_run", "replace", "run"]
