"""Converts a model to another method and keeps its weights, or builds a new model with a method."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from outeffhop.methods import METHODS, Method, SoftmaxN
from outeffhop.models.calibration import calibrated
from outeffhop.models.config_entry import with_inner, write
from outeffhop.models.hf_private import implementation, set_implementation
from outeffhop.models.modules import (
    attention_modules,
    check,
    has_attention,
    hook_all,
    hopfield_layers,
    install,
    method_at,
    state_of,
)
from outeffhop.models.persistence import annealing, describe
from outeffhop.models.sink_schedule import SinkSchedule, movable, refuse_own_sinks
from outeffhop.models.stanhop import StanhopConfig, StanhopForForecasting

__all__ = ["convert", "from_config"]

Model = TypeVar("Model", bound=PreTrainedModel)


def convert(
    model: Model,
    method: str | Method,
    *,
    same_function: bool = False,
    calibrate: Iterable[Mapping[str, Tensor]] | None = None,
    share: float = 0.01,
) -> Model:
    """Converts a model to a method, including its gates and learned sinks. In place; returns the model.

    The model's weights stay. Gates and learned sinks that the old and the new method share keep their values. New
    gates start at ``init``, new learned sinks at log n. A trained model then computes another function, and needs
    further training: softmax does not see an offset of all scores, so the scores of trained heads lie anywhere, and a
    sink of 0 may take all of their weight or none. ``same_function`` and ``calibrate`` start near the trained
    function; a ``SinkSchedule`` then moves fixed sinks and gates to the method's own values during fine-tuning.
    The model gets its own copy of its config, so other models built from the same config object do not change.

    Args:
        model: any transformers model that uses transformers' attention interface, or STanHop-Net.
        method: a name or ``name(parameter=value, ...)``.
        same_function: compute the very same function at first, up to rounding: fixed sinks take nothing, gates are
            open. The model must compute softmax.
        calibrate: batches of inputs. The sinks of each head start where the no-op takes ``share`` of the weight on
            them, gates are open, and the factors of QK-norm are those of the queries and keys. How far the converted
            model is from the original on them is logged (``logging.getLogger("outeffhop")``).
        share: of ``calibrate``, between 0 and 1.
    """
    new = Method.parse(method)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}: must be a transformers PreTrainedModel")
    if same_function and calibrate is not None:
        raise ValueError("same_function=True and calibrate exclude each other: leave out one of them")
    if not 0.0 < share < 1.0:
        raise ValueError(f"share={share}: must lie strictly between 0 and 1")
    near = same_function or calibrate is not None
    if near:
        _check_method(new, "same_function" if same_function else "calibrate")
    if isinstance(model, StanhopForForecasting):
        if near:
            raise ValueError("same_function and calibrate work with transformers' models; STanHop-Net has no schedule")
        return _convert_layers(model, new)
    check(model, new)
    if near:
        _check_start(model, new)
    if calibrate is not None:
        calibrated(model, new, list(calibrate), share, _install)
    else:
        _install(model, new, near)
    return model


def _check_method(method: Method, option: str) -> None:
    """Refuses methods that cannot start near softmax."""
    if not isinstance(method.normalizer, SoftmaxN):
        raise ValueError(
            f"{option} with method={str(method)!r}: it is not softmax with a sink; outeffhop, vanilla, gated and "
            "gated-outeffhop are"
        )
    if option == "same_function" and method.qk_norm != "none":
        raise ValueError(
            f"same_function=True with method={str(method)!r}: qk_norm={method.qk_norm} removes the length of queries "
            "and keys; calibrate=batches starts near the same function"
        )
    if option == "same_function" and method.normalizer.learns is not None:
        raise ValueError(
            f"same_function=True with method={str(method)!r}: a learned sink that takes nothing has no gradient and "
            "never moves; calibrate=batches starts it where it takes a small share"
        )


def _install(model: PreTrainedModel, new: Method, near: bool) -> None:
    """Gives a model the method; with ``near``, its fixed sinks take nothing and its gates are open."""
    _own_configs(model)
    model.set_attn_implementation(new.name)
    modules = attention_modules(model).values()
    # transformers 5.17 skips parts whose config is a copy of the model's, such as T5's encoder
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and has_attention(m)]
    for part in (*parts, *modules):
        set_implementation(part.config, new.name)  # type: ignore[arg-type]
    # With one seed, a model's own weights must not depend on the method: gates do not advance the generator.
    gpus = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(gpus)):
        for module in modules:
            install(module, new)
    states = [e for m in modules if (e := state_of(m)) is not None]
    for state in states:
        state.release()
    hook_all(model)
    if near and movable(new):
        SinkSchedule(steps=1).apply(model, 0)
    describe(model)


def _own_configs(model: PreTrainedModel) -> None:
    """Gives a model its own copies of its configs: another model may have been built from the same object."""
    memo: dict[int, Any] = {}  # one copy of each, wherever it is held
    for part in model.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, PreTrainedConfig):
                setattr(part, name, copy.deepcopy(value, memo))


def _check_start(model: PreTrainedModel, method: Method) -> None:
    for name, module in attention_modules(model).items():
        old, state = method_at(module), state_of(module)
        if old not in (None, METHODS["vanilla"].method) and not (state is not None and annealing(state)):
            raise ValueError(
                f"same_function and calibrate start from a softmax model, and {name} ({type(module).__name__}) has "
                f"{old}: {method} would be a different function from the start; leave them out"
            )
    refuse_own_sinks(model, method)


def _convert_layers(model: Model, method: Method) -> Model:
    with torch.random.fork_rng(devices=[]):  # as in ``convert``
        for layer in hopfield_layers(model).values():
            layer.set_method(method)
    model.config.method = str(method)
    return model


def from_config(auto_class: Any, config: PreTrainedConfig, method: str | Method = "outeffhop", **kwargs: Any) -> Any:
    """Builds a new model with a method. With one seed, its own weights are the same for every method.

    Args:
        auto_class: ``AutoModelForMaskedLM`` or another auto class, or a model class.
        config: the model's config; it is not changed.
        method: a name or ``name(parameter=value, ...)``.
        kwargs: passed to ``auto_class.from_config``, such as ``dtype``.
    """
    if "attn_implementation" in kwargs:
        raise ValueError(
            f"attn_implementation={kwargs['attn_implementation']!r} would replace method={str(method)!r}: leave it out"
        )
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"config is {config!r}, a {type(config).__name__}: give a model class, its config and a method, "
            "as in from_config(AutoModelForMaskedLM, config, 'outeffhop')"
        )
    new = Method.parse(method)
    config = copy.deepcopy(config)
    if isinstance(config, StanhopConfig):  # its Hopfield layers read the method from the config
        config.method = str(new)
        return _build(StanhopForForecasting, config, kwargs)
    for each in with_inner(config):  # the config of a converted model names a method, which is replaced
        write(each, None)
        if implementation(each) in METHODS:
            set_implementation(each, None)
    return convert(_build(auto_class, config, kwargs), new)


def _build(auto_class: Any, config: PreTrainedConfig, kwargs: dict[str, Any]) -> Any:
    if hasattr(auto_class, "from_config"):
        return auto_class.from_config(config, **kwargs)
    dtype = kwargs.pop("dtype", config.dtype)
    model = auto_class(config, **kwargs)
    return model if dtype is None else model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
