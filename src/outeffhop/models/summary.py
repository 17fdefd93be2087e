"""A summary of a model: its method, its heads, and the parameters that the method adds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from outeffhop.models.hf_private import implementation
from outeffhop.models.modules import attention_modules, has_attention, hopfield_layers, method_in, num_heads, state_of
from outeffhop.state import MethodState

__all__ = ["ModelSummary", "model_summary", "running_method"]


@dataclass(frozen=True)
class ModelSummary:
    """A model in a few numbers.

    Attributes:
        model: its class.
        method: as ``Method`` writes it, or the name of another attention implementation.
        layers: the number of attention modules.
        heads: the query heads of each.
        parameters: all parameters, including the method's; shared ones count once.
        gate_parameters: the parameters of the gates.
        sink_parameters: the learned sinks and α.
        norm_parameters: the factors of QK-norm.
    """

    model: str
    method: str
    layers: int
    heads: tuple[int, ...]
    parameters: int
    gate_parameters: int
    sink_parameters: int
    norm_parameters: int

    @property
    def extra_parameters(self) -> int:
        """The parameters that the method adds."""
        return self.gate_parameters + self.sink_parameters + self.norm_parameters

    def __str__(self) -> str:
        kinds = sorted(set(self.heads))
        rows = {
            "model": self.model,
            "method": self.method,
            "attention layers": f"{self.layers}",
            "heads": f"{kinds[0]}" if len(kinds) == 1 else ", ".join(map(str, self.heads)),
            "parameters": f"{self.parameters:,}",
            "  of gates": f"{self.gate_parameters:,}",
            "  of sinks": f"{self.sink_parameters:,}",
            "  of QK-norm": f"{self.norm_parameters:,}",
        }
        width = max(map(len, rows))
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows.items())


def model_summary(model: PreTrainedModel) -> ModelSummary:
    """The method of a model, its size, and the parameters that the method adds."""
    layers = hopfield_layers(model)
    if layers:
        heads = [layer.num_heads for layer in layers.values()]
        states: list[MethodState] = [layer.state for layer in layers.values()]
    else:
        modules = attention_modules(model)
        heads = [num_heads(module) for module in modules.values()]
        states = [state for state in map(state_of, modules.values()) if state is not None]
    return ModelSummary(
        model=type(model).__name__,
        method=running_method(model),
        layers=len(heads),
        heads=tuple(heads),
        parameters=_count(model),
        gate_parameters=sum(_count(s.gate) for s in states),
        sink_parameters=sum(p.numel() for s in states for p in (s.sink, s.raw_alpha) if isinstance(p, nn.Parameter)),
        norm_parameters=sum(_count(s.qk_norm) for s in states),
    )


def running_method(model: nn.Module) -> str:
    """The method of a model, else the name of its attention implementation; "" if it has no config."""
    layers, config = hopfield_layers(model), getattr(model, "config", None)
    if layers:
        return str(next(iter(layers.values())).method)
    if config is None:
        return ""
    method = method_in(model) if has_attention(model) else None
    return str(implementation(config) if method is None else method)


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())
