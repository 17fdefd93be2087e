"""A model keeps its method through ``save_pretrained`` and ``from_pretrained``, or an error says why it cannot.

A model's attention modules know their method by their state, and by the implementation that their config names.
``describe`` writes it into ``model.config``, which transformers saves. ``restore`` adds the states when a model is
built from such a config, before its weights are loaded. ``check_loaded`` refuses what does not match.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outeffhop.methods import METHODS, Method
from outeffhop.models.config_entry import KEY, entry_of, is_annealing, method_of, named_method, with_inner, write
from outeffhop.models.hf_private import implementation
from outeffhop.models.modules import NAME, hopfield_layers, install, state_of
from outeffhop.models.recording import calls_of
from outeffhop.nn import OutEffHop
from outeffhop.state import MethodState

__all__ = ["describe", "restore", "check_loaded", "annealing"]

_FIELD = "attn_implementation"  # transformers reads this field of config.json when it loads a model


def annealing(state: MethodState) -> bool:
    """Whether a schedule is moving the sink or the gate of a state; they are buffers until it ends."""
    return any(True for _ in state.buffers())


def describe(model: PreTrainedModel) -> None:
    """Writes the methods of a model's attention modules into its config and those inside it.

    Some modules have a copy of the config: T5's parts, or a converted part of a larger model. Such a copy is made again
    from the config of the same class in ``model.config``. Raises a ValueError if one config cannot name the methods.
    """
    if hopfield_layers(model):  # models built from our own layers have the method as a field of their config
        return
    configs = with_inner(model.config)
    said: dict[int, tuple[str, Method | None, bool]] = {}  # by the id of a config in ``configs``
    for name, module in model.named_modules():
        if calls_of(module) is None:
            continue
        method, moving = _method_to_save(name, module)
        home = _home(name, module, configs, method)
        if home is None:
            continue
        first = said.setdefault(id(home), (name, method, moving))
        if first[1:] != (method, moving):
            raise ValueError(
                f"{first[0]} has {first[1] or 'softmax'} and {name} has {method or 'softmax'}, but both are built from "
                f"one {type(home).__name__}, which can name only one method: outeffhop.convert the whole model"
            )
    names: dict[int, str | None] = {}  # None: transformers chooses its own implementation
    for config in configs:
        if id(config) in said:
            _, method, moving = said[id(config)]
        else:  # a config without its own attention modules, such as CLIP's, names its implementation
            method, moving = method_of(config), is_annealing(config)
        names[id(config)] = None if method is None else method.name
        write(config, method, moving)
    for config in configs:
        named = _implementations(config, names)
        if named is not None:
            setattr(config, _FIELD, named)
        elif hasattr(config, _FIELD):
            delattr(config, _FIELD)


def _method_to_save(name: str, module: Any) -> tuple[Method | None, bool]:
    """The method to restore an attention module with, and whether a schedule is moving it."""
    state, running = state_of(module), implementation(module.config)
    if state is not None and (state.method.name == running or state.extra):
        return state.method, annealing(state)
    if running in METHODS:
        return method_of(module.config), False
    if state is None and entry_of(module.config) is not None:
        raise ValueError(
            f"config.{KEY}={getattr(module.config, KEY)!r}, but {name} runs {running!r}: the model was built without "
            f"the method; build it with outeffhop.from_config, or without config.{KEY}"
        )
    return None, False


def _home(name: str, module: Any, configs: list[PreTrainedConfig], method: Method | None) -> PreTrainedConfig | None:
    """The config of ``configs`` from which loading makes the module's config."""
    config = module.config
    if any(each is config for each in configs):
        return config  # type: ignore[no-any-return]
    alike = [each for each in configs if type(each) is type(config)]
    if len(alike) == 1:
        return alike[0]
    if method is not None:
        raise ValueError(
            f"{name} has {method}, but its {type(config).__name__} is not part of the model's config: the method would "
            "be lost; outeffhop.convert the whole model"
        )
    return None


def _implementations(config: PreTrainedConfig, names: dict[int, str | None]) -> Any:
    """The value for transformers: one name for the whole model, or {"": name, part: name, ...} if parts differ."""
    own = names[id(config)]
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    parts = {name: _implementations(each, names) for name, each in inner.items() if isinstance(each, PreTrainedConfig)}
    return own if all(part == own for part in parts.values()) else {"": own, **parts}


def restore(module: nn.Module) -> None:
    """Adds the state that the config of a new attention module names; does nothing to other modules."""
    config = getattr(module, "config", None)
    if not isinstance(config, PreTrainedConfig) or getattr(config, KEY, None) is None:
        return
    method = named_method(config)
    if method is not None and implementation(config) == method.name and calls_of(module) is not None:
        with torch.random.fork_rng(devices=[]):
            install(module, method, is_annealing(config))


