"""The cells about quantization, against rounding written out in float64, without any code of the library."""

from __future__ import annotations

import copy
import tempfile
from functools import partial

import torch
from matrix_elsewhere import elsewhere
from matrix_truth import NotServed, distance, output, run, samples
from torch import nn
from transformers.pytorch_utils import Conv1D

from outeffhop.quantization import SCHEMES, Calibration, freeze, save_compressed, simulate

BY_HAND = ("linear", "per-channel", "per-token", "smoothquant")  # round the inputs and weights of Linear, nothing else


# Rounding by the formulas


def _ends(x, dims):
    """The range along ``dims``, widened to contain 0."""
    return x.amin(dims, keepdim=True).clamp(max=0), x.amax(dims, keepdim=True).clamp(min=0)


def _nearest(x, low, high, last=255):
    """Each number as the nearest of the points 0 … last of a grid over [low, high]."""
    step = ((high - low) / last).clamp(min=1e-38).float().double()  # stored in float32, which decides zero points
    zero = (-low / step).round()
    return (((x / step).round() + zero).clamp(0, last) - zero) * step


def _check_nearest(rounded, x, dims, what):
    """Whether each number became the nearest of ±127 steps. Of a tie, which bfloat16 often has, either end will do."""
    step = (x.abs().amax(dims, keepdim=True) / 127).clamp(min=1e-38)
    counts = rounded / step
    off_grid = (counts - counts.round()).abs().max()
    beside = ((rounded - x) / step).abs().max() - 0.5
    if off_grid > 1e-4 or beside > 1e-4 or counts.abs().max() > 127.01:
        raise AssertionError(f"{what}: {off_grid:.1e} steps off the grid, {beside:.1e} beside the nearest point")


class _ByHand:
    """Checks the rounded weight of a layer, and rounds the layer's inputs as they come."""

    def __init__(self, layer, weight, scheme, seen, what):
        self.scheme, self.seen = scheme, seen
        inputs = 0 if isinstance(layer, Conv1D) else 1  # the axis of the weight's inputs
        weight = weight.detach().double()
        self.factors = torch.ones(weight.shape[inputs], dtype=torch.double)
        if scheme == "smoothquant":
            largest = torch.maximum(-seen[0], seen[1]).flatten()
            found = (largest / weight.abs().amax(1 - inputs)).sqrt()
            self.factors = torch.where((found > 0) & found.isfinite(), found, self.factors).clamp(1e-5, 1e5)
        spread = self.factors[None, :] if inputs == 1 else self.factors[:, None]
        dims = (inputs,) if scheme in ("per-channel", "per-token") else (0, 1)
        _check_nearest(layer.weight.detach().double() * spread, weight * spread, dims, what)

    def __call__(self, layer, args):
        x = args[0].double() / self.factors
        low, high = (end / self.factors for end in self.seen)
        ends = _ends(x, -1) if self.scheme == "per-token" else (low.min(), high.max())
        return ((_nearest(x, *ends) * self.factors).to(args[0].dtype),)


@torch.no_grad()
def rounded_by_hand(model, batch, rounded, names, scheme):
    """A copy that has the rounded weights, each of which is checked, and rounds the inputs of the named layers."""
    seen = {}

    def look(name, args):
        low, high = (end.flatten() for end in _ends(args[0].double(), tuple(range(args[0].dim() - 1))))
        before = seen.get(name, (low, high))
        seen[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)

    plain = copy.deepcopy(model)
    for name in names:
        plain.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: look(name, args))
    output(plain, batch)
    found = copy.deepcopy(model)
    for name in names:
        layer, before = found.get_submodule(name), model.get_submodule(name).weight
        layer.weight = nn.Parameter(rounded.get_submodule(name).weight.detach().clone())
        layer.register_forward_pre_hook(_ByHand(layer, before, scheme, seen[name], f"{scheme} {name}"))
    return found


# Whole models: every weight, and every Linear on the inputs it got


