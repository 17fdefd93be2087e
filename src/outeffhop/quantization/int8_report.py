"""What real integer execution gains and costs: metric, error, latency, size, and the arithmetic that ran."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from outeffhop._dataclass_io import JsonReport
from outeffhop.metrics import Batch, Metric, evaluating, metric_for
from outeffhop.quantization.int8 import Int8Model
from outeffhop.quantization.int8_export import inputs_of, output_of
from outeffhop.quantization.int8_graph import Operation

__all__ = ["Int8Report", "measure_int8", "RUNS"]

RUNS = ("torch fp32", "openvino fp32", "openvino int8")


@dataclass(frozen=True)
class Int8Report(JsonReport):
    """One model run three ways (``RUNS``) on the same batches; "torch fp32" is the model itself, not compiled.

    Attributes:
        model: the model's class.
        method: the method of its attention.
        placement: where the quantizers are, in words.
        calibration_batches: how many batches determined the ranges.
        cpu: the processor.
        threads: CPU threads of all three runs.
        versions: versions of the packages that exported it.
        metric: run → metric → value.
        sqnr_db: run → signal over error of the outputs, against torch fp32, without padded positions.
        latency_batch: the shapes of the batch that was timed, by input.
        latency_ms: run → median over rounds, in which the runs take turns.
        size_bytes: precision → bytes on disk.
        operations: what OpenVINO computes in the int8 model, and in which arithmetic.
    """

    FORMAT = "outeffhop.int8-report.1"

    model: str
    method: str
    placement: str
    calibration_batches: int
    cpu: str
    threads: int
    versions: dict[str, str]
    metric: dict[str, dict[str, float]]
    sqnr_db: dict[str, float]
    latency_batch: dict[str, tuple[int, ...]]
    latency_ms: dict[str, float]
    size_bytes: dict[str, int]
    operations: tuple[Operation, ...]

    def counts(self, arithmetic: str) -> dict[str, int]:
        """Kind of operation → how many run in "int8", "mixed" or "float" arithmetic, the most frequent first."""
        return dict(Counter(o.kind for o in self.operations if o.arithmetic == arithmetic).most_common())

    def __str__(self) -> str:
        size = {"torch fp32": "fp32", "openvino fp32": "fp32", "openvino int8": "int8"}
        lines = [f"{self.model} ({self.method}) on {self.cpu}, {self.threads} threads", f"  {self.placement}"]
        for run in RUNS:
            metrics = ", ".join(f"{name} {value:.5g}" for name, value in self.metric[run].items())
            error = "" if run == "torch fp32" else f", SQNR {self.sqnr_db[run]:.1f} dB"
            space = "" if run == "torch fp32" else f", {self.size_bytes[size[run]] / 2**20:.1f} MiB"
            lines.append(f"  {run:13}  {metrics}{error}, {self.latency_ms[run]:.2f} ms{space}")
        for arithmetic in ("int8", "mixed", "float"):
            kinds = ", ".join(f"{kind} ×{n}" for kind, n in self.counts(arithmetic).items())
            lines.append(f"  in {arithmetic} arithmetic: {kinds or 'nothing'}")
        return "\n".join(lines)


def measure_int8(
    model: PreTrainedModel,
    exported: Int8Model,
    batches: Iterable[Batch],
    metric: Metric | None = None,
    *,
    rounds: int = 10,
) -> Int8Report:
    """Runs a model in PyTorch and its export in fp32 and int8 on the same batches, side by side.

    Args:
        model: the model that was exported; it is run in eval mode and left as it was.
        exported: what ``export_int8`` returned.
        batches: batches with the targets that the metric needs. The first one is timed.
        metric: ``metric(model, batches)`` returns numbers by name; by default the metric of the model's task.
        rounds: how often to time each run.
    """
    evaluated = list(batches)
    if not evaluated:
        raise ValueError("batches is empty: a metric needs data")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}: must be at least 1")
    about = exported.about
    measure = metric_for(about["task"], model) if metric is None else metric
    threads = torch.get_num_threads()
    torch.set_num_threads(exported.threads)
    try:
        with evaluating(model):
            modules = dict(zip(RUNS, (model, exported.as_module("fp32"), exported.as_module("int8")), strict=True))
            # float: a metric may return torch or numpy scalars, which JSON cannot hold
            metrics = {
                run: {name: float(value) for name, value in measure(module, evaluated).items()}
                for run, module in modules.items()
            }
            sqnr = {run: _sqnr(model, exported, run.split()[1], evaluated) for run in RUNS[1:]}
            first = evaluated[0]
            timers: dict[str, Callable[[], float]] = {
                "torch fp32": lambda: _seconds(model, first),
                "openvino fp32": lambda: exported.seconds(first, "fp32"),
                "openvino int8": lambda: exported.seconds(first, "int8"),
            }
            latency = _latency(timers, rounds)
    finally:
        torch.set_num_threads(threads)
    return Int8Report(
        model=about["model"],
        method=about["method"],
        placement=about["placement"],
        calibration_batches=about["calibration_batches"],
        cpu=exported.cpu(),
        threads=exported.threads,
        versions=about["versions"],
        metric=metrics,
        sqnr_db=sqnr,
        latency_batch={name: tuple(tensor.shape) for name, tensor in inputs_of(first).items()},
        latency_ms=latency,
        size_bytes={precision: exported.size(precision) for precision in ("fp32", "int8")},
        operations=tuple(exported.operations()),
    )


def _sqnr(model: PreTrainedModel, exported: Int8Model, precision: str, batches: list[Batch]) -> float:
    signal = noise = 0.0
    for batch in batches:
        truth, found = output_of(model, batch).double(), exported.run(batch, precision).double()
        mask = batch.get("attention_mask")
        if mask is not None and mask.shape == truth.shape[:2]:  # outputs at padding are not used
            truth, found = truth[mask.bool()], found[mask.bool()]
        signal += float(truth.square().sum())
        noise += float((truth - found).square().sum())
    return math.inf if noise == 0.0 else 10.0 * math.log10(signal / noise)


def _seconds(model: PreTrainedModel, batch: Batch) -> float:
    start = time.perf_counter()
    output_of(model, batch)
    return time.perf_counter() - start


def _latency(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians in ms of runs that take turns, so that whatever disturbs the machine disturbs all of them."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for timer in timers.values():
        timer()
    for _ in range(rounds):
        for name, timer in timers.items():
            samples[name].append(timer() * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}
