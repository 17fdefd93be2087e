"""A model's metric before and after quantization, over several draws of calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from itertools import islice

import torch
from torch import nn

from outeffhop.metrics import Batch, Metric, evaluating, metric_for, task_of, to_device
from outeffhop.models.summary import running_method
from outeffhop.quantization.fold import fold_layernorm
from outeffhop.quantization.placement_map import in_floating_point
from outeffhop.quantization.points import Power, read_powers
from outeffhop.quantization.quantization_report import QuantizationReport, TensorError
from outeffhop.quantization.quantizers import read_grids
from outeffhop.quantization.schemes import Scheme
from outeffhop.quantization.simulation import Calibration, freeze, measuring, simulate, simulation_of

__all__ = ["evaluate", "calibrated", "worst_rounded"]

_WORST = 20  # how many of the worst-rounded tensors are reported


def evaluate(
    model: nn.Module,
    calibration: Sequence[Batch] | Callable[[int], Sequence[Batch]],
    evaluation: Iterable[Batch],
    metric: Metric | str | None = None,
    scheme: str | Scheme = "W8A8",
    seeds: int | Sequence[int] = 3,
    *,
    calibration_batches: int = 16,
    fold: bool = False,
    exclude: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> QuantizationReport:
    """What quantization costs a model.

    Args:
        model: in floating point; it is run in eval mode and left as it was.
        calibration: batches, from which each seed draws ``calibration_batches`` without replacement, or a
            function that returns the batches for a seed.
        evaluation: batches for the metric, with labels or future values; read several times, and only copied into a
            list if it is an iterator.
        metric: the name of a task, or a function of a model and batches; by default the metric of the model's task.
        scheme: "W8A8", "W4A8 per-token", "smoothquant", … or a ``Scheme``.
        seeds: how many (0, 1, …), or which.
        calibration_batches: how many batches each seed draws.
        fold: fold LayerNorms into the next layers first (``fold_layernorm``), using the first evaluation batch.
        exclude: patterns of modules or quantizers that stay in floating point, as for ``simulate``.
        progress: called with a few words at the start of each step.
    """
    chosen = Scheme.parse(scheme)
    drawn = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not drawn:
        raise ValueError(f"seeds={seeds}: must give at least one")
    if calibration_batches < 1:
        raise ValueError(f"calibration_batches={calibration_batches}: must be at least 1")
    # a list, or something that can be read several times and may be too large for a list
    evaluated = list(evaluation) if isinstance(evaluation, Iterator) else evaluation
    first = next(iter(evaluated), None)
    if first is None:
        raise ValueError("evaluation holds no batch: a metric needs data")
    if not callable(calibration) and not len(calibration):
        raise ValueError("calibration holds no batch: ranges need data")
    task = metric if isinstance(metric, str) else "custom" if metric is not None else task_of(model)
    measure: Metric = metric_for(task, model) if metric is None or isinstance(metric, str) else metric
    tell = progress or (lambda _: None)

    with evaluating(model):
        tell("floating point")
        # float: a metric may return torch or numpy scalars, which JSON cannot hold
        full = {name: float(value) for name, value in measure(model, evaluated).items()}
        quantized: dict[str, list[float]] = {name: [] for name in full}
        rounded, folding = fold_layernorm(model, first) if fold else (model, None)
        for i, seed in enumerate(drawn):
            tell(f"calibration {i + 1} of {len(drawn)}")
            batches = calibration(seed) if callable(calibration) else _draw(calibration, calibration_batches, seed)
            simulated = calibrated(rounded, batches, chosen, exclude)
            tell(f"{chosen}, {i + 1} of {len(drawn)}")
            try:
                for name, value in measure(simulated, evaluated).items():
                    quantized[name].append(float(value))
            finally:
                simulation_of(simulated).rest()
            if i == 0:
                count = len(batches)
                blamed = worst_rounded(rounded, simulated, first)
                floating = in_floating_point(simulated)
    return QuantizationReport(
        model=type(model).__name__,
        method=running_method(model) or "unknown",
        scheme=str(chosen),
        placement=chosen.placement,
        task=task,
        seeds=drawn,
        calibration_batches=count,
        evaluation_batches=sum(1 for _ in evaluated) if not isinstance(evaluated, Sized) else len(evaluated),
        full=full,
        quantized={name: tuple(values) for name, values in quantized.items()},
        worst=blamed,
        floating=floating,
        folding=folding,
    )


def calibrated(model: nn.Module, batches: Iterable[Batch], scheme: Scheme, exclude: Sequence[str] = ()) -> nn.Module:
    """A frozen simulation of the model, its ranges from the batches."""
    quantized = simulate(model, scheme, exclude=exclude)
    if scheme.dynamic:  # tokens find their own ranges: one batch shows where the quantizers are
        batches = islice(batches, 1)
    with Calibration(quantized), torch.no_grad():
        for batch in batches:
            quantized(**to_device(batch, quantized))
    return freeze(quantized)


def _draw(batches: Sequence[Batch], count: int, seed: int) -> list[Batch]:
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))
    return [batches[int(i)] for i in order[:count]]


@torch.no_grad()
def worst_rounded(
    model: nn.Module, quantized: nn.Module, batch: Batch, count: int | None = _WORST
) -> tuple[TensorError, ...]:
    """The tensors that rounding hurts most: activations on one batch, and weights; all of them for ``count`` None."""
    points = simulation_of(quantized).points
    with measuring(quantized) as found:
        quantized(**to_device(batch, quantized))
    for name in (name for name, point in points.items() if point.kind == "weight"):
        place = name.replace("/", ".")
        found[name] = Power().add(model.get_parameter(place), quantized.get_parameter(place))
    read_powers(found.values())
    ranked = sorted(found.items(), key=lambda item: item[1].typical_db)[:count]
    grids = read_grids({name: grid for name, _ in ranked if (grid := points[name].grid) is not None})
    rows = []
    for name, power in ranked:
        low, high = grids[name].range if name in grids else (None, None)
        rows.append(
            TensorError(name, points[name].kind, power.typical_db, power.sqnr_db, low, high, power.std, power.largest)
        )
    return tuple(rows)