def _check_e4m3(rounded, x, what, largest=None):
    """Whether each number became the nearest one of 8-bit floating point, the largest being 448."""
    scale = (x.abs().max() if largest is None else largest).clamp(min=1e-38) / 448
    nearest = (x / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
    counts = (rounded / scale).float()
    off = (counts - counts.clamp(-448, 448).to(torch.float8_e4m3fn).float()).abs() / counts.abs().clamp(min=2**-6)
    x = x.clamp(-448 * scale, 448 * scale)
    beside = ((rounded - x).abs() - (nearest - x).abs()) / x.abs().clamp(min=2**-6 * scale)
    if off.max() > 1e-3 or beside.max() > 1e-4:
        raise AssertionError(f"{what}: {off.max():.1e} off e4m3, {beside.max():.1e} beside the nearest number")


def _check_range(rounded, x, low, high, what):
    """Whether each number became the nearest of 256 steps over a range, or the end of the range."""
    step = ((high - low) / 255).clamp(min=1e-38)
    off_grid = ((rounded / step) - (rounded / step).round()).abs().max()
    x = x.clamp(low - step / 2, high + step / 2)
    beside = ((rounded - x) / step).abs().max() - 1  # half a step, and as much where the zero point moved the ends
    inside = (x > low) & (x < high)
    if inside.any():
        beside = torch.maximum(beside, ((rounded - x) / step)[inside].abs().max() - 0.5)
    if off_grid > 0.02 or beside > 0.02:
        raise AssertionError(f"{what}: {off_grid:.1e} steps off the grid, {beside:.1e} beside the nearest point")


@torch.no_grad()
def check_everything(model, batch, rounded, names, scheme):
    """Weights of all modules, and the outputs of the named Linear layers, whose ranges are those of the model itself.

    What lies between (sums, activation functions, attention) is in the inputs of the layers behind it.
    """
    weights = 0
    for name, after in rounded.named_parameters():
        before = model.get_parameter(name)
        if torch.equal(after, before):
            continue
        both = after.double(), before.double()
        if scheme == "fp8":
            _check_e4m3(*both, f"{scheme} {name}")
        else:
            _check_nearest(*both, tuple(range(after.dim())), f"{scheme} {name}")
        weights += 1
    ranges, handles = {}, []

    def look(name, out):
        low, high = (end.flatten() for end in _ends(out.double().flatten(), 0))
        before = ranges.get(name, (low, high))
        ranges[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)

    def check(name, layer, args, out):
        weight = layer.weight.double() if isinstance(layer, Conv1D) else layer.weight.double().mT
        exact = args[0].double() @ weight + (0 if layer.bias is None else layer.bias.double())
        low, high = ranges[name]
        if scheme == "fp8":
            _check_e4m3(out.double(), exact, f"{scheme} {name}", torch.maximum(-low, high))
        else:
            _check_range(out.double(), exact, low, high, f"{scheme} {name}")

    for name in names:
        handles.append(model.get_submodule(name).register_forward_hook(lambda _, args, out, name=name: look(name, out)))
        handles.append(rounded.get_submodule(name).register_forward_hook(partial(check, name)))
    output(model, batch)
    output(rounded, batch)
    for handle in handles:
        handle.remove()
    return weights


# The cells


@torch.no_grad()
def quantized(model, batch, scheme):
    rounded = simulate(model, scheme)
    with Calibration(rounded):
        output(rounded, batch)
    return freeze(rounded)


def schemes(model, batch, name):
    """What each scheme of Linear layers computes, and what each weight and Linear becomes by schemes of whole models,
    against rounding by the formulas; 16 bits, against floating point in the median token."""
    whole = run(model, batch)
    found = {scheme: quantized(model, batch, scheme) for scheme in SCHEMES}
    for scheme, rounded in found.items():
        far = distance(run(rounded, batch), whole)
        if not 0 < far < float("inf"):
            raise AssertionError(f"{scheme} changes nothing, or gives no number ({far})")
    names = changed(model, found["per-token"])
    if not names:
        raise NotServed("no layer is quantized outside of the head")
    worst = 0.0
    for scheme in BY_HAND:
        truth = rounded_by_hand(model, batch, found[scheme], names, scheme)
        worst = max(worst, held_by_token(run(found[scheme], batch), run(truth, batch), scheme, 1e-3))
    weights = [
        check_everything(model, batch, found[scheme], names, scheme) for scheme in SCHEMES if scheme not in BY_HAND
    ]
    exact, fine = samples(model, batch), {}
    for scheme in (*BY_HAND, "paper"):
        found16 = samples(quantized(model, batch, f"W16A16 {scheme}"), batch)
        # of sums whose outliers are a thousand times the rest, 16 bits leave six
        near = 0.1 if scheme == "paper" else 0.02
        fine[scheme] = held_by_token(found16, exact, f"16 bits {scheme}", near)
    counts = f"{len(SCHEMES)} schemes, {len(names)} layers, {max(weights)} weights"
    return f"{counts}: {worst:.0e}; 16 bits: {max(fine.values()):.0e}"


def changed(model, rounded):
    pairs = ((n, m, model.get_submodule(n)) for n, m in rounded.named_modules() if isinstance(m, (nn.Linear, Conv1D)))
    return [name for name, after, before in pairs if not torch.equal(after.weight, before.weight)]


def held_by_token(found, truth, what, near):
    """The distance of the median token or sample: where two scores tie, any rounding decides a single one of them."""
    far = (found - truth).double().flatten(0, -2).norm(dim=-1)
    size = truth.double().flatten(0, -2).norm(dim=-1).clamp(min=1e-30)
    middle = float((far / size).median())
    if not middle <= near:
        raise AssertionError(f"{what}: {middle:.1e} from the truth")
    return middle


def int8_checkpoint(model, batch, name):
    """Saved in int8 and loaded by transformers alone in another process, against rounding by the formulas."""
    rounded = quantized(model, batch, "linear")
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_compressed(rounded, f"{folder}/saved")
        except ValueError as error:
            raise NotServed(str(error)) from error
        found = elsewhere("theirs").run(f"{folder}/saved", model, batch)
    names = changed(model, quantized(model, batch, "per-token"))
    return (
        f"{held_by_token(found, run(rounded_by_hand(model, batch, rounded, names, 'linear'), batch), 'int8', 1e-3):.0e}"
    )
