"""What hflayers computes, as its documentation defines it, in plain float64 code; its state dicts by name and shape."""

import math

import torch
from torch.nn.functional import layer_norm, linear

D = torch.float64


def drawn(*shape, seed=5, scale=1.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def core_entries(
    embed, heads=1, hidden=None, pattern=None, out=None, kdim=None, vdim=None, *, connected=False, bias=True, static=""
):
    """The entries of a HopfieldCore's state dict; ``static`` names those of q, k and v that have no projection."""
    hidden = embed // heads if hidden is None else hidden
    values = heads * (pattern or hidden)
    sizes = {
        "q": (heads * hidden, embed),
        "k": (heads * hidden, kdim or embed),
        "v": (values, heads * hidden if connected and "k" not in static else (vdim or embed)),
    }
    sizes = {name: size for name, size in sizes.items() if name not in static}
    state = {}
    if kdim in (None, embed) and vdim in (None, embed) and pattern is None and not connected:
        state["in_proj_weight"] = drawn(sum(size[0] for size in sizes.values()), embed, seed=0, scale=0.5)
    else:
        for i, (name, size) in enumerate(sizes.items()):
            state[f"{name}_proj_weight"] = drawn(*size, seed=i, scale=0.5)
    if bias:
        rows = sum(size[0] for name, size in sizes.items() if name != "v") + values  # values always have some
        state["in_proj_bias"] = drawn(rows, seed=3, scale=0.5)
        state["out_proj.bias"] = drawn(out or embed, seed=4, scale=0.5)
    state["out_proj.weight"] = drawn(out or embed, values, seed=5, scale=0.5)
    return {f"association_core.{k}": v for k, v in state.items()}


def norm_entries(state_size, stored_size, projection_size):
    sizes = dict(
        norm_state_pattern=state_size, norm_stored_pattern=stored_size, norm_pattern_projection=projection_size
    )
    return {
        f"{name}.{part}": (part == "weight") + drawn(size, seed=10 + i, scale=0.3)
        for i, (name, size) in enumerate(sizes.items())
        for part in ("weight", "bias")
    }


def retrieved(
    state, stored, states, projection, heads=1, *, steps=1, scaling=None, connected=False, padding=None, mask=None,
    zero=False, static="",
):  # fmt: skip
    """softmax(β R W_Q (Y W_K)ᵀ) V per head, batch first, ``steps`` updates; β per head if it is a tensor."""

    def norm(name, x):
        weight = state.get(f"{name}.weight")
        return x if weight is None else layer_norm(x, x.shape[-1:], weight, state[f"{name}.bias"])

    core = {k.removeprefix("association_core."): v for k, v in state.items()}
    projected = [name for name in "qkv" if name not in static]
    if "in_proj_weight" in core:
        weights = dict(zip(projected, core["in_proj_weight"].chunk(len(projected)), strict=True))
    else:
        weights = {name: core[f"{name}_proj_weight"] for name in projected}
    biases = dict.fromkeys(projected)
    if "in_proj_bias" in core:
        rows = [len(weights[name]) for name in projected]
        biases = dict(zip(projected, core["in_proj_bias"][: sum(rows)].split(rows), strict=True))

    def heads_of(name, x):
        if name in static:
            return x[:, None].expand(-1, heads, -1, -1)  # every head of a sample has the same
        return linear(x, weights[name], biases[name]).unflatten(-1, (heads, -1)).transpose(1, 2)

    q = heads_of("q", norm("norm_state_pattern", states))
    k = heads_of("k", norm("norm_stored_pattern", stored))
    value = norm("norm_pattern_projection", projection)
    if connected and "k" not in static:
        value = linear(value, weights["k"], biases["k"])
    v = value.unflatten(-1, (heads, -1)).transpose(1, 2) if connected and "v" in static else heads_of("v", value)
    if zero:
        k, v = (torch.cat([t, torch.zeros_like(t[:, :, :1])], 2) for t in (k, v))
    beta = 1 / math.sqrt(q.shape[-1]) if scaling is None else scaling
    beta = torch.as_tensor(beta, dtype=D).expand(heads)
    hidden = torch.zeros(len(q), 1, q.shape[2], k.shape[2], dtype=torch.bool)
    given = stored.shape[1]
    if padding is not None:
        hidden[..., :given] |= padding[:, None, None]
    if mask is not None:
        hidden[..., :given] |= mask
    for step in range(steps):
        scores = (beta[:, None, None] * q @ k.transpose(-1, -2)).masked_fill(hidden, -math.inf)
        association = torch.softmax(scores, -1)
        q = association @ (v if step == steps - 1 else k)
    out = q.transpose(1, 2).flatten(2)
    weight = core.get("out_proj.weight")
    return out if weight is None else linear(out, weight, core.get("out_proj.bias")), association, v
