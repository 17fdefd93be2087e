"""A model's attention modules: which they are, and how they get a method."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outeffhop.methods import Method, SoftmaxN
from outeffhop.nn import Gate, OutEffHop
from outeffhop.state import MethodState

__all__ = [
    "attention_modules",
    "hopfield_layers",
    "has_attention",
    "has_own_sinks",
    "extension_of",
    "check",
    "install",
    "hook_all",
    "num_heads",
    "place",
    "NAME",
]

# The attribute of an attention module that holds its extension, and so a part of the names in a checkpoint.
NAME = "outeffhop"

_QK_NORM = re.compile(r"(q|k|qk|query|key)_?(layer_?norm|norm|ln)|(layer_?norm|norm|ln)_?(q|k|qk|query|key)")


def extension_of(module: nn.Module) -> MethodState | None:
    found: Any = getattr(module, NAME, None)
    # by what it has, not by its class: a wrapper around it (as of adapters that train it) hands attributes on
    return found if isinstance(getattr(found, "method", None), Method) else None


def has_attention(model: nn.Module) -> bool:
    return any(_calls_interface(_kind(module)) for module in model.modules())


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name → module, for the modules that call transformers' attention interface themselves."""
    found = {name: module for name, module in model.named_modules() if _calls_interface(_kind(module))}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no attention module that calls transformers' attention interface "
            "(ALL_ATTENTION_FUNCTIONS): its attention cannot be exchanged"
        )
    return found


def hopfield_layers(model: nn.Module) -> dict[str, OutEffHop]:
    """Name → layer, for the models that are made of ours."""
    return {name: module for name, module in model.named_modules() if isinstance(module, OutEffHop)}


def install(model: nn.Module, method: Method, annealing: bool = False, *, only_new: bool = False) -> None:
    """Gives every attention module of the model the method; parameters both methods have keep their values.

    Args:
        only_new: leave alone those that have a method, or run another implementation.
    """
    check(model, method)
    # The gates' random numbers are drawn aside: with one seed, a model's own weights are those it has without gates.
    with torch.random.fork_rng(devices=[]):
        for module in attention_modules(model).values():
            old = extension_of(module)
            if old is not None and (only_new or old.method == method):
                continue
            if only_new and _running(module) != method.name:
                continue
            sizes = _embed_dim(module), num_heads(module), _head_dim(module)
            new = MethodState(method, *sizes, annealing, **place(module))
            for part in new.modules():  # transformers' initialisers and loaders leave alone what says so
                part._is_hf_initialized = True  # type: ignore[assignment]
            if old is not None:
                new.inherit(old)
            setattr(module, NAME, new)
            _hook(module, new.extra)


def _running(module: Any) -> Any:
    """The attention implementation that an attention module uses."""
    return module.config._attn_implementation


