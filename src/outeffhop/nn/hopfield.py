"""OutEffHop, the Hopfield update as a layer; pooling.py and lookup.py have learned queries and patterns."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.methods import Method
from outeffhop.nn.association import Association
from outeffhop.nn.masks import merge_masks
from outeffhop.nn.packed import project
from outeffhop.state import MethodState
from outeffhop.state.gate import gated

__all__ = ["OutEffHop", "learned_patterns"]


class OutEffHop(nn.Module):
    """Z = softmax1(β R W_Q (Y W_K)ᵀ) V: the Hopfield update of queries R on stored patterns Y, in heads.

    The arguments are those of ``torch.nn.MultiheadAttention`` with the same meaning (masks: True is ignored;
    ``batch_first`` is False by default), so the layer fits into code written for that. One difference:
    weights are returned only on request, since fused attention does not have them.

    Args:
        embed_dim: the size of queries, and by default of everything else.
        num_heads: H.
        dropout: on the association weights.
        bias: gives the projections biases.
        add_bias_kv: adds a learned key and value.
        add_zero_attn: adds a zero key and value. (softmax1 has this built in.)
        kdim, vdim: the sizes of keys and values, if they differ from embed_dim.
        batch_first: [B, L, size] instead of [L, B, size].
        method: any method, with or without a gate.
        beta: β, by default 1/√head_dim; a tensor [H] is one for each head. ``learn_beta`` trains it,
            ``beta_per_head`` gives each head its own.
        steps, tol, max_steps: how many updates of the query; steps=None updates it until it is at rest.
        connected: V = K W_V, as in the paper, instead of V = Y W_V.
        project_query, project_key, project_value, out_projection: False leaves the projection out; inputs of
            size head_dim are then the same in every head. Without any of them the layer learns nothing: queries
            retrieve the patterns themselves.
        head_dim: the association space's size per head, by default embed_dim / num_heads.
        value_head_dim: the values' size per head, by default head_dim.
        out_dim: the output's size, by default embed_dim.
        normalize: applies LayerNorm to the queries, keys and values given.
    """

    # nn.TransformerEncoderLayer checks these before it bypasses forward(); with these values it does not
    in_proj_bias: None = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int = 1,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str | Method = "outeffhop",
        beta: float | Tensor | None = None,
        learn_beta: bool = False,
        beta_per_head: bool = False,
        steps: int | None = 1,
        tol: float = 1e-4,
        max_steps: int = 100,
        connected: bool = False,
        project_query: bool = True,
        project_key: bool = True,
        project_value: bool = True,
        out_projection: bool = True,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        out_dim: int | None = None,
        normalize: bool = False,
    ) -> None:
        super().__init__()
        sizes = dict(
            embed_dim=embed_dim,
            num_heads=num_heads,
            kdim=kdim,
            vdim=vdim,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            out_dim=out_dim,
        )
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
                raise TypeError(f"{name}={size!r}: must be an integer")
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: must be at least 1")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim={embed_dim} is not divisible by num_heads={num_heads}: change one, or give head_dim"
            )
        kept: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim, self.num_heads, self.batch_first = embed_dim, num_heads, batch_first
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.value_head_dim = self.head_dim if value_head_dim is None else value_head_dim
        self.connected, self.add_zero_attn = connected, add_zero_attn
        hidden, value_hidden = num_heads * self.head_dim, num_heads * self.value_head_dim
        value_in = hidden if connected else self.vdim
        self.q_proj = _projection("query", embed_dim, num_heads, self.head_dim, project_query, bias, kept)
        self.k_proj = _projection("key", self.kdim, num_heads, self.head_dim, project_key, bias, kept)
        self.v_proj = _projection("value", value_in, num_heads, self.value_head_dim, project_value, bias, kept)
        self.out_dim = (embed_dim if out_dim is None else out_dim) if out_projection else value_hidden
        self.out_proj = nn.Linear(value_hidden, self.out_dim, bias=bias, **kept) if out_projection else nn.Identity()
        self.bias_k = self.bias_v = None
        if add_bias_kv:
            self.bias_k = nn.Parameter(torch.empty(1, 1, hidden, **kept))
            self.bias_v = nn.Parameter(torch.empty(1, 1, value_hidden, **kept))
        self.norm_query: nn.Module = nn.LayerNorm(embed_dim, **kept) if normalize else nn.Identity()
        self.norm_key: nn.Module = nn.LayerNorm(self.kdim, **kept) if normalize else nn.Identity()
        self.norm_value = nn.LayerNorm(self.vdim, **kept) if normalize and not connected else nn.Identity()
        self.association = Association(
            num_heads,
            beta=1.0 / math.sqrt(self.head_dim) if beta is None else beta,
            learn_beta=learn_beta,
            beta_per_head=beta_per_head,
            steps=steps,
            tol=tol,
            max_steps=max_steps,
            dropout=dropout,
            **kept,
        )
        self.state = self._new_state(Method.parse(method))
        self.reset_parameters()

    @property
    def method(self) -> Method:
        return self.state.method

    def set_method(self, method: str | Method) -> None:
        """Changes the method and keeps the projections; what both methods learn (gates, sinks, …) keeps its values."""
        state = self._new_state(Method.parse(method))
        state.inherit(self.state)
        self.state = state

    def _new_state(self, method: Method) -> MethodState:
        sizes = self.embed_dim, self.num_heads, self.value_head_dim
        return MethodState(method, *sizes, **self._place)

    @property
    def _place(self) -> dict[str, Any]:
        """Device and dtype, also of a layer without projections."""
        at = self.association.log_beta
        return {"device": at.device, "dtype": at.dtype}

    @classmethod
    def from_multihead(cls, attention: nn.MultiheadAttention, method: str | Method = "outeffhop") -> OutEffHop:
        """A layer with the weights of a trained nn.MultiheadAttention; with "vanilla" the outputs are the same.

        The layer is in training mode if the other is.
        """
        layer = cls(
            attention.embed_dim,
            attention.num_heads,
            attention.dropout,
            attention.in_proj_bias is not None,
            attention.bias_k is not None,
            attention.add_zero_attn,
            attention.kdim,
            attention.vdim,
            attention.batch_first,
            attention.out_proj.weight.device,
            attention.out_proj.weight.dtype,
            method=method,
        )
        state = {"out_proj.weight": attention.out_proj.weight}
        if attention.in_proj_weight is not None:
            weights = attention.in_proj_weight.chunk(3)
        else:
            weights = (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        state |= {f"{name}_proj.weight": w for name, w in zip("qkv", weights, strict=True)}
        if attention.in_proj_bias is not None:
            state |= {f"{n}_proj.bias": b for n, b in zip("qkv", attention.in_proj_bias.chunk(3), strict=True)}
            state["out_proj.bias"] = attention.out_proj.bias
        if attention.bias_k is not None and attention.bias_v is not None:
            state |= {"bias_k": attention.bias_k, "bias_v": attention.bias_v}
        layer.load_state_dict({**layer.state_dict(), **state})
        return layer.train(attention.training)

    def reset_parameters(self) -> None:
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(projection, nn.Linear) and projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.bias_k is not None and self.bias_v is not None:
            nn.init.xavier_normal_(self.bias_k)
            nn.init.xavier_normal_(self.bias_v)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Retrieves from ``key`` (the stored patterns Y) with ``query`` (R).

        Args:
            query: [B, L, embed_dim] with batch_first, else [L, B, embed_dim]; or [L, embed_dim].
            key: likewise [B, S, kdim]; by default the query. A batch of 1 serves every query.
            value: likewise [B, S, vdim]; by default the key.
            key_padding_mask: [B, S], True or −inf where a key is ignored. If the key is the query itself, a
                gate per head ignores it too.
            need_weights: also return the association weights of the last update, by plain PyTorch, which is slower.
            attn_mask: [L, S], [B·H, L, S] or broadcasting to [B, H, L, S]; bool (True: ignore) or added to the scores.
            average_attn_weights: return the mean of the weights over heads, [B, L, S], instead of [B, H, L, S].
            is_causal: query i retrieves from keys 0…i.

        Returns:
            The output in the query's layout, and the weights or None.
        """
        for name, given in (("query", query), ("key", key), ("value", value)):
            if not isinstance(given, Tensor) and (given is not None or name == "query"):
                raise TypeError(f"{name} is a {type(given).__name__}: expected a tensor")
        key = query if key is None else key
        if value is not None and self.connected and value is not key:
            raise ValueError(
                "value differs from key, but connected=True computes the values from the keys: leave value out"
            )
        value = key if value is None else value
        batched, itself = query.dim() == 3, key is query
        self._check_inputs(query, key, value)
        # projected in the layout given: a Linear would copy a transposed input
        q, k, v = self._project(query, key, value)
        if not batched:
            query, q, k, v = (t.unsqueeze(0) for t in (query, q, k, v))
        elif not self.batch_first:
            query, q, k, v = (t.transpose(0, 1) for t in (query, q, k, v))
        out, weights = self._associate(query, q, k, v, key_padding_mask, attn_mask, is_causal, need_weights, itself)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """[..., H·d], [..., H·d] and [..., H·dv]."""
        query, key = self.norm_query(query), self.norm_key(key)
        if self.connected:
            q, k = project((self.q_proj, self.k_proj), (query, key))
            return [q, k, self.v_proj(k)]
        return project((self.q_proj, self.k_proj, self.v_proj), (query, key, self.norm_value(value)))

    def _associate(
        self,
        query: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        need_weights: bool,
        itself: bool,
    ) -> tuple[Tensor, Tensor | None]:
        batch = next((t.shape[0] for t in (q, k, v) if t.shape[0] != 1), 1)
        shape = (batch, self.num_heads, q.shape[1], k.shape[1])
        mask = merge_masks(key_padding_mask, attn_mask, shape, q.dtype)
        # the mask says which queries are padding only if they are also the keys
        gate = self.state.gate
        opening = None if gate is None else gate(query, _not_padding(key_padding_mask) if itself else None)
        k, v, mask, is_causal = self._extra_patterns(k, v, mask, is_causal, query.shape[1])
        q, k, v = (self._in_heads(t, batch) for t in (q, k, v))
        out, weights = self.association(self.state, q, k, v, mask, is_causal, need_weights)
        out = out.transpose(1, 2)  # [B, L, H, dv]
        if opening is not None:
            out = gated(out, opening)
        return self.out_proj(out.flatten(-2)), weights

    def _in_heads(self, t: Tensor, batch: int) -> Tensor:
        """[B or 1, L, H·d] → [B, H, L, d], a view."""
        t = t if t.shape[0] == batch else t.expand(batch, -1, -1)
        return t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _extra_patterns(
        self, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, queries: int
    ) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """Appends the learned and the zero pattern, which every query sees."""
        extra: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            extra.append((self.bias_k, self.bias_v))
        if self.add_zero_attn:
            extra.append((k.new_zeros(1, 1, k.shape[2]), v.new_zeros(1, 1, v.shape[2])))
        if not extra:
            return k, v, mask, is_causal
        if is_causal:  # the kernels' causal mask would hide these patterns, which have no position
            causal = torch.ones(queries, k.shape[1], dtype=torch.bool, device=k.device).tril()
            causal = causal[None, None]
            if mask is None or mask.dtype == torch.bool:
                mask = causal if mask is None else causal & mask
            else:
                mask = mask.masked_fill(~causal, -math.inf)
        if mask is not None:
            mask = mask.expand(*mask.shape[:-1], k.shape[1])  # an entry for all keys does not count for the extra ones
            mask = nn.functional.pad(mask, (0, len(extra)), value=True if mask.dtype == torch.bool else 0.0)
        for more_k, more_v in extra:
            k = torch.cat([k, more_k.expand(k.shape[0], 1, -1)], 1)
            v = torch.cat([v, more_v.expand(v.shape[0], 1, -1)], 1)
        return k, v, mask, False

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        for name, t, size in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if self.connected and name == "value":
                continue
            if t.dim() not in (2, 3) or t.dim() != query.dim() or not self._fits(t, size):
                layout = "[batch, length, size]" if self.batch_first else "[length, batch, size]"
                raise ValueError(
                    f"{name} has shape {tuple(t.shape)}: expected {layout} or [length, size] with size {size}"
                )
            weight = getattr(getattr(self, f"{name[0]}_proj"), "weight", None)
            if isinstance(weight, Tensor) and t.dtype != weight.dtype and not torch.is_autocast_enabled(t.device.type):
                raise TypeError(f"{name} has dtype {t.dtype} and the layer {weight.dtype}: convert one of them")
        at = 0 if self.batch_first else 1
        if query.dim() == 3:
            batches = [t.shape[at] for t in (query, key, value)]
            several = [batch for batch in batches if batch != 1]
            if any(batch != several[0] for batch in several):
                raise ValueError(
                    "query has a batch of {}, key of {} and value of {}: they must be equal, or 1".format(*batches)
                )
        lengths = [t.shape[1 - at] if t.dim() == 3 else t.shape[0] for t in (key, value)]
        if lengths[0] != lengths[1]:
            raise ValueError(f"key has length {lengths[0]} and value {lengths[1]}: expected one value for each key")

    def _fits(self, t: Tensor, size: int) -> bool:
        return t.shape[-1] == size


