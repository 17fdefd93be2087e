"""Some quantizers of a frozen model pause: what would it gain if these tensors stayed in floating point?"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from outeffhop.quantization.simulation import simulation_of

__all__ = ["leaving"]


@contextmanager
def leaving(quantized: nn.Module, model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """A context in which the named quantizers of a frozen simulation do not round.

    The others keep their ranges, which are found in floating point and so do not depend on each other. It is what
    ``simulate(model, exclude=names)`` gives, without another calibration.

    Args:
        quantized: what ``freeze`` returned.
        model: the model it was made from, whose weights stand in for the rounded ones.
        names: of quantizers, as reports have them.
    """
    simulation = simulation_of(quantized)
    unknown = sorted(set(names) - simulation.points.keys())
    if unknown or simulation.state != "frozen":
        raise ValueError(f"names={unknown}: not quantizers of this {simulation.state} {type(model).__name__}")
    swapped: list[tuple[Any, nn.Parameter]] = []
    simulation.passing = frozenset(names)
    try:
        for name in simulation.passing:
            if simulation.points[name].kind == "weight":
                place, _, own = name.rpartition("/")
                module: Any = quantized.get_submodule(place)
                swapped.append((module, module.weight))
                module.weight = nn.Parameter(model.get_parameter(f"{place}.{own}").detach(), requires_grad=False)
        yield
    finally:
        simulation.passing = ()
        simulation.rest()
        for module, weight in swapped:
            module.weight = weight
