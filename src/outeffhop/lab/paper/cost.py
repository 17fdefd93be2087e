"""Table 4 and Figure 8: time and memory of a training step, vanilla against OutEffHop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values, Verdict
from outeffhop.lab.paper.host_memory import host_memory
from outeffhop.lab.paper.training_step import batch_of, training_step

__all__ = ["EXPERIMENT", "memory_verdict", "time_verdict"]

METHODS = ("vanilla", "outeffhop")
_TOLERANCE = 0.1  # a larger share of the time counts as a cost


def cells(settings: Settings) -> list[Cell]:
    rounds = 3 if settings.quick else 20 if settings.scale == "tiny" else 50
    # the device is part of what is asked; it is left out for a GPU, as in the kept cells
    where = {} if settings.device.startswith("cuda") else {"device": settings.device}
    return [Cell(model, {"model": model, "rounds": rounds, **where}) for model in published.NAMES]


def measure(cell: Cell, settings: Settings) -> Values:
    """The methods take turns, so that other load on the machine affects both."""
    model, rounds = cell.values["model"], cell.values["rounds"]
    # before anything is timed here
    host = {method: host_memory(model, method, settings, rounds) for method in METHODS}
    steps = {method: training_step(model, method, settings) for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    memory: dict[str, float | None] = {}
    for method, step in steps.items():
        step()  # done only once: kernels, the optimizer's state
        memory[method] = _peak(step, settings)
    for _ in range(rounds):
        for method, step in steps.items():
            begun = time.perf_counter()
            step()
            seconds[method].append(time.perf_counter() - begun)
    precision = "bf16" if settings.device.startswith("cuda") else "fp32"
    how = {"batch": batch_of(model, settings), "precision": precision, "threads": torch.get_num_threads()}
    return {"seconds": seconds, "memory_gb": memory, "host": host, **how}


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
            main = [round(gb, 3) if gb is not None else None for gb in _host(values, method)]
            numbers = [*times, shown, *main, published.MEMORY_GB[model][i]]
            rows.append([published.NAMES[model], method, values["batch"], *numbers])
    _draw(found, folder)
    figures = [Figure("time", "Time of a training step", "The median of all rounds, with quartiles.")]
    if _draw_host(found, folder):
        caption = (
            "Resident memory of a new process that builds the model and trains it, with its peak as a dotted line."
        )
        figures.append(Figure("host-memory", "Main memory over time (Figure 8)", caption))
    one = next(iter(found.values()))
    own = ["ms a step", "memory of a step, GB", "RAM, mean GB", "RAM, peak GB"]
    columns = ["model", "method", "batch", own[0], "to vanilla", *own[1:], "paper: RAM, GB"]
    note = (
        "Medians; the methods took turns. Memory of a step is the GPU's, RAM the main memory of a separate process; "
        "the paper has a whole machine's, with its data loaders."
    )
    return EXPERIMENT.result(
        [Table("A training step", columns, rows, dict.fromkeys((*own, "paper: RAM, GB"), "low"), "model", note)],
        figures,
        [time_verdict({m: values["seconds"] for m, values in found.items()}), memory_verdict(found)],
        {"data": "random numbers", "rounds": len(one["seconds"]["vanilla"])}
        | {"precision": one["precision"], "threads": one["threads"]},
    )


def _host(values: Values, method: str) -> tuple[float | None, float | None]:
    """Mean and peak of the main memory; None in cells that do not have it."""
    kept = (values.get("host") or {}).get(method) or {}
    return kept.get("mean_gb"), kept.get("peak_gb")


def time_verdict(seconds: dict[str, dict[str, list[float]]]) -> Verdict:
    """About time; the paper's numbers are about memory."""
    claim = "OutEffHop costs no more than vanilla attention"
    if not seconds:
        return Verdict(claim, "not measured", "")
    ratios = {m: median(s["outeffhop"]) / median(s["vanilla"]) for m, s in seconds.items()}
    worst = max(ratios.values())
    numbers = ", ".join(f"{published.NAMES[m]} {r:.2f}" for m, r in ratios.items())
    kind: Any = "confirmed" if worst <= 1 + _TOLERANCE else "contradicted"
    return Verdict(claim, kind, f"time of a step over vanilla's: {numbers}; up to {1 + _TOLERANCE:g} counts as equal")


def memory_verdict(found: dict[str, Values]) -> Verdict:
    """About main memory, as the paper's Table 4."""
    claim = "OutEffHop needs no more main memory than vanilla attention"
    means = {model: [_host(values, method)[0] for method in METHODS] for model, values in found.items()}
    ratios = {m: new / old for m, (old, new) in means.items() if old is not None and new is not None}
    if not ratios:
        return Verdict(claim, "not measured", "")
    numbers = ", ".join(f"{published.NAMES[m]} {r:.3f}" for m, r in ratios.items())
    kind: Any = "confirmed" if max(ratios.values()) <= 1 + _TOLERANCE else "contradicted"
    return Verdict(
        claim,
        kind,
        f"mean RAM in training over vanilla's: {numbers}; up to {1 + _TOLERANCE:g} counts as equal",
    )


def _draw(found: dict[str, Values], folder: Path) -> None:
    from matplotlib.patches import Patch

    figure, _ = drawing.new(9, 3.4, columns=len(found))
    marks: dict[str, Any] = {"median": Patch(color="#888888")}
    for axis, (model, values) in zip(figure.axes, found.items(), strict=True):
        for at, method in enumerate(METHODS):
            low, middle, high = (1000 * q for q in quantiles(values["seconds"][method], n=4))
            axis.bar(at, middle, color=drawing.colour(method), width=0.6)
            bar = axis.errorbar(at, middle, [[middle - low], [high - middle]], ls="", color="#BBBBBB", capsize=4)
            marks["from the first to the third quartile"] = bar
        axis.set_xticks(range(len(METHODS)), METHODS)
        axis.set_title(published.NAMES[model], fontsize=10)
    figure.supylabel("ms a step", fontsize=10)
    drawing.legend(figure, marks)
    drawing.save(figure, folder, "time")


def _draw_host(found: dict[str, Values], folder: Path) -> bool:
    """Figure 8, for the models that it was measured for; whether there are any."""
    kept = {model: values["host"] for model, values in found.items() if _host(values, "vanilla")[0] is not None}
    if not kept:
        return False
    figure, _ = drawing.new(9, 3.2, columns=len(kept))
    marks: dict[str, Any] = {}
    for axis, (model, host) in zip(figure.axes, kept.items(), strict=True):
        for method in METHODS:
            marks[method] = axis.plot(host[method]["seconds"], host[method]["gb"], color=drawing.colour(method))[0]
            axis.axhline(host[method]["peak_gb"], color=drawing.colour(method), linestyle=":", linewidth=0.8)
        axis.set_title(published.NAMES[model], fontsize=10)
        axis.set_xlabel("seconds")
    drawing.legend(figure, marks | {"its peak": {"color": "#888888", "linestyle": ":"}})
    figure.supylabel("main memory, GB", fontsize=10)
    drawing.save(figure, folder, "host-memory")
    return True


EXPERIMENT = Experiment(
    "cost",
    "Table 4 and Figure 8",
    "Time and memory of training with vanilla attention and with OutEffHop.",
    cells,
    measure,
    conclude,
    partial=True,
    alone=True,
)