def _not_padding(key_padding_mask: Tensor | None) -> Tensor | None:
    """Which tokens are not padding, bool [B, S] or [S]."""
    if key_padding_mask is None:
        return None
    return ~(key_padding_mask if key_padding_mask.dtype == torch.bool else torch.isneginf(key_padding_mask))


class EachHead(nn.Module):
    """[..., d] → [..., H·d]: what is not projected is the same in every head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(*(1,) * (x.dim() - 1), self.num_heads)


def _projection(
    name: str, size: int, heads: int, per_head: int, wanted: bool, bias: bool, kept: dict[str, Any]
) -> nn.Module:
    hidden = heads * per_head
    if wanted:
        return nn.Linear(size, hidden, bias=bias, **kept)
    if size == hidden:
        return nn.Identity()
    if size == per_head:
        return EachHead(heads)
    raise ValueError(
        f"project_{name}=False needs a {name} of the association space's size: its size is {size}, "
        f"one head's is {per_head} and all heads' {hidden}"
    )


def learned_patterns(layer: OutEffHop, quantity: int, size: int) -> nn.Parameter:
    """Small random vectors [quantity, size] on the layer's device: queries, patterns or targets to be learned."""
    if quantity < 1:
        raise ValueError(f"quantity={quantity}: must be at least 1")
    return nn.Parameter(nn.init.normal_(torch.empty(quantity, size, **layer._place), std=0.02))
