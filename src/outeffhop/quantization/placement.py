"""Which parts of a model are quantized, which stay in floating point, and why.

"paper" quantizes what integer inference of a whole model needs: the weights and outputs of Linear, convolution,
LayerNorm and RMSNorm modules; the weights of embeddings and their sums; residual sums; activation functions;
attention scores, probabilities and context, and queries and keys after QK-norm. An input that is not on a grid
yet (pixels, series, a gated context, a product) is quantized where a module takes it.
"linear" quantizes the inputs and weights of Linear modules, nothing else.
A scheme with ``kv_bits`` quantizes keys and values as a cache holds them, with either placement.

These stay in floating point: heads (everything outside the base model, and STanHop-Net's forecasts), gates, biases,
and what runs outside of modules (the experts of a mixture).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outeffhop.models.modules import attention_modules, has_attention, own_attention
from outeffhop.models.stanhop.blocks import DecoderLayer
from outeffhop.state import Gate, MethodState

__all__ = ["Site", "Layout", "kind_of", "lay_out"]


@dataclass(frozen=True)
class Site:
    """A module that is quantized.

    Attributes:
        kind: embedding, linear, conv, norm or activation.
        input: when its input is quantized: "always", "unless on a grid" already, or None for never.
        weight: whether its weight is quantized.
        output: whether its output is quantized.
        axis: the axis of the weight's output channels.
    """

    kind: str
    input: str | None
    weight: bool
    output: bool
    axis: int = 0


@dataclass(frozen=True)
class Layout:
    """Where a model is quantized.

    Attributes:
        sites: module name → which of its tensors are quantized.
        floating: module name → why the module and everything in it stay in floating point.
        operations: whether sums, functional activations and the parts of attention are quantized too.
        attention: names of modules that compute attention; their scores are quantized if transformers' interface
            shows them.
        exclude: patterns; those with "/" match names of quantizers.
    """

    sites: dict[str, Site]
    floating: dict[str, str]
    operations: bool
    attention: frozenset[str]
    exclude: tuple[str, ...]

    def excludes(self, name: str) -> bool:
        """Whether a pattern excludes this quantizer."""
        return any("/" in pattern and fnmatchcase(name, pattern) for pattern in self.exclude)


_KINDS = {
    "paper": {
        "embedding": Site("embedding", None, True, False),
        "linear": Site("linear", "unless on a grid", True, True),
        "conv": Site("conv", "unless on a grid", True, True),
        "norm": Site("norm", "unless on a grid", True, True),
        "activation": Site("activation", None, False, True),
    },
    "linear": {"linear": Site("linear", "always", True, False)},
}
_NO_ACTIVATION = (nn.MultiheadAttention, nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.Softmin)
_NORM = re.compile(r"(RMS|Layer)Norm$")
_EXPERTS = re.compile(r"Experts|Router|SparseMoe|MoeBlock")


def lay_out(model: nn.Module, placement: str, exclude: Sequence[str] = ()) -> Layout:
    """What a placement quantizes in each module.

    Args:
        model: any model.
        placement: "paper" or "linear".
        exclude: patterns of module names ("*lm_head*") or, with "/", of quantizer names ("*/scores").
    """
    modules = dict(model.named_modules())
    if isinstance(exclude, str):
        raise TypeError(f"exclude={exclude!r}: must be a sequence of patterns, such as exclude=({exclude!r},)")
    for pattern in exclude:
        if "/" not in pattern and not any(fnmatchcase(name, pattern) for name in modules):
            raise ValueError(f"exclude={pattern!r} matches no module of {type(model).__name__}")
    heads = _heads(model)
    kinds = _KINDS[placement]
    sites: dict[str, Site] = {}
    floating: dict[str, str] = {}
    for name, module in modules.items():
        if _within(name, floating):
            continue
        why = _why_floating(name, module, heads, exclude)
        kind = kind_of(module)
        if why is not None:
            floating[name] = why
        elif kind in kinds:
            site = kinds[kind]
            sites[name] = Site(kind, site.input, site.weight, site.output, 1 if isinstance(module, Conv1D) else 0)
    attention = frozenset(attention_modules(model) if has_attention(model) else own_attention(model))
    return Layout(sites, floating, placement == "paper", attention, tuple(exclude))


def _within(name: str, names: dict[str, str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:i]) in names for i in range(1, len(parts) + 1))


def _why_floating(name: str, module: nn.Module, heads: set[str], exclude: Sequence[str]) -> str | None:
    for pattern in exclude:
        if "/" not in pattern and fnmatchcase(name, pattern):
            return f"excluded by {pattern!r}"
    if name in heads:
        return "head"
    if isinstance(module, Gate):
        return "gate"
    if isinstance(module, MethodState) and module.extra and module.qk_norm is None:
        return "sink or α of the method" if module.gate is None else "gate"
    if _EXPERTS.search(type(module).__name__):
        return "experts, computed outside of modules"
    if isinstance(module, nn.MultiheadAttention):
        return "nn.MultiheadAttention, computed outside of modules"
    return None


def _heads(model: nn.Module) -> set[str]:
    """Names of the modules that turn the last hidden states into the model's outputs."""
    found = {f"{name}.head" for name, module in model.named_modules() if isinstance(module, DecoderLayer)}
    if isinstance(model, PreTrainedModel):
        base = getattr(model, model.base_model_prefix, None)
        if isinstance(base, nn.Module):
            found |= {name for name, child in model.named_children() if child is not base}
        output = model.get_output_embeddings()
        found |= {name for name, module in model.named_modules() if module is output}
    return found


def kind_of(module: nn.Module) -> str | None:
    """embedding, linear, conv, norm or activation; None for other modules."""
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Linear, Conv1D)):
        return "linear"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "conv"
    if _NORM.search(type(module).__name__) and not any(True for _ in module.children()):
        return "norm"
    home = type(module).__module__
    if home in ("torch.nn.modules.activation", "transformers.activations") and not isinstance(module, _NO_ACTIVATION):
        return "activation"
    return None
