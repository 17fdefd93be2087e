"""The scale and shift of LayerNorms, moved into the layers after them: the same function, easier to round.

    folded, what = fold_layernorm(model, batch)
    print(what)

A LayerNorm's scale γ gives some channels a larger range than others, and all share one grid. Where nothing but
Linear layers takes its output, W(γx̂ + β) + b = (Wγ)x̂ + (Wβ + b): their weights can hold both.
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
from outeffhop.nn import Gate
from outeffhop.nn.qk_norm import HeadRMSNorm
from outeffhop.quantization.consumers import Uses, tensors_in, uses
from outeffhop.quantization.placement import kind_of

__all__ = ["Folding", "fold_layernorm"]

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class Folding:
    """What ``fold_layernorm`` did.

    Attributes:
        folded: norm → the layers that hold its scale and shift now.
        kept: norm → why it is as it was.
        difference: of the outputs before and after, the largest, relative to the largest output.
    """

    folded: dict[str, tuple[str, ...]]
    kept: dict[str, str]
    difference: float

    def __str__(self) -> str:
        lines = [f"{name} → {', '.join(layers)}" for name, layers in self.folded.items()]
        lines += [f"{name} kept: {why}" for name, why in self.kept.items()]
        return "\n".join(lines)


def fold_layernorm(model: Model, batch: Batch) -> tuple[Model, Folding]:
    """Moves the scale and shift of every LayerNorm and RMSNorm into the next layers, where that is exact.

    The model is run once on the batch to see who takes each norm's output: Linear layers and gates can hold its
    scale and shift, a residual sum cannot. A Linear without a bias gets one where there is a shift. It is run again
    when all is done; outputs that differ by more than rounding are a ValueError, and nothing is changed.

    A folded model is to be quantized, not saved: a config may know nothing of a bias that was added.

    Args:
        model: any model in floating point.
        batch: one that takes the path all others take.

    Returns:
        The folded model in eval mode (or, in place, in the mode it was in), and what was done.
    """
    if hasattr(model, "_orig_mod"):
        raise TypeError("model is compiled, and cannot be looked into; give the one it was made of: model._orig_mod")
    if hasattr(model, "_outeffhop_simulation"):
        raise ValueError("model is quantized already: fold_layernorm comes before simulate")
    folded = copy.deepcopy(model).eval()
    given = to_device(batch, folded)
    norms = _norms(folded)
    layers = [name for name, m in folded.named_modules() if kind_of(m) == "linear" or isinstance(m, Gate)]
    with torch.no_grad():
        before = _outputs(folded(**given))
        if not before:
            raise ValueError(
                f"{type(model).__name__} gives no floating-point tensor: without one, what folding changes is not seen"
            )
        found = uses(folded, lambda: folded(**given), norms, layers)
        kept = {name: why for name in norms if (why := _why_not(folded, name, found)) is not None}
        plan = {name: tuple(found.takers[name]) for name in norms if name not in kept}
        _fold(folded, plan)
        difference = _difference(before, _outputs(folded(**given)))
    # not "greater": NaN is no agreement either
    if not difference <= (limit := math.sqrt(torch.finfo(before[0].dtype).eps)):
        raise ValueError(
            f"{type(model).__name__} is another function once its norms are folded: outputs differ by {difference:.2g} "
            f"of the largest, more than rounding's {limit:.2g}; it is left as it is"
        )
    return folded, Folding(plan, kept, difference)


def _norms(model: nn.Module) -> list[str]:
    """Norms with a scale; QK-norm's factors are of heads, and no layer follows."""
    return [
        name
        for name, module in model.named_modules()
        if kind_of(module) == "norm" and not isinstance(module, HeadRMSNorm) and _tensor(module, "weight") is not None
    ]


def _why_not(model: nn.Module, name: str, found: Uses) -> str | None:
    """Why a norm cannot be folded; None where it can."""
    if name not in found.takers:
        return "it does not run on this batch"
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
        return "its weight is of several dimensions"
    if not _is_scaled_last(model.get_submodule(name)):
        return "its output is not its weight times what it normalizes"
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
    """What the weight makes of the shift, to the bias; in double precision, rounded once."""
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