def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of an attention module whose method has tensors: hands the gate's openings on.

    Module-level, so that it survives deepcopy and pickling.
    """
    extension: MethodState = getattr(module, NAME)
    running = _running(module)
    if running != extension.method.name:
        raise ValueError(
            f"attn_implementation={running!r}, but this {type(module).__name__} has the method {extension.method} with "
            f"parameters of its own: outeffhop.convert(model, 'vanilla') (or another method) removes them, "
            f"model.set_attn_implementation({extension.method.name!r}) uses them"
        )
    if extension.gate is None:
        return None
    hidden_states: Any = args[0] if args else kwargs.get("hidden_states")
    _check_input(module, extension, hidden_states, kwargs)
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    # any other mask than [B, H, L, L] belongs to cross attention or a cache, where the input has no padding of its own
    head = extension.method.gate.gate == "head"  # type: ignore[union-attr]  # no other gate looks at the mask
    square = head and isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] == hidden_states.shape[-2]
    return args, {**kwargs, "attn_gate": extension(hidden_states, mask if square else None)}


def _check_input(module: nn.Module, extension: MethodState, hidden_states: Any, kwargs: dict[str, Any]) -> None:
    """Refuses what a gate that is predicted cannot be predicted from."""
    spec, kind = extension.method.gate, type(module).__name__
    if spec is None or spec.gate == "constant":
        return
    size = hidden_states.shape[-1] if isinstance(hidden_states, Tensor) else None
    if size != extension.embed_dim:
        raise ValueError(
            f"{extension.method} cannot gate this {kind}: its gate is predicted from inputs of size "
            f"{extension.embed_dim}, and the module gets {'no hidden_states' if size is None else f'size {size}'}; "
            "take gate=constant, or a method without a gate"
        )
    if spec.gate == "head" and kwargs.get("is_causal"):  # some are causal by the call alone, as CLIP's text model
        raise ValueError(_future(f"{extension.method} cannot gate this {kind}"))


def _future(what: str) -> str:
    return (
        f"{what}: gate=head averages over all tokens, also over those to come, and this attention is causal or does "
        "not say that it is not (is_causal); take gate=token or gate=constant"
    )


def _hook(module: nn.Module, wanted: bool) -> None:
    # A handle would not survive deepcopy, so the hook is found by what it is.
    present = [key for key, hook in module._forward_pre_hooks.items() if hook is before_attention]
    if wanted and not present:
        module.register_forward_pre_hook(before_attention, with_kwargs=True)
    elif not wanted:
        for key in present:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


def hook_all(model: nn.Module) -> None:
    """Brings the hooks in line after ``hold`` or ``release``."""
    for module in attention_modules(model).values():
        extension = extension_of(module)
        _hook(module, extension is not None and extension.extra)


def check(model: nn.Module, method: Method) -> None:
    """Refuses, before anything is changed, a method that some attention module cannot have."""
    for name, module in attention_modules(model).items():
        _check(name, module, method)


def _check(name: str, module: nn.Module, method: Method) -> None:
    kind = type(module).__name__
    normalizer = method.normalizer
    if has_own_sinks(module) and (not isinstance(normalizer, SoftmaxN) or normalizer.learns is not None):
        raise ValueError(
            f"{method} does not go with {name} ({kind}), which has learned sinks of its own: "
            "take 'outeffhop' or 'vanilla', gated or not"
        )
    if method.qk_norm != "none" and (own := _own_qk_norms(module)):
        raise ValueError(
            f"{method} does not go with {name} ({kind}), which normalizes queries and keys itself "
            f"({', '.join(own)}): leave qk_norm={method.qk_norm} out"
        )
    if method.gate is None:
        return
    if not _hands_kwargs_on(_kind(module)):
        raise ValueError(
            f"{method} cannot gate {name} ({kind}): it does not hand keyword arguments on to the attention function, "
            "so a gate's openings would be lost; take a method without a gate"
        )
    if method.gate.gate != "constant" and _calls_by_pieces(_kind(module)):
        raise ValueError(
            f"{method} cannot gate {name} ({kind}): it calls the attention function for one piece of its input after "
            "another, and a gate has openings for the whole; take gate=constant, or a method without a gate"
        )
    if method.gate.gate == "head" and getattr(module, "is_causal", True):  # True: transformers' own default
        raise ValueError(_future(f"{method} cannot gate {name} ({kind})"))
    # made aside, for what the gate itself refuses of these sizes
    Gate(method.gate, _embed_dim(module), num_heads(module), _head_dim(module), device="meta")


def _kind(module: nn.Module) -> Any:
    return type(module)  # Any: to a type checker a class of modules cannot be hashed


@cache
def _calls_interface(kind: type[nn.Module]) -> bool:
    if issubclass(kind, PreTrainedModel):  # checks names in the interface, calls nothing
        return False
    return any("ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names for function in _functions(kind))


def has_own_sinks(module: nn.Module) -> bool:
    """Whether the attention module has learned sinks of its own, as gpt-oss: they win over a method's."""
    return _hands_sinks(_kind(module))


@cache
def _hands_sinks(kind: type[nn.Module]) -> bool:
    """Whether the module hands sinks (``s_aux``, as gpt-oss) to the attention function."""
    calls = [f.__code__ for f in _functions(kind) if "ALL_ATTENTION_FUNCTIONS" in f.__code__.co_names]
    return any(isinstance(c, tuple) and "s_aux" in c for code in calls for c in code.co_consts)


def _own_qk_norms(module: nn.Module) -> list[str]:
    """The module's norms of queries and keys, as Qwen3 has them, by the names that models give them."""
    return [n for n, child in module.named_children() if _QK_NORM.fullmatch(n) and not isinstance(child, nn.Identity)]


@cache
def _hands_kwargs_on(kind: type[nn.Module]) -> bool:
    """Whether forward takes any keyword and its calls of the attention function pass ``**``, as far as one can read."""
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(kind.forward).parameters.values()):
        return False
    calls = [call for tree in _sources(kind) for call in _interface_calls(tree)]
    return all(any(k.arg is None for k in call.keywords) for call in calls)


@cache
def _calls_by_pieces(kind: type[nn.Module]) -> bool:
    """Whether a loop calls the attention function, as where the images of a batch lie one behind the other."""
    loops = (ast.For, ast.ListComp, ast.GeneratorExp)
    return any(isinstance(n, loops) and _interface_calls(n) for tree in _sources(kind) for n in ast.walk(tree))


def _interface_calls(tree: ast.AST) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if getattr(call.func, "id", None) == "attention_interface"]


def _sources(kind: type[nn.Module]) -> list[ast.AST]:
    """What calls the attention interface, as far as it can be read; the attention function refuses to run ungated."""
    trees: list[ast.AST] = []
    for function in _functions(kind):
        if "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names:
            with suppress(OSError, TypeError, SyntaxError):
                trees.append(ast.parse(textwrap.dedent(inspect.getsource(function))))
    return trees


def _functions(kind: type) -> list[Callable[..., Any]]:
    """The methods a class has, its parents' included, undecorated."""
    names = {name for base in kind.__mro__ if base not in (nn.Module, object) for name in vars(base)}
    found = (inspect.unwrap(f) for f in (getattr(kind, name, None) for name in names) if inspect.isfunction(f))
    return [f for f in found if inspect.isfunction(f)]


def num_heads(module: Any) -> int:
    """H of an attention module, of its queries."""
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if isinstance(getattr(module, name, None), int):
            return int(getattr(module, name))
    return int(module.config.num_attention_heads)


def _embed_dim(module: Any) -> int:
    size = getattr(module, "embed_dim", None)
    return int(size if isinstance(size, int) else module.config.hidden_size)


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
