"""Finds which modules consume a module's output, by running the model once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outeffhop.models.inspection import ModulePath
from outeffhop.quantization.operations import MOVES

__all__ = ["Uses", "uses", "tensors_in"]

_MARK = "_outeffhop_made_by"


@dataclass
class Uses:
    """Where the outputs of some modules, the makers, went in one run.

    Attributes:
        takers: maker → the modules of interest that took its output as input, in order.
        elsewhere: maker → the first other place its output went to: an operation, or out of the model.
        sources: taker → the makers of all inputs it received; None stands for any other source.
    """

    takers: dict[str, list[str]] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)
    sources: dict[str, set[str | None]] = field(default_factory=dict)


def uses(model: nn.Module, run: Callable[[], Any], makers: Collection[str], takers: Collection[str]) -> Uses:
    """Runs the model and follows the makers' outputs, through views of them, to the takers.

    Args:
        model: the model whose modules are named.
        run: calls the model.
        makers: modules whose outputs are followed.
        takers: modules that may take them; what happens inside these is ignored.
    """
    found = Uses()
    with ModulePath(model) as path:
        tracer = _Tracer(found, path)
        handles = []
        try:
            for name in makers:
                handles.append(model.get_submodule(name).register_forward_hook(partial(tracer.made, name)))
            for name in takers:
                module = model.get_submodule(name)
                handles.append(module.register_forward_pre_hook(partial(tracer.taken, name), with_kwargs=True))
                handles.append(module.register_forward_hook(tracer.done, always_call=True))
            with tracer:
                out = run()
        finally:
            for handle in handles:
                handle.remove()
    for maker in filter(None, map(_maker, tensors_in(out))):
        found.elsewhere.setdefault(maker, "out of the model")
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and mappings, including model outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def _maker(x: Any) -> str | None:
    return getattr(x, _MARK, None) if isinstance(x, Tensor) else None


class _Tracer(TorchFunctionMode):
    def __init__(self, found: Uses, path: ModulePath) -> None:
        super().__init__()
        self.found, self.path = found, path
        self.inside = 0  # how many takers are being called

    def made(self, name: str, module: nn.Module, args: Any, out: Any) -> Any:
        self.found.takers.setdefault(name, [])
        if not isinstance(out, Tensor):
            self.found.elsewhere.setdefault(name, f"into a {type(out).__name__}")
            return None
        marked = out.view_as(out)  # a new tensor: another maker may have returned its input
        setattr(marked, _MARK, name)
        return marked

    def taken(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        maker = _maker(given[0]) if given else None
        if not self.inside:
            self.found.sources.setdefault(name, set()).add(maker)
            if maker is not None and name not in self.found.takers[maker]:
                self.found.takers[maker].append(name)
        self.inside += 1

    def done(self, *_: Any) -> None:
        self.inside -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.inside:
            return out
        makers = set(filter(None, map(_maker, tensors_in((args, kwargs)))))
        tensors = list(tensors_in(out))
        if not makers or not tensors:  # from no maker, or only a query of the shape
            return out
        first: Any = args[0] if args else None
        if func in MOVES and _maker(first) and all(x.shape[-1:] == first.shape[-1:] for x in tensors):
            for x in tensors:
                setattr(x, _MARK, _maker(first))
            return out
        for maker in makers:
            where = f" in {self.path.name}" if self.path.name else ""
            self.found.elsewhere.setdefault(maker, f"into {func.__name__.strip('_')}{where}")
        return out
