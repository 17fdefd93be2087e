"""A model keeps its method through save_pretrained and from_pretrained.

transformers writes neither the attention implementation nor parameters it does not know of, and
has no public place to hang either. So four of its methods are wrapped here, once, each doing what
it always did where no method of ours is in play:

- ``PreTrainedConfig.to_dict`` writes ``attn_implementation`` (honoured on load) and ``outeffhop``;
- ``PreTrainedModel.__init__`` reads ``config.outeffhop``, or refuses what contradicts it, and notes which models there
  are;
- ``PreTrainedModel.post_init`` adds gates and sinks, so that they exist when weights are loaded;
- ``PreTrainedModel.from_pretrained`` refuses a checkpoint whose gates or sinks are not those of its method.
"""

from __future__ import annotations

import copy
import weakref
from functools import wraps
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from outeffhop.methods import METHODS, Method
from outeffhop.models.modules import NAME, has_attention, hopfield_layers, install
from outeffhop.nn import OutEffHop

__all__ = ["persist", "method_of", "own_config", "write", "write_all", "is_annealing"]

KEY = NAME  # of the config

_BUILT: set[weakref.ref[PreTrainedModel]] = set()  # the models there are


def method_of(config: PreTrainedConfig) -> Method | None:
    """The method a config names, by its key or by the implementation; None where it names none of ours."""
    named = _read(config)
    running = config._attn_implementation
    if running in METHODS and (named is None or named.name != running):
        return METHODS[running].method
    return named if running in METHODS or running is None else None


def is_annealing(config: PreTrainedConfig) -> bool:
    return bool(_entry(config).get("annealing", False))


def write(config: PreTrainedConfig, method: Method, annealing: bool = False) -> None:
    """Puts the method into a config and those inside it."""
    for each in _with_inner(config):
        setattr(each, KEY, {"method": str(method), **({"annealing": True} if annealing else {})})


def write_all(model: nn.Module, method: Method, annealing: bool = False) -> None:
    """Puts the method into the configs of a model and of the models inside it, which may be copies (T5's are)."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            write(part.config, method, annealing)


def own_config(model: PreTrainedModel) -> None:
    """Gives a model its own copy of a config that it shares with another: what is written there is for one of them.

    Models built from one config object, ``BertModel(config)`` twice, share it. Those inside each other do as well,
    and are to go on doing so.
    """
    built = [each for reference in list(_BUILT) if (each := reference()) is not None]
    configs = {id(part.config) for part in model.modules() if isinstance(part, PreTrainedModel)}
    sharing = [each for each in built if id(each.config) in configs and each not in set(model.modules())]
    if not sharing:
        return
    around = [each for each in built if model in set(each.modules())]
    family = set(max(around, key=lambda each: len(list(each.modules())), default=model).modules())
    if family.issuperset(sharing):
        return
    memo: dict[int, Any] = {}  # one copy of each, wherever it is held
    for part in family:
        for name, value in list(vars(part).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(part, name, copy.deepcopy(value, memo))


def persist() -> None:
    """Wraps the four methods; a second call does nothing."""
    if getattr(PreTrainedModel.post_init, "_outeffhop", False):
        return
    to_dict, init, post_init = PreTrainedConfig.to_dict, PreTrainedModel.__init__, PreTrainedModel.post_init
    from_pretrained = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    @wraps(to_dict)
    def new_to_dict(self: PreTrainedConfig) -> dict[str, Any]:
        return _serialised(self, to_dict(self))

    @wraps(init)
    def new_init(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if isinstance(config, PreTrainedConfig):
            _settle(config)
        init(self, config, *args, **kwargs)
        _BUILT.add(weakref.ref(self, _BUILT.discard))

    @wraps(post_init)
    def new_post_init(self: PreTrainedModel) -> None:
        post_init(self)
        method = method_of(self.config)
        # a model inside another may have no attention at all; one whose attention goes another way is refused
        if method is not None and (has_attention(self) or not self._can_set_attn_implementation()):
            # models inside it had their turn, by configs of their own
            install(self, method, is_annealing(self.config), only_new=True)

    @wraps(from_pretrained)
    def new_from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, info = from_pretrained(cls, *args, output_loading_info=True, **kwargs)
        _check_loaded(model, info)
        return (model, info) if wanted else model

    new_post_init._outeffhop = True  # type: ignore[attr-defined]
    PreTrainedConfig.to_dict = new_to_dict  # type: ignore[method-assign]
    PreTrainedModel.__init__ = new_init  # type: ignore[method-assign]
    PreTrainedModel.post_init = new_post_init  # type: ignore[method-assign]
    PreTrainedModel.from_pretrained = classmethod(new_from_pretrained)  # type: ignore[method-assign, assignment]


def _serialised(config: PreTrainedConfig, out: dict[str, Any]) -> dict[str, Any]:
    running = getattr(config, "_attn_implementation_internal", None)
    if isinstance(out.get(KEY), (str, Method)):
        out[KEY] = dict(_entry(config))
    if running in METHODS:
        out["attn_implementation"] = _implementations(config)
        entry = _entry(config) if (named := _read(config)) is not None and named.name == running else {}
        out[KEY] = {**entry, "method": str(method_of(config))}
    elif running is not None and KEY in out and not _has_tensors(config):
        del out[KEY]  # the user has chosen another implementation, and nothing of the method is left
    return out


def _implementations(config: PreTrainedConfig) -> Any:
    """What transformers is to read: a name for the whole model or, where parts have others, {"": name, part: ...}."""
    own = getattr(config, "_attn_implementation_internal", None)
    own = own if own in METHODS else None  # which of its own it takes, transformers decides anew
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    parts = {name: _implementations(each) for name, each in inner.items() if isinstance(each, PreTrainedConfig)}
    return own if all(part == own for part in parts.values()) else {"": own, **parts}


def _settle(config: PreTrainedConfig) -> None:
    """Before a model is built: the config's key and its implementation agree, or one of them is refused."""
    named, running = _read(config), config._attn_implementation
    if named is None:
        return
    if running is None:
        for each in _with_inner(config):
            if each._attn_implementation is None:  # one inside may have been given another
                each._attn_implementation_internal = named.name
    if running in (None, named.name):
        for each in _with_inner(config):
            if getattr(each, KEY, None) is None and each._attn_implementation == named.name:
                setattr(each, KEY, dict(_entry(config)))
    elif running in METHODS and running != named.name:
        write(config, METHODS[running].method)
    elif running not in METHODS and _has_tensors(config):
        raise ValueError(
            f"attn_implementation={running!r}, but config.{KEY} says {named}, which has parameters of its own: load it "
            "without attn_implementation, then outeffhop.convert(model, 'vanilla') removes them"
        )
    elif running not in METHODS:
        delattr(config, KEY)


