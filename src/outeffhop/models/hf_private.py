"""The only place where this package reaches past the public interface of transformers and torch.

Two public methods of transformers are wrapped: ``PreTrainedModel.save_pretrained`` and ``from_pretrained``. Each works
as before; our code runs before saving, and during and after loading. Without it, a model would silently lose its
method: transformers writes neither the name of an attention implementation nor its parameters into ``config.json``, and
it builds a model's modules and loads their weights in one call, with no step in between that could add gates and sinks.
No public extension point serves both:

- The attention interface looks up a function by name when a model runs, and is not used when it is saved or loaded.
- ``register_quantizer`` gives a hook before weights are loaded, but it takes the only ``quantization_config`` a model
  can have (no 4-bit loading of a gated model), changes how DeepSpeed ZeRO-3 and FSDP load it, does not see missing or
  unexpected weights, and does not run when a model is saved; a transformers that does not know the quantizer only
  warns and continues.
- ``register_patch_mapping`` replaces module classes by name for every model of the process; the registry of fusions and
  the conversion mapping are for other weights of the same modules.

While a model is loaded, ``torch.nn.modules.module.register_module_module_registration_hook`` (public) shows every
attention module as it is built, so that its gates and sinks are there before the weights.

In addition, a few private names are used here, each behind a function: transformers keeps the attention implementation
of a config in ``_attn_implementation`` and marks modules that it must not initialize with ``_is_hf_initialized``; torch
keeps the model inside a compiled one in ``_orig_mod``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = [
    "implementation",
    "set_implementation",
    "mark_initialized",
    "refuse_compiled",
    "inside",
    "wrap_saving_and_loading",
]


def implementation(config: PreTrainedConfig) -> Any:
    """The attention implementation a config names; None before a model is built from it."""
    return config._attn_implementation


def set_implementation(config: PreTrainedConfig, name: str | None) -> None:
    """Sets the attention implementation of one config; transformers' setter also changes the configs inside it."""
    config._attn_implementation_internal = name


def mark_initialized(module: nn.Module) -> None:
    """Tells transformers' initializers and loaders not to change the values of a module."""
    for part in module.modules():
        part._is_hf_initialized = True  # type: ignore[assignment]


def refuse_compiled(model: nn.Module) -> None:
    """Raises a TypeError for the result of ``torch.compile(model)``: hooks on its modules would not run."""
    if hasattr(model, "_orig_mod"):
        raise TypeError("model is compiled, so its modules cannot be observed: pass the original, model._orig_mod")


def inside(model: nn.Module) -> nn.Module | None:
    """The model inside a compiled, parallel or distributed wrapper; None if there is none."""
    return getattr(model, "_orig_mod", None) or getattr(model, "module", None)


def wrap_saving_and_loading(
    before_saving: Callable[[PreTrainedModel], None],
    while_building: Callable[[nn.Module], None],
    after_loading: Callable[[PreTrainedModel, dict[str, Any], bool], None],
) -> None:
    """Wraps ``save_pretrained`` and ``from_pretrained``; a second call does nothing.

    Args:
        before_saving: called with the model.
        while_building: called with every module that is registered in another while a model is loaded.
        after_loading: called with the model, transformers' loading info, and whether the caller chose an attention
            implementation.
    """
    save_pretrained, from_pretrained = PreTrainedModel.save_pretrained, PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    if getattr(save_pretrained, "_outeffhop", False):
        return

    @wraps(save_pretrained)
    def saving(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        before_saving(self)
        return save_pretrained(self, *args, **kwargs)

    @wraps(from_pretrained)
    def loading(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        wanted, config = kwargs.pop("output_loading_info", False), kwargs.get("config")
        chosen = kwargs.get("attn_implementation")
        if chosen is None and isinstance(config, PreTrainedConfig):  # auto classes pass the choice on this way
            chosen = implementation(config)
        hook = register_module_module_registration_hook(lambda _, __, module: while_building(module))
        try:
            model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
        finally:
            hook.remove()
        after_loading(model, info, chosen is not None)
        return (model, info) if wanted else model

    saving._outeffhop = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = saving  # type: ignore[method-assign]
    PreTrainedModel.from_pretrained = classmethod(loading)  # type: ignore[method-assign, assignment]
