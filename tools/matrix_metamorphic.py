"""Cells that need no truth: what must not change, and what arithmetic says must."""

from __future__ import annotations

import copy
import math

import torch
from matrix_rounding import changed, held_by_token, quantized
from matrix_truth import NotHere, NotServed, converted, doubled, held, output, padded, run, samples, unpadded
from transformers.pytorch_utils import Conv1D

from outeffhop.metrics import metric_for, task_of
from outeffhop.models.modules import has_attention
from outeffhop.outliers import measure
from outeffhop.quantization import Calibration, freeze, simulate
from outeffhop.quantization.simulation import measuring

# The same data in other batches


def same_data(model, batch, name):
    """Metric, outliers, rounding and calibrated sinks: rows one by one and reversed, padded, or in float64."""
    rows = [{k: v[i : i + 1] for k, v in batch.items()} for i in reversed(range(len(next(iter(batch.values())))))]
    fine, twice = copy.deepcopy(model).double(), doubled(batch)
    beside = padded(model, batch, name)
    found = ["outliers", "rounding", *(f"padding {side}" for side in beside)]
    if (numbers := _metric(model, [batch])) is not None:
        _same_numbers(numbers, _metric(model, rows), "metric")
        _same_numbers(numbers, _metric(fine, [twice]), "metric in float64", 1e-3)
        found.insert(0, "metric")
    whole = _outliers(model, [batch])
    _same_numbers(whole, _outliers(model, rows), "outliers")
    _same_numbers(whole, _outliers(fine, [twice]), "outliers in float64", 1e-2)
    for side, given in beside.items():
        _same_numbers(whole, _outliers(model, [given]), f"outliers with padding {side}", 1e-3)
        _padded_quantization(model, batch, given, side)
    _quantization(model, batch, rows)
    rounded = samples(quantized(model, batch, "linear"), batch)
    held_by_token(samples(quantized(fine, twice, "linear"), twice), rounded, "rounding in float64", 0.01)
    if _mends(model):
        found.append("sinks")
        sinks = run(converted(model, "outeffhop", calibrate=[batch]), batch)
        held(run(converted(model, "outeffhop", calibrate=rows), batch), sinks, "sinks row by row", 1e-3)
        held(run(converted(fine, "outeffhop", calibrate=[twice]), twice), sinks, "sinks in float64", 1e-2)
        for side, given in beside.items():
            again = run(converted(model, "outeffhop", calibrate=[given]), batch)
            held(again, sinks, f"sinks with padding {side}", 1e-3)
    return ", ".join(found)


def _metric(model, batches):
    """The task's metric, with the inputs as what is to be said; None for models without such a task."""
    if "input_features" in batches[0] or hasattr(model, "get_image_features"):
        return None
    task = task_of(model)
    answers = {"clm": "input_ids", "mlm": "input_ids", "seq2seq": "decoder_input_ids"}
    if task not in answers:
        return None
    return metric_for(task)(model, [{**batch, "labels": batch[answers[task]]} for batch in batches])


def _outliers(model, batches):
    report = measure(model, batches)
    return {
        f"{t.name} {what}": getattr(t, what) for t in report.tensors for what in ("inf_norm", "max_abs", "kurtosis")
    }


def _same_numbers(before, after, what, near=1e-4):
    for key, value in before.items():
        if value is not None and not math.isclose(value, after[key], rel_tol=near):
            raise AssertionError(f"{what}: {key} is {after[key]:.6g}, and {value:.6g} before")


def _quantization(model, batch, rows):
    """Rounding per token knows no batch; SmoothQuant's ranges are those of all batches."""
    alone = quantized(model, batch, "per-token")
    found = torch.cat([samples(alone, row) for row in reversed(rows)])
    held(found, samples(alone, batch), "per token, row by row", 0.02)
    split = simulate(model, "smoothquant")
    with Calibration(split), torch.no_grad():
        for row in rows:
            output(split, row)
    held(run(freeze(split), batch), run(quantized(model, batch, "smoothquant"), batch), "smoothquant row by row", 0.02)


def _padded_quantization(model, batch, given, side):
    """Padding gives no range, and takes none."""
    for scheme in ("per-token", "smoothquant", "paper"):
        whole = run(quantized(model, batch, scheme), batch)
        after = unpadded(run(quantized(model, given, scheme), given), whole, side)
        held_by_token(after, whole, f"{scheme} with padding {side}", 0.02)


def _mends(model):
    if not has_attention(model):
        return False
    try:
        converted(model, "outeffhop", same_function=True)
    except NotServed:
        return False
    return True


def moved_device(model, batch, name):
    """Metric, outliers, rounding per token and calibrated sinks on a GPU, against the CPU's."""
    if not torch.cuda.is_available():
        raise NotHere("no GPU was there when this page was filled")
    moved, there = copy.deepcopy(model).cuda(), {key: value.cuda() for key, value in batch.items()}
    if (numbers := _metric(model, [batch])) is not None:
        _same_numbers(numbers, _metric(moved, [there]), "metric", 1e-3)
    _same_numbers(_outliers(model, [batch]), _outliers(moved, [there]), "outliers", 1e-2)
    rounded = samples(quantized(moved, there, "per-token"), there).cpu()
    held_by_token(rounded, samples(quantized(model, batch, "per-token"), batch), "per token", 0.02)
    if not _mends(model):
        return "without sinks"
    sinks = run(converted(moved, "outeffhop", calibrate=[there]), there).cpu()
    return f"{held(sinks, run(converted(model, 'outeffhop', calibrate=[batch]), batch), 'sinks', 1e-2):.0e}"


# A planted outlier


def planted_outlier(model, batch, name):
    """What one channel twenty times the largest number costs the other channels of a layer's input, against
    arithmetic: each moves to the nearest multiple of a step that is twenty times larger."""
    names = changed(model, quantized(model, batch, "per-token"))
    if not names:
        raise NotServed("no layer is quantized outside of the head")
    layer = names[0]
    seen = _inputs(model, batch, layer).double()
    before = _error(model, batch, layer)
    huge = 20 * float(seen.abs().max())
    model = copy.deepcopy(model)
    found = model.get_submodule(layer)
    with torch.no_grad():
        (found.weight if isinstance(found, Conv1D) else found.weight.mT)[0] = 0  # the outlier itself says nothing

    def plant(_, args):
        x = args[0].clone()
        x[..., 0] = huge
        return (x, *args[1:])

    found.register_forward_pre_hook(plant)
    after, rest = _error(model, batch, layer), seen[..., 1:]
    step = (huge - min(0.0, float(rest.min()))) / 255
    wanted = float((rest - (rest / step).round() * step).square().sum())
    # the outlier is at the end of the range and has an error, too: of the zero point, half a step at most
    if not wanted * 0.99 <= after <= wanted * 1.01 + (step / 2) ** 2 * seen[..., 0].numel():
        raise AssertionError(f"{layer}: the error is {after:.4g}, and by arithmetic {wanted:.4g}")
    if not after > before:
        raise AssertionError(f"{layer}: an outlier costs nothing")
    return f"error ×{after / before:.0f}"


def _error(model, batch, layer):
    """The squared rounding error of a layer's input, as the library measures it."""
    rounded = quantized(model, batch, "linear")
    with measuring(rounded) as powers:
        run(rounded, batch)
    return powers[f"{layer}/input"].noise


def _inputs(model, batch, layer):
    seen = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    run(model, batch)
    handle.remove()
    return torch.cat([x.flatten(0, -2) for x in seen])
