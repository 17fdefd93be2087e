"""What a model is made of: its method, its heads, and the parameters the method adds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from outeffhop.models.extension import Extension
from outeffhop.models.hf_private import implementation
from outeffhop.models.modules import attention_modules, extension_of, hopfield_layers, method_in, num_heads
from outeffhop.nn.association import Association

__all__ = ["ModelSummary", "model_summary"]


@dataclass(frozen=True)
class ModelSummary:
    """A model in a few numbers.

    Attributes:
        model: its class.
        method: as ``Method`` writes it, or the name of another attention implementation.
        layers: how many attention modules it has.
        heads: query heads of each.
        parameters: all of them, shared ones once, the method's included.
        gate_parameters: those of the gates.
        sink_parameters: learned sinks, and learned α.
        norm_parameters: QK-norm's factors.
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
        """What the method adds."""
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
    """The method of a model, its size, and what the method adds to it."""
    layers = hopfield_layers(model)
    if layers:
        heads = [layer.num_heads for layer in layers.values()]
        named = str(next(iter(layers.values())).method)
        gates = [layer.gate for layer in layers.values()]
        homes: list[Association | Extension] = [layer.association for layer in layers.values()]
    else:
        modules = attention_modules(model)
        heads = [num_heads(module) for module in modules.values()]
        method = method_in(model)
        named = str(implementation(model.config) if method is None else method)
        extensions = [e for e in map(extension_of, modules.values()) if e is not None]
        gates, homes = [e.gate for e in extensions], [*extensions]
    return ModelSummary(
        model=type(model).__name__,
        method=named,
        layers=len(heads),
        heads=tuple(heads),
        parameters=_count(model),
        gate_parameters=sum(map(_count, gates)),
        sink_parameters=sum(p.numel() for h in homes for p in (h.sink, h.raw_alpha) if isinstance(p, nn.Parameter)),
        norm_parameters=sum(_count(h.qk_norm) for h in homes),
    )


def _count(module: nn.Module | None) -> int:
    return 0 if module is None else sum(p.numel() for p in module.parameters())
