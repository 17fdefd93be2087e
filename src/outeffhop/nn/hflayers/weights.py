"""Weights of hflayers → layers of this package.

Its ``Hopfield``, ``HopfieldPooling`` and ``HopfieldLayer`` become OutEffHop, OutEffHopPooling and
OutEffHopLayer with the same outputs under method "vanilla". What that library computes wrongly raises an error
instead: β per head, and static patterns in several heads, where samples leak into each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outeffhop.methods import Method
from outeffhop.nn.hopfield import OutEffHop
from outeffhop.nn.lookup import OutEffHopLayer
from outeffhop.nn.pooling import OutEffHopPooling

__all__ = ["from_hflayers", "renamed"]

_STATIC = (
    "from_hflayers takes no static patterns, for which a state dict does not say enough; make an "
    "outeffhop.nn.hflayers.Hopfield with the same arguments and load the state dict into that"
)


def from_hflayers(
    state_dict: Mapping[str, Tensor],
    *,
    num_heads: int = 1,
    scaling: float | None = None,
    update_steps_max: int | None = 0,
    update_steps_eps: float = 1e-4,
    connected: bool = False,
    batch_first: bool = True,
    dropout: float = 0.0,
    add_zero_association: bool = False,
    method: str | Method = "vanilla",
) -> OutEffHop | OutEffHopPooling | OutEffHopLayer:
    """A layer with the weights of an hflayers module, from its ``state_dict()``.

    A state dict does not say everything: give the arguments that the module was made with, under that library's
    names. The outputs differ in one shape: HopfieldPooling flattens [B, quantity, size].

    Args:
        state_dict: of a Hopfield, HopfieldPooling or HopfieldLayer.
        num_heads, scaling, update_steps_max, update_steps_eps, batch_first, dropout, add_zero_association: its own.
        connected: its ``pattern_projection_as_connected``.
        method: "vanilla" computes what that library does.
    """
    if scaling is not None and not isinstance(scaling, int | float):
        raise TypeError(
            f"scaling is a {type(scaling).__name__}: that library applies one β per head to the wrong columns, so "
            "there is no output to reproduce; give a number, or make a new layer with beta_per_head=True"
        )
    learned = {k.rsplit(".", 1)[-1]: v for k, v in state_dict.items() if not k.startswith("hopfield.")}
    wrapped = any(k.startswith("hopfield.") for k in state_dict)
    state = {k.removeprefix("hopfield."): v for k, v in state_dict.items() if not wrapped or k.startswith("hopfield.")}
    core = {k.removeprefix("association_core."): v for k, v in state.items() if k.startswith("association_core.")}
    if not core:
        raise ValueError(
            f"state_dict has no entry association_core.*, only {', '.join(sorted(state_dict)[:5]) or 'nothing'}: "
            "expected the state_dict() of an hflayers module"
        )
    if "p_norm_weight" in core:
        raise ValueError("state_dict holds p_norm_weight: normalize_hopfield_space has no counterpart here")
    _check_projections(core)
    new = renamed(core, "qkv")
    query, key, value = (new[f"{name}_proj.weight"] for name in "qkv")
    hidden, embed_dim = query.shape
    if num_heads < 1 or hidden % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide the {hidden} rows of the query projection")
    out = new.get("out_proj.weight")
    options: dict[str, Any] = dict(
        dropout=dropout,
        bias="in_proj_bias" in core,
        add_zero_attn=add_zero_association,
        kdim=key.shape[1],
        batch_first=batch_first,
        device=query.device,
        dtype=query.dtype,
        method=method,
        beta=1.0 / math.sqrt(hidden // num_heads) if scaling is None else float(scaling),
        # update_steps_max = 0 means one update
        steps=None if update_steps_max is None else update_steps_max + 1,
        tol=update_steps_eps,
        connected=connected,
        head_dim=hidden // num_heads,
        value_head_dim=value.shape[0] // num_heads,
        out_projection=out is not None,
        out_dim=None if out is None else out.shape[0],
        normalize=_normalizes(state, connected),
    )
    if not connected:
        options["vdim"] = value.shape[1]
    layer, patterns = _layer(learned, embed_dim, num_heads, options)
    prefix = "" if isinstance(layer, OutEffHop) else "hopfield."
    new = {prefix + k: v for k, v in (new | _norms(state, connected)).items()}
    fresh = layer.state_dict()  # β, sinks and gates are not in that library's state
    kept = {k: v for k, v in fresh.items() if "association." in k or "state." in k}
    layer.load_state_dict(kept | new | patterns)
    return layer


def _layer(
    learned: Mapping[str, Tensor], embed_dim: int, num_heads: int, options: dict[str, Any]
) -> tuple[OutEffHop | OutEffHopPooling | OutEffHopLayer, dict[str, Tensor]]:
    """The layer that the learned tensors belong to, and those tensors under its names."""
    if "pooling_weights" in learned:
        queries = learned["pooling_weights"].flatten(0, 1)
        pooling = OutEffHopPooling(embed_dim, num_heads, quantity=len(queries), project_query=True, **options)
        return pooling, {"queries": queries}
    if "lookup_weights" not in learned:
        return OutEffHop(embed_dim, num_heads, **options), {}
    patterns = learned["lookup_weights"].flatten(0, 1)
    projected = {"project_key": True, "project_value": True}
    lookup = OutEffHopLayer(embed_dim, num_heads, quantity=len(patterns), **projected, **options)
    new = {"patterns": patterns}
    if not options["connected"]:
        new["targets"] = learned.get("target_weights", learned["lookup_weights"]).flatten(0, 1)
    return lookup, new


def renamed(core: Mapping[str, Tensor], projected: Sequence[str]) -> dict[str, Tensor]:
    """The entries of a HopfieldCore's state dict under OutEffHop's names.

    Args:
        projected: which of q, k and v have a projection, in this order. Two static ones leave one in in_proj_weight.
    """
    rest = dict(core)
    for unused in ("bias_k", "bias_v"):  # that library stores them and never uses them
        rest.pop(unused, None)
    if "in_proj_weight" in rest:
        weights = rest.pop("in_proj_weight").chunk(len(projected))
        new = {f"{n}_proj.weight": w for n, w in zip(projected, weights, strict=True)}
    else:
        new = {f"{n}_proj.weight": rest.pop(f"{n}_proj_weight") for n in projected if f"{n}_proj_weight" in rest}
    if "in_proj_bias" in rest:
        rows = [len(weight) for weight in new.values()]
        biases = rest.pop("in_proj_bias")[: sum(rows)].split(rows)  # rows of a static projection come last, unused
        new |= {name.replace("weight", "bias"): bias for name, bias in zip(list(new), biases, strict=True)}
    return new | rest


def _check_projections(core: Mapping[str, Tensor]) -> None:
    """Raises unless all three projections are there."""
    if "in_proj_weight" in core:
        rows, columns = core["in_proj_weight"].shape
        biases = len(core.get("in_proj_bias", core["in_proj_weight"]))
        if rows % 3 or rows != biases:
            raise ValueError(
                f"in_proj_weight has {rows} rows of {columns} and there are {biases} biases, not three projections: "
                f"{_STATIC}"
            )
        return
    missing = [name for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight") if name not in core]
    if missing:
        raise ValueError(f"state_dict has no {', '.join(missing)}: {_STATIC}")


def _normalizes(state: Mapping[str, Tensor], connected: bool) -> bool:
    names = ("norm_state_pattern", "norm_stored_pattern", "norm_pattern_projection")
    there = [f"{name}.weight" in state for name in names]
    if any(there) and not all(there):
        raise ValueError(
            "state_dict normalizes only some of query, key and value, and OutEffHop all or none; missing: "
            + ", ".join(n for n, t in zip(names, there, strict=True) if not t)
        )
    if connected and all(there):
        same = all(
            torch.equal(state[f"norm_stored_pattern.{p}"], state[f"norm_pattern_projection.{p}"])
            for p in ("weight", "bias")
        )
        if not same:
            raise ValueError(
                "connected=True computes the values from the keys, but state_dict normalizes the two differently "
                "(norm_stored_pattern, norm_pattern_projection)"
            )
    return all(there)


def _norms(state: Mapping[str, Tensor], connected: bool) -> dict[str, Tensor]:
    names = {"norm_state_pattern": "norm_query", "norm_stored_pattern": "norm_key"}
    if not connected:
        names["norm_pattern_projection"] = "norm_value"
    parts = ("weight", "bias")
    return {f"{name}.{p}": state[f"{old}.{p}"] for old, name in names.items() for p in parts if f"{old}.{p}" in state}
