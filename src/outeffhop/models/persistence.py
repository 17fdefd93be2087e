"""A model keeps its method through ``save_pretrained`` and ``from_pretrained``, or is refused.

The truth about a model is in its attention modules: their extension and the implementation their config names.
``describe`` writes it into ``model.config``, where transformers saves it; ``restore`` adds extensions while a model is
built from such a config, before its weights are loaded; ``check_loaded`` refuses what does not fit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outeffhop.methods import METHODS, Method
from outeffhop.models.config_entry import KEY, entry_of, is_annealing, method_of, named_method, with_inner, write
from outeffhop.models.extension import Extension
from outeffhop.models.hf_private import implementation
from outeffhop.models.modules import NAME, extension_of, hopfield_layers, install
from outeffhop.models.recording import calls_of
from outeffhop.nn import OutEffHop

__all__ = ["describe", "restore", "check_loaded", "annealing"]

_FIELD = "attn_implementation"  # of config.json, which transformers honours on loading


def annealing(extension: Extension) -> bool:
    """Whether a schedule moves the sink or the gate of an extension, which are buffers meanwhile."""
    return any(True for _ in extension.buffers())


def describe(model: PreTrainedModel) -> None:
    """Writes the methods of a model's attention modules into its config and those inside it.

    A module whose config is a copy (T5's parts have one, and so has a converted part of a larger model) is built again
    from the config of its class in ``model.config``; what that one config cannot say is refused.
    """
    if hopfield_layers(model):  # models made of ours have the method as a field of their config
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
                f"one {type(home).__name__}, which can name one method: outeffhop.convert the whole model"
            )
    for config in configs:
        # a config without attention modules of its own, such as CLIP's, says what it runs
        _, method, moving = said.get(id(config), ("", method_of(config), is_annealing(config)))
        write(config, method, moving)
    for config in configs:
        named = _implementations(config)
        if named is not None:
            setattr(config, _FIELD, named)
        elif hasattr(config, _FIELD):
            delattr(config, _FIELD)


def _method_to_save(name: str, module: Any) -> tuple[Method | None, bool]:
    """What an attention module is to be restored with, and whether a schedule moves it."""
    extension, running = extension_of(module), implementation(module.config)
    if extension is not None and (extension.method.name == running or extension.extra):
        return extension.method, annealing(extension)
    if running in METHODS:
        return method_of(module.config), False
    if extension is None and entry_of(module.config) is not None:
        raise ValueError(
            f"config.{KEY}={getattr(module.config, KEY)!r}, but {name} runs {running!r}: the model was built without "
            f"the method; build it with outeffhop.from_config, or without config.{KEY}"
        )
    return None, False


def _home(name: str, module: Any, configs: list[PreTrainedConfig], method: Method | None) -> PreTrainedConfig | None:
    """The config of ``configs`` that a module's config will be made from when the model is loaded."""
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


def _implementations(config: PreTrainedConfig) -> Any:
    """What transformers is to read: a name for the whole model or, where parts have others, {"": name, part: ...}."""
    method = named_method(config)
    own = None if method is None else method.name  # which of its own it takes, transformers decides again
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    parts = {name: _implementations(each) for name, each in inner.items() if isinstance(each, PreTrainedConfig)}
    return own if all(part == own for part in parts.values()) else {"": own, **parts}


def restore(module: nn.Module) -> None:
    """Adds the extension that the config of a freshly built attention module calls for; other modules stay."""
    config = getattr(module, "config", None)
    if not isinstance(config, PreTrainedConfig) or getattr(config, KEY, None) is None:
        return
    method = named_method(config)
    if method is not None and implementation(config) == method.name and calls_of(module) is not None:
        with torch.random.fork_rng(devices=[]):
            install(module, method, is_annealing(config))


def check_loaded(model: PreTrainedModel, info: dict[str, Any], chosen: bool) -> None:
    """Refuses a loaded model whose gates, sinks or implementation are not those of its method.

    Args:
        info: transformers' loading info.
        chosen: the caller chose the attention implementation, which wins over a method without tensors.
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
                f"attn_implementation={running!r}, but config.{KEY} says {named}, which has parameters of its own: "
                "load it without attn_implementation, then outeffhop.convert(model, 'vanilla') removes them"
            )
        if not chosen:
            raise ValueError(
                f"config.{KEY} says {named}, but {_FIELD} is missing in the config, so that {name} would run "
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
    # of a model's part, such as CLIP's text model, loaded from the whole one's checkpoint: the other part's
    ours["unexpected_keys"] = [name for name in ours["unexpected_keys"] if layers or _has_module_of(name, model)]
    method = next(iter(layers.values())).method if layers else method_of(model.config)
    at = model.config.name_or_path
    for kind in ("missing_keys", "mismatched_keys"):
        if ours[kind]:
            raise ValueError(
                f"{at!r} cannot be restored as {method}: {_some(ours[kind])} "
                f"{'are not in it' if kind == 'missing_keys' else 'have other shapes in it'}. To give a checkpoint "
                f"this method, load it as it is and call outeffhop.convert(model, {str(method)!r})"
            )
    if ours["unexpected_keys"]:
        raise ValueError(
            f"{at!r} holds {_some(ours['unexpected_keys'])}, which {method or 'its config'} does not call for: "
            f"config.json must name the method they were trained with, as in "
            + ('"method": "gated"' if layers else f'"{KEY}": {{"method": "gated"}}')
            + ", and loading must not override it"
        )


def _ours(names: Any, layers: dict[str, OutEffHop]) -> list[str]:
    """Of a checkpoint's names, those of gates, sinks, α and QK-norm: in extensions, or in a model's Hopfield layers."""
    flat = [name if isinstance(name, str) else name[0] for name in names]
    inner = tuple(
        f"{layer}.{part}"
        for layer in layers
        for part in ("gate.", "association.sink", "association.raw_alpha", "association.qk_norm.")
    )
    return [name for name in flat if f".{NAME}." in f".{name}" or (inner and name.startswith(inner))]


def _has_module_of(weight: str, model: PreTrainedModel) -> bool:
    """Whether the model has the attention module of an extension's weight, named with or without the base's prefix."""
    module = f".{weight}".partition(f".{NAME}.")[0].removeprefix(".")
    prefix = f"{model.base_model_prefix}."
    here = {name for name, _ in model.named_modules()}
    return not here.isdisjoint((module, prefix + module, module.removeprefix(prefix)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
