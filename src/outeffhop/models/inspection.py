"""Looks into a running model: which module is running, and the intermediate tensors of its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outeffhop.methods import METHODS
from outeffhop.models.hf_private import implementation, refuse_compiled, set_implementation
from outeffhop.models.modules import attention_modules, has_attention
from outeffhop.models.recording import calls_of
from outeffhop.ops.call import Call
from outeffhop.ops.probe import probing, watching

__all__ = ["ModulePath", "inspecting", "through_ours"]


class ModulePath:
    """The name of the module that is running; a context manager.

    Attributes:
        name: the innermost module whose forward is running, as in ``named_modules``; "" is the model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running: list[str] = []
        self._handles: list[Any] = []

    @property
    def name(self) -> str:
        return self._running[-1] if self._running else ""

    def __enter__(self) -> ModulePath:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name)))
            # always_call: also when a forward raises
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()


@contextmanager
def inspecting(
    model: nn.Module,
    probe: Callable[[str, str, Tensor], Tensor] | None = None,
    watch: Callable[[str, Call, Tensor | None, Tensor | None], None] | None = None,
) -> Iterator[ModulePath]:
    """Shows the intermediate tensors of a model's attention, with the name of the module that computes them.

    Inside the context, a transformers model with another attention implementation (sdpa, eager) computes the same
    softmax through ours; afterwards it has its own implementation again.

    Args:
        model: any model that is not compiled; for a compiled one, pass ``model._orig_mod``.
        probe: ``probe(name, part, tensor) -> tensor``, as ``outeffhop.ops.probe`` calls it.
        watch: ``watch(name, call, lse, weights)``, likewise; the attention keeps its kernels.
    """
    refuse_compiled(model)
    with ExitStack() as stack:
        looked_into = probe is not None or watch is not None
        if looked_into:
            for config, before in through_ours(model):
                stack.callback(set_implementation, config, before)
        path = stack.enter_context(ModulePath(model))
        if probe is not None:
            stack.enter_context(probing(lambda part, tensor: probe(path.name, part, tensor)))
        if watch is not None:
            stack.enter_context(watching(lambda call, lse, weights: watch(path.name, call, lse, weights)))
        yield path


def through_ours(model: nn.Module) -> list[tuple[PreTrainedConfig, str]]:
    """Runs the softmax of other implementations (sdpa, eager) through ours.

    Attention with arguments that ours does not take, such as the indices of sparse attention, is left as it is.

    Returns:
        The configs that were changed, each with the implementation it named before.
    """
    changed = []
    for config in _configs(model):
        if implementation(config) not in METHODS:
            # one by one: the parts of a model may have different methods and implementations
            changed.append((config, implementation(config)))
            set_implementation(config, "vanilla")
    return changed


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """The configs of the models and attention modules inside a model that ours can run."""
    if not has_attention(model):
        return []
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel) and has_attention(part)]
    attentions: dict[str, Any] = attention_modules(model)
    unserved = {id(part.config) for part in attentions.values() if (calls := calls_of(part)) and calls.unserved}
    configs = [part.config for part in (*models, *attentions.values()) if id(part.config) not in unserved]
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())
