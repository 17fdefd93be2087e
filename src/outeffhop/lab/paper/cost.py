"""Table 4 and Figure 8: time and memory of a training step, vanilla against OutEffHop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values, Verdict
from outeffhop.lab.training import RunConfig
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import presets

__all__ = ["EXPERIMENT", "time_verdict"]

METHODS = ("vanilla", "outeffhop")
_TOLERANCE = 0.1  # a larger share of the time counts as a cost


def cells(settings: Settings) -> list[Cell]:
    rounds = 3 if settings.quick else 20 if settings.scale == "tiny" else 50
    # the device is part of what is asked; it is left out for a GPU, as in the kept cells
    where = {} if settings.device.startswith("cuda") else {"device": settings.device}
    return [Cell(model, {"model": model, "rounds": rounds, **where}) for model in published.NAMES]


def measure(cell: Cell, settings: Settings) -> Values:
    """The methods take turns, so that other load on the machine affects both."""
    model = cell.values["model"]
    config = resolve(RunConfig(model=model, preset=settings.scale, data="made up"))
    batch = min(config.train.batch_size or 1, 4 if settings.quick else 256)
    inputs = _inputs(model, settings, batch, config.samples.length)
    steps = {method: _step(model, method, settings, inputs) for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    memory: dict[str, float | None] = {}
    for method, step in steps.items():
        step()  # done only once: kernels, the optimizer's state
        memory[method] = _peak(step, settings)
    for _ in range(cell.values["rounds"]):
        for method, step in steps.items():
            begun = time.perf_counter()
            step()
            seconds[method].append(time.perf_counter() - begun)
    precision = "bf16" if settings.device.startswith("cuda") else "fp32"
    how = {"batch": batch, "precision": precision, "threads": torch.get_num_threads()}
    return {"seconds": seconds, "memory_gb": memory, **how}


def _inputs(model: str, settings: Settings, batch: int, length: int | None) -> dict[str, Tensor]:
    """Random numbers of the right shape: a step costs the same with any data."""
    random = torch.Generator().manual_seed(0)
    config: Any = presets.config(model, settings.scale)
    if length is not None:
        ids = torch.randint(0, config.vocab_size, (batch, length), generator=random)
        made = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    elif model == "vit":
        pixels = torch.randn(batch, config.num_channels, config.image_size, config.image_size, generator=random)
        made = {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (batch,), generator=random)}
    else:
        past, future = (
            torch.randn(batch, n, config.num_series, generator=random) for n in (config.in_len, config.out_len)
        )
        made = {"past_values": past, "future_values": future}
    return {name: value.to(settings.device) for name, value in made.items()}


def _step(model: str, method: str, settings: Settings, inputs: dict[str, Tensor]) -> Callable[[], None]:
    torch.manual_seed(0)
    built: Any = presets.build(model, settings.scale, method)
    built.to(settings.device).train()
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    on_gpu = settings.device.startswith("cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            loss = built(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_gpu:
            torch.cuda.synchronize()

    return step


def _peak(step: Callable[[], None], settings: Settings) -> float | None:
    """The memory that a step adds, in GB; None on a CPU, whose heap does not shrink again."""
    if not settings.device.startswith("cuda"):
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    rows = []
    for model, values in found.items():
        base = median(values["seconds"]["vanilla"])
        for i, method in enumerate(METHODS):
            at, memory = median(values["seconds"][method]), values["memory_gb"][method]
            shown = "not measured" if memory is None else round(memory, 3)
            times = [round(1000 * at, 3), f"{at / base:.3f}"]
            rows.append([published.NAMES[model], method, values["batch"], *times, shown, published.MEMORY_GB[model][i]])
    _draw(found, folder)
    one = next(iter(found.values()))
    columns = ["model", "method", "batch", "ms a step", "to vanilla", "memory of a step, GB", "paper: RAM, GB"]
    better = {"ms a step": "low", "memory of a step, GB": "low", "paper: RAM, GB": "low"}
    note = "Medians; the methods took turns. The paper reports the machine's main memory, we report the GPU's memory."
    return EXPERIMENT.result(
        [Table("A training step", columns, rows, better, "model", note)],
        [Figure("time", "Time of a training step", "The median of all rounds, with quartiles.")],
        [time_verdict({m: values["seconds"] for m, values in found.items()})],
        {"data": "random numbers", "rounds": len(one["seconds"]["vanilla"])}
        | {"precision": one["precision"], "threads": one["threads"]},
    )


def time_verdict(seconds: dict[str, dict[str, list[float]]]) -> Verdict:
    """About time; the paper's numbers are about memory."""
    claim = "OutEffHop costs no more than vanilla attention"
    if not seconds:
        return Verdict(claim, "not measured", "")
    ratios = {m: median(s["outeffhop"]) / median(s["vanilla"]) for m, s in seconds.items()}
    worst = max(ratios.values())
    numbers = ", ".join(f"{published.NAMES[m]} {r:.2f}" for m, r in ratios.items())
    kind: Any = "confirmed" if worst <= 1 + _TOLERANCE else "contradicted"
    return Verdict(
        claim, kind, f"time of a step as a ratio to vanilla's: {numbers}; up to {1 + _TOLERANCE:g} counts as equal"
    )


def _draw(found: dict[str, Values], folder: Path) -> None:
    figure, _ = drawing.new(10, 3.2, columns=len(found))
    for axis, (model, values) in zip(figure.axes, found.items(), strict=True):
        for at, method in enumerate(METHODS):
            low, middle, high = (1000 * q for q in quantiles(values["seconds"][method], n=4))
            axis.bar(at, middle, color=drawing.colour(method), width=0.6)
            axis.errorbar(at, middle, [[middle - low], [high - middle]], color="#888888", capsize=4)
        axis.set_xticks(range(len(METHODS)), METHODS)
        axis.set_title(published.NAMES[model], fontsize=9)
    figure.supylabel("ms a step", fontsize=9)
    drawing.save(figure, folder, "time")


EXPERIMENT = Experiment(
    "cost",
    "Table 4 and Figure 8",
    "Time and memory of a training step with vanilla attention and with OutEffHop.",
    cells,
    measure,
    conclude,
    partial=True,
    alone=True,
)
