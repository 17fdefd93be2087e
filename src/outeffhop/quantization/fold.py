"""Moves the scale and shift of LayerNorms into the layers after them: the same function, easier to quantize.

    folded, what = fold_layernorm(model, batch)
    print(what)

A LayerNorm's scale γ gives some channels a larger range than others, and all share one grid. If only Linear layers
take its output, their weights can hold scale and shift: W(γx̂ + β) + b = (Wγ)x̂ + (Wβ + b).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outeffhop.metrics import Batch, to_device
from outeffhop.models.hf_private import refuse_compiled
from outeffhop.quantization.consumers import Uses, tensors_in, uses
from outeffhop.quantization.placement import kind_of
from outeffhop.state import Gate
from outeffhop.state.qk_norm import HeadRMSNorm

__all__ = ["Folding", "fold_layernorm"]

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Folding:
    """What ``fold_layernorm`` did.

    Attributes:
        folded: norm → the layers that now hold its scale and shift.
        kept: norm → why it was not folded.
        difference: the largest difference of outputs before and after, relative to the largest output.
    """

    folded: dict[str, tuple[str, ...]]
    kept: dict[str, str]
    difference: float

    def __str__(self) -> str:
        lines = [f"{name} → {', '.join(layers)}" for name, layers in self.folded.items()]
        lines += [f"{name} kept: {why}" for name, why in self.kept.items()]
        return "\n".join(lines)


def fold_layernorm(model: Model, batch: Batch) -> tuple[Model, Folding]:
    """A copy of the model with the scale and shift of every LayerNorm and RMSNorm in the next layers, where exact.

    The model runs once on the batch to see which modules take each norm's output: Linear layers and gates can hold
    its scale and shift, a residual sum cannot. A Linear without a bias gets one if there is a shift. The result runs
    once more, and outputs that differ by more than rounding raise a ValueError.

    Quantize a folded model, but do not save it: its config may not know about a bias that was added.

    Args:
        model: any model in floating point; it is not changed.
        batch: a batch that runs every part of the model.

    Returns:
        The folded model in eval mode, and what was done.
    """
    refuse_compiled(model)
    if hasattr(model, "_outeffhop_simulation"):
        raise ValueError("model is quantized already: call fold_layernorm before simulate")
    folded = copy.deepcopy(model).eval()
    given = to_device(batch, folded)
    norms = _norms(folded)
    layers = [name for name, m in folded.named_modules() if kind_of(m) == "linear" or isinstance(m, Gate)]
    with torch.no_grad():
        before = _outputs(folded(**given))
        if not before:
            raise ValueError(
                f"{type(model).__name__} returns no floating-point tensor, so the result of folding cannot be checked"
            )
        found = uses(folded, lambda: folded(**given), norms, layers)
        kept = {name: why for name in norms if (why := _why_not(folded, name, found)) is not None}
        plan = {name: tuple(found.takers[name]) for name in norms if name not in kept}
        _fold(folded, plan)
        difference = _difference(before, _outputs(folded(**given)))
    # the loss may come in float32 from a model in 16 bits: the coarsest output tells how it computes
    dtype = max((x.dtype for x in before), key=lambda each: torch.finfo(each).eps)
    # not ">": NaN is not agreement either
    if not difference <= (limit := math.sqrt(torch.finfo(dtype).eps)):
        finer = "" if limit < 1e-2 else " or in float32, which rounds less (--dtype float32)"
        raise ValueError(
            f"{type(model).__name__} computes another function with its norms folded: outputs differ by "
            f"{difference:.2g} of the largest, and rounding to {str(dtype).removeprefix('torch.')} explains only "
            f"{limit:.2g}; use the model without folding{finer}"
        )
    return folded, Folding(plan, kept, difference)


def _norms(model: nn.Module) -> list[str]:
    """Norms with a scale, except QK-norm: its factors belong to heads, and no layer follows."""
    return [
        name
        for name, module in model.named_modules()
        if kind_of(module) == "norm" and not isinstance(module, HeadRMSNorm) and _tensor(module, "weight") is not None
    ]


def _why_not(model: nn.Module, name: str, found: Uses) -> str | None:
    """Why a norm cannot be folded, or None if it can."""
    if name not in found.takers:
        return "it did not run on this batch"
    if name in found.elsewhere:
        return f"its output goes {found.elsewhere[name]}"
    if not found.takers[name]:
        return "nothing takes its output"
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for each in (name, *found.takers[name]):
        if any(shared[id(p)] > 1 for p in model.get_submodule(each).parameters()):
            return f"the weight of {each} is shared"
    for taker in found.takers[name]:
        if found.sources[taker] != {name}:
            return f"{taker} takes other inputs as well"
    weight = _tensor(model.get_submodule(name), "weight")
    if weight is not None and weight.shape[-1] != weight.numel():
        return "its weight has several dimensions"
    if not _is_scaled_last(model.get_submodule(name)):
        return "its output is not its weight times the normalized input"
    return None


@torch.no_grad()
def _is_scaled_last(norm: Any) -> bool:
    """Whether the norm is weight · x̂ + bias; some (Gemma's) are (1 + weight) · x̂."""
    plain, weight = copy.deepcopy(norm), norm.weight
    _reset(plain)
    x = torch.linspace(-1, 2, weight.numel(), device=weight.device, dtype=weight.dtype).view_as(weight)
    bias = _tensor(norm, "bias")
    expected = weight * plain(x) + (0 if bias is None else bias)
    return _difference([expected], [norm(x)]) <= math.sqrt(torch.finfo(x.dtype).eps)


@torch.no_grad()
def _fold(model: nn.Module, plan: dict[str, tuple[str, ...]]) -> None:
    for name, takers in plan.items():
        norm: Any = model.get_submodule(name)
        shift = _tensor(norm, "bias")
        for taker in takers:
            _absorb(model.get_submodule(taker), norm.weight.flatten(), None if shift is None else shift.flatten())
        _reset(norm)


def _absorb(layer: Any, scale: Tensor, shift: Tensor | None) -> None:
    if isinstance(layer, Gate):
        if layer.weight is None:
            return
        first = "hidden_" if layer.spec.predictor == "mlp" else ""
        weight, bias = getattr(layer, f"{first}weight"), getattr(layer, f"{first}bias")
        if layer.spec.predictor != "features":  # each head sees its own part of the input
            size = (layer.num_heads, *[1] * (weight.dim() - 2), -1)
            scale, shift = scale.view(size), None if shift is None else shift.view(size)
        _add(bias, weight, shift)
        weight.copy_(weight.double() * scale.double())
        return
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight  # [out, in]
    if shift is not None and shift.any():
        if layer.bias is None:
            layer.bias = nn.Parameter(weight.new_zeros(weight.shape[0]))
        _add(layer.bias, weight, shift)
    weight.copy_(weight.double() * scale.double())


def _add(bias: Tensor, weight: Tensor, shift: Tensor | None) -> None:
    """Adds weight · shift to the bias, in double precision so that it is rounded once."""
    if shift is not None:
        bias.copy_(bias.double() + (weight.double() * shift.double()).sum(-1))


@torch.no_grad()
def _reset(norm: Any) -> None:
    nn.init.ones_(norm.weight)
    if (bias := _tensor(norm, "bias")) is not None:
        nn.init.zeros_(bias)


def _tensor(module: nn.Module, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return found if isinstance(found, Tensor) else None


def _outputs(out: Any) -> list[Tensor]:
    return [x for x in tensors_in(out) if x.is_floating_point()]


def _difference(before: list[Tensor], after: list[Tensor]) -> float:
    pairs = zip(before, after, strict=True)
    return max(float((a.double() - b.double()).abs().max() / a.double().abs().max().clamp(min=1e-30)) for a, b in pairs)