def _check_loaded(model: PreTrainedModel, info: dict[str, Any]) -> None:
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
    inner = tuple(f"{layer}.state." for layer in layers)
    return [name for name in flat if f".{NAME}." in f".{name}" or (inner and name.startswith(inner))]


def _has_module_of(weight: str, model: PreTrainedModel) -> bool:
    """Whether the model has the attention module of an extension's weight, named with or without the base's prefix."""
    module = f".{weight}".partition(f".{NAME}.")[0].removeprefix(".")
    prefix = f"{model.base_model_prefix}."
    here = {name for name, _ in model.named_modules()}
    return not here.isdisjoint((module, prefix + module, module.removeprefix(prefix)))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _has_tensors(config: PreTrainedConfig) -> bool:
    method = _read(config)
    if method is None:
        return False
    if is_annealing(config):  # sinks and offsets on their way are buffers
        return True
    return method.gate is not None or method.normalizer.learns is not None or method.qk_norm != "none"


def _read(config: PreTrainedConfig) -> Method | None:
    entry = _entry(config)
    if not entry:
        return None
    if not isinstance(entry.get("method"), str):
        raise ValueError(f'config.{KEY}={entry!r}: {{"method": "name"}} is needed')
    return Method.parse(entry["method"])


def _entry(config: PreTrainedConfig) -> dict[str, Any]:
    entry = getattr(config, KEY, None)
    if entry is None:
        return {}
    if isinstance(entry, (str, Method)):  # a convenience: config.outeffhop = "clipped(alpha=12)"
        entry = {"method": str(entry)}
        setattr(config, KEY, entry)
    if not isinstance(entry, dict):
        raise ValueError(f'config.{KEY}={entry!r}: {{"method": "name"}} is needed')
    return entry


def _with_inner(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    inner = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(deep for each in inner if isinstance(each, PreTrainedConfig) for deep in _with_inner(each))]
