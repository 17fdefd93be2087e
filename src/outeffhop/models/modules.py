"""Finds the attention modules of a model and gives them a method."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from outeffhop.methods import METHODS, Method
from outeffhop.models.config_entry import KEY, method_of
from outeffhop.models.hf_private import implementation, mark_initialized
from outeffhop.models.recording import calls_of
from outeffhop.nn import OutEffHop
from outeffhop.state import Gate, MethodState

__all__ = [
    "attention_modules",
    "hopfield_layers",
    "has_attention",
    "own_attention",
    "has_own_sinks",
    "state_of",
    "method_at",
    "method_in",
    "check",
    "install",
    "hook_all",
    "num_heads",
    "place",
    "NAME",
]

# The attribute of an attention module that holds its state; it is part of the weights' names in a checkpoint.
NAME = KEY
_HOOK = "_outeffhop_hook"  # the attribute of an attention module that holds the handle of its hook

_QK_NORM = re.compile(r"(q|k|qk|query|key)_?(layer_?norm|norm|ln)|(layer_?norm|norm|ln)_?(q|k|qk|query|key)")


def state_of(module: nn.Module) -> MethodState | None:
    found: Any = getattr(module, NAME, None)
    # not by class: adapters wrap modules in others that forward their attributes
    return found if isinstance(getattr(found, "method", None), Method) else None


def has_attention(model: nn.Module) -> bool:
    return any(calls_of(module) is not None for module in model.modules())


def own_attention(model: nn.Module) -> list[str]:
    """Names of modules that look like attention but do not call transformers' interface, as in BLOOM or DeBERTa.

    Only the outermost ones: a module of attention may contain another.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if "Attention" in type(module).__name__ and not inside and calls_of(module) is None:
            found.append(name)
    return found


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name → module, for the modules that call transformers' attention interface themselves."""
    found = {name: module for name, module in model.named_modules() if calls_of(module) is not None}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module that is known to call transformers' attention interface "
            "(ALL_ATTENTION_FUNCTIONS): its attention cannot be replaced"
        )
    return found


def method_in(model: Any) -> Method | None:
    """The method that a model's attention runs; if its parts run several, that of the model's config."""
    methods = {method_at(module) for module in attention_modules(model).values()}
    return methods.pop() if len(methods) == 1 else method_of(model.config)


def method_at(module: Any) -> Method | None:
    """The method that an attention module runs; None for other implementations."""
    running, state = implementation(module.config), state_of(module)
    if state is not None and state.method.name == running:
        return state.method
    return METHODS[running].method if running in METHODS else None


def hopfield_layers(model: nn.Module) -> dict[str, OutEffHop]:
    """Name → layer, for models built from our own layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, OutEffHop)}


def install(module: nn.Module, method: Method, annealing: bool = False) -> None:
    """Gives an attention module a method; parameters that the old method shares with it keep their values."""
    old = state_of(module)
    if old is not None and old.method == method:
        return
    new = MethodState(method, _embed_dim(module), num_heads(module), _head_dim(module), annealing, **place(module))
    mark_initialized(new)
    if old is not None:
        new.inherit(old)
    setattr(module, NAME, new)
    _hook(module, new.extra)


def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of an attention module whose method has tensors: passes the gate's openings on.

    A module-level function, so that it survives deepcopy and pickling.
    """
    state: MethodState = getattr(module, NAME)
    running = implementation(module.config)
    if running != state.method.name:
        raise ValueError(
            f"attn_implementation={running!r}, but this {type(module).__name__} has the method {state.method} with "
            f"its own parameters: outeffhop.convert(model, 'vanilla') (or another method) removes them, "
            f"model.set_attn_implementation({state.method.name!r}) uses them"
        )
    if state.gate is None:
        return None
    hidden_states: Any = args[0] if args else kwargs.get("hidden_states")
    _check_input(module, state, hidden_states, kwargs)
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    # a mask that is not [B, H, L, L] is for cross attention or a cache and does not describe the input
    head = state.method.gate.gate == "head"  # type: ignore[union-attr]  # other gates ignore the mask
    square = head and isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] == hidden_states.shape[-2]
    return args, {**kwargs, "attn_gate": state(hidden_states, mask if square else None)}