def check_loaded(model: PreTrainedModel, info: dict[str, Any], chosen: bool) -> None:
    """Raises a ValueError if the gates, sinks or implementation of a loaded model are not those of its method.

    Args:
        info: transformers' loading info.
        chosen: the caller chose the attention implementation, which may replace a method without tensors.
    """
    for name, module in model.named_modules():
        if calls_of(module) is not None:
            _check_module(name, module, chosen)
    _check_weights(model, info)
    describe(model)


def _check_module(name: str, module: Any, chosen: bool) -> None:
    running, named = implementation(module.config), named_method(module.config)
    if named is not None and running not in METHODS:
        if _has_tensors(named) or is_annealing(module.config):
            raise ValueError(
                f"attn_implementation={running!r}, but config.{KEY} says {named}, which has its own parameters: "
                "load it without attn_implementation, then outeffhop.convert(model, 'vanilla') removes them"
            )
        if not chosen:
            raise ValueError(
                f"config.{KEY} says {named}, but {_FIELD} is missing in the config, so {name} would run "
                f'{running!r}: put "{_FIELD}": "{named.name}" beside it, or remove both'
            )
        write(module.config, None)
    unnamed = named is None or named.name != running
    if running in METHODS and unnamed and _has_tensors(METHODS[running].method):
        raise ValueError(
            f"attn_implementation={running!r} needs parameters that {name} ({type(module).__name__}) does not have: "
            f"load the checkpoint as it is, then outeffhop.convert(model, {running!r}) adds them"
        )


def _has_tensors(method: Method) -> bool:
    return method.gate is not None or method.normalizer.learns is not None or method.qk_norm != "none"


def _check_weights(model: PreTrainedModel, info: dict[str, Any]) -> None:
    kinds = ("missing_keys", "mismatched_keys", "unexpected_keys")
    layers = hopfield_layers(model)
    ours = {kind: sorted(_ours(info.get(kind, ()), layers)) for kind in kinds}
    # a part such as CLIP's text model may be loaded from the checkpoint of the whole, which holds the other part too
    ours["unexpected_keys"] = [name for name in ours["unexpected_keys"] if layers or _has_module_of(name, model)]
    method = next(iter(layers.values())).method if layers else method_of(model.config)
    at = model.config.name_or_path
    if _former(info.get("unexpected_keys", ()), layers):
        raise ValueError(
            f"{at!r} was saved by outeffhop 0.1.0, which named its gates and sinks differently: load it with that "
            "version"
        )
    for kind in ("missing_keys", "mismatched_keys"):
        if ours[kind]:
            raise ValueError(
                f"{at!r} cannot be restored as {method}: {_some(ours[kind])} "
                f"{'are missing' if kind == 'missing_keys' else 'have other shapes'}. To convert a checkpoint to this "
                f"method, load it as it is and call outeffhop.convert(model, {str(method)!r})"
            )
    if ours["unexpected_keys"]:
        raise ValueError(
            f"{at!r} holds {_some(ours['unexpected_keys'])}, which {method or 'its config'} does not call for: "
            f"config.json must name the method they were trained with, as in "
            + ('"method": "gated"' if layers else f'"{KEY}": {{"method": "gated"}}')
            + ", and loading must not override it"
        )


def _ours(names: Any, layers: dict[str, OutEffHop]) -> list[str]:
    """The names of gates, sinks, α and QK-norm among a checkpoint's: in states, or in Hopfield layers."""
    flat = [name if isinstance(name, str) else name[0] for name in names]
    inner = tuple(f"{layer}.state." for layer in layers)
    return [name for name in flat if f".{NAME}." in f".{name}" or (inner and name.startswith(inner))]


def _former(names: Any, layers: dict[str, OutEffHop]) -> bool:
    """Whether a checkpoint's names are those that outeffhop 0.1.0 gave to gates, sinks, α and QK-norm of layers."""
    parts = ("gate.", "association.sink", "association.raw_alpha", "association.qk_norm.")
    former = tuple(f"{layer}.{part}" for layer in layers for part in parts)
    return bool(former) and any(name.startswith(former) for name in names)


def _has_module_of(weight: str, model: PreTrainedModel) -> bool:
    """Whether the model has the attention module of this weight, named with or without the base prefix."""
    module = f".{weight}".partition(f".{NAME}.")[0].removeprefix(".")
    prefix = f"{model.base_model_prefix}."
    here = {name for name, _ in model.named_modules()}
    return not here.isdisjoint((module, prefix + module, module.removeprefix(prefix)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