def _check_input(module: nn.Module, state: MethodState, hidden_states: Any, kwargs: dict[str, Any]) -> None:
    """Refuses inputs that the gate cannot be predicted from."""
    spec, kind = state.method.gate, type(module).__name__
    if spec is None or spec.gate == "constant":
        return
    size = hidden_states.shape[-1] if isinstance(hidden_states, Tensor) else None
    if size != state.embed_dim:
        raise ValueError(
            f"{state.method} cannot gate this {kind}: its gate is predicted from inputs of size "
            f"{state.embed_dim}, and the module gets {'no hidden_states' if size is None else f'size {size}'}; "
            "use gate=constant, or a method without a gate"
        )
    if spec.gate == "head" and kwargs.get("is_causal"):  # some say it only in the call, such as CLIP's text model
        raise ValueError(_future(f"{state.method} cannot gate this {kind}"))


def _future(what: str) -> str:
    return (
        f"{what}: gate=head averages over all tokens, including those to come, but this attention is causal or does "
        "not set is_causal=False; use gate=token or gate=constant"
    )


def _hook(module: nn.Module, wanted: bool) -> None:
    handle = getattr(module, _HOOK, None)
    if wanted and handle is None:
        setattr(module, _HOOK, module.register_forward_pre_hook(before_attention, with_kwargs=True))
    elif not wanted and handle is not None:
        handle.remove()
        delattr(module, _HOOK)


def hook_all(model: nn.Module) -> None:
    """Adds or removes hooks after ``hold`` or ``release``."""
    for module in attention_modules(model).values():
        state = state_of(module)
        _hook(module, state is not None and state.extra)


def check(model: nn.Module, method: Method) -> None:
    """Refuses a method that some attention module does not support, before anything is changed."""
    for name, module in attention_modules(model).items():
        _check(name, module, method)


def _check(name: str, module: nn.Module, method: Method) -> None:
    kind = type(module).__name__
    calls = calls_of(module)
    if calls is not None and calls.unserved:
        raise ValueError(f"{method} does not work with {name} ({kind}), which uses {', '.join(calls.unserved)}")
    if has_own_sinks(module) and not method.normalizer.takes_sinks:
        raise ValueError(
            f"{method} does not work with {name} ({kind}), which has its own learned sinks: "
            "use 'outeffhop', 'vanilla' or 'clipped', gated or not"
        )
    if method.qk_norm != "none" and (own := _own_qk_norms(module)):
        raise ValueError(
            f"{method} does not work with {name} ({kind}), which normalizes queries and keys itself "
            f"({', '.join(own)}): leave qk_norm={method.qk_norm} out"
        )
    if method.gate is None:
        return
    if calls is None or not calls.hands_on:
        raise ValueError(
            f"{method} cannot gate {name} ({kind}): it does not pass keyword arguments on to the attention function, "
            "so the gate's openings would be lost; use a method without a gate"
        )
    if method.gate.gate != "constant" and calls.by_pieces:
        raise ValueError(
            f"{method} cannot gate {name} ({kind}): it calls the attention function once for each piece of its input, "
            "but a gate has openings for all of it; use gate=constant, or a method without a gate"
        )
    if method.gate.gate == "head" and getattr(module, "is_causal", True):  # transformers' default
        raise ValueError(_future(f"{method} cannot gate {name} ({kind})"))
    # built only to let the gate check these sizes
    Gate(method.gate, _embed_dim(module), num_heads(module), _head_dim(module), device="meta")


def has_own_sinks(module: nn.Module) -> bool:
    """Whether the attention module has its own learned sinks, as in gpt-oss; they replace the method's."""
    calls = calls_of(module)
    return calls is not None and calls.own_sinks


def _own_qk_norms(module: nn.Module) -> list[str]:
    """The module's own norms of queries and keys (as in Qwen3), found by their usual names."""
    return [n for n, child in module.named_children() if _QK_NORM.fullmatch(n) and not isinstance(child, nn.Identity)]


def num_heads(module: Any) -> int:
    """The number of query heads of an attention module."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    return int(module.config.num_attention_heads)


def _embed_dim(module: Any) -> int:
    """The size of the module's input."""
    size = getattr(module, "embed_dim", None)
    if not isinstance(size, int):  # some models are wider from stage to stage, such as Swin
        size = getattr(getattr(module, "q_proj", None), "in_features", module.config.hidden_size)
    return int(size)


def _head_dim(module: Any) -> int:
    """The size of each head's output."""
    for name in ("v_head_dim", "head_dim", "attention_head_size"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    return _embed_dim(module) // num_heads(module)


def place(module: nn.Module) -> dict[str, Any]:
    """Device and dtype of an attention module."""
    for p in module.parameters():
        if p.is_floating_point():
            return {"device": p.device, "dtype": p.dtype}
    return {}
