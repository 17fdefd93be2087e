"""Writes performance.md from the result files of the benchmarks.

    python docs/make_performance.py

Only the words below are written by hand. tests/docs/test_performance_page.py checks that the page matches the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
INTRODUCTION = """# What it costs

See what the method costs you in time and memory. Every figure is a ratio to vanilla attention, measured in turns, the
median over rounds: of times, lower is better; of speeds, higher. `benchmarks/results/` has the files, with
quartiles."""

Rows = list[dict[str, Any]]
_NONE = "\N{EN DASH}"  # in a cell that was not measured


def page() -> str:
    """The page as text."""
    parts = [INTRODUCTION, *(part() for part in PARTS)]
    return "\n\n".join(part for part in parts if part) + "\n"


def attention() -> str:
    passes = ("forward", "forward+backward")
    found = []
    for device in ("cuda", "cpu"):
        result = _read(f"attention-{device}")
        if result is None:
            continue
        table = []
        for shape, kind in _distinct(result["rows"], "shape", "kind"):
            line = [_shape(shape), kind]
            for which in passes:
                rows = _where(result["rows"], shape=shape, kind=kind, **{"pass": which})
                ours = next((row for row in rows if row["contender"].startswith("ours")), None)
                eager = next((row for row in rows if row["contender"] == "eager"), None)
                line += [_ratio(ours), _times_faster(eager, ours)]
            table.append(line)
        header = ["B×H×S×D", "mask", "forward", "eager", "with backward", "eager"]
        most = max(float(row.get("memory_ratio") or 0) for row in result["rows"] if row["contender"].startswith("ours"))
        found.append(f"{_on(result, f'at most {most:.2f} times the memory')}\n\n{_table(header, table)}")
    return _section(
        "Attention",
        "`benchmarks/attention.py`: time over the fastest of PyTorch's own kernels for the same call; on the GPU the "
        "device's time, by CUDA graphs. *Eager*, which writes all scores, takes so many times as long as ours. The "
        "forward pass reads and writes the output once more; the backward pass costs nothing "
        "([why](../src/outeffhop/ops/README.md)).",
        found,
    )


def calls() -> str:
    found = []
    for device in ("cuda", "cpu"):
        result = _read(f"calls-{device}")
        if result is None:
            continue
        table = [
            [
                row["name"],
                row["pass"],
                f"{_of(rows, 'sdpa')['us']:.0f}",
                _ratio(row),
                _ratio(_of(rows, f"{row['contender']}, learned sink")),
            ]
            for (name, which) in _distinct(result["rows"], "name", "pass")
            for rows in [_where(result["rows"], name=name, **{"pass": which})]
            for row in [_of(rows, "ours")]
        ]
        found.append(f"{_on(result)}\n\n{_table(['call', 'pass', 'sdpa, µs', 'ours', 'learned'], table)}")
    return _section(
        "Single calls",
        "`benchmarks/calls.py`: a plain Python loop of one call, where short sequences wait for Python and not for the "
        "device. *New length*: the number of keys was never seen before, as in generation.",
        found,
    )


def training_step() -> str:
    result = _read("training-step-cuda")
    if result is None:
        return ""
    table = []
    for (method,) in _distinct(result["rows"], "method"):
        line = [f"`{method}`"]
        for model in ("opt", "bert"):
            row = next(iter(_where(result["rows"], method=method, model=model)), None)
            line += (
                [_NONE] * 3
                if row is None
                else [f"{row['tokens_per_second']:,.0f}", _ratio(row, "speed_ratio"), _ratio(row, "memory_ratio")]
            )
        table.append(line)
    header = ["method", "OPT-125m: tokens/s", "speed", "memory", "BERT-base: tokens/s", "speed", "memory"]
    return _section(
        "Training steps",
        "`benchmarks/training_step.py`: forward, backward and AdamW, bf16 autocast, `torch.compile`, no dropout, as "
        "ratios to transformers' own `sdpa`. `vanilla` is plain softmax through our attention.",
        [f"{_on(result)}\n\n{_table(header, table)}"],
    )


def generation() -> str:
    found = []
    for device in ("cuda", "cpu"):
        result = _read(f"generation-{device}")
        if result is None:
            continue
        methods = [m for (m,) in _distinct(result["rows"], "method") if m != "sdpa"]
        table = []
        for model, mode, batch in _distinct(result["rows"], "model", "mode", "batch"):
            rows = {row["method"]: row for row in _where(result["rows"], model=model, mode=mode, batch=batch)}
            speeds = [_ratio(rows.get(m), "speed_ratio") for m in methods]
            table.append([model, mode.replace("-", ", "), str(batch), f"{rows['sdpa']['ms_per_token']:.2f}", *speeds])
        header = ["model", "mode, cache", "batch", "sdpa, ms a token", *(f"`{m}`" for m in methods)]
        found.append(f"{_on(result)}\n\n{_table(header, table)}")
    return _section(
        "Generation",
        "`benchmarks/generation.py`: tokens per second of `generate` over those with `sdpa`. The models are OPT-125m "
        "and a Llama of 16 layers with 16 heads, 4 key heads and width 1,024 (tiny ones on a CPU).",
        found,
    )


def windows() -> str:
    found = []
    for device in ("cuda", "cpu"):
        result = _read(f"windows-{device}")
        if result is None:
            continue
        table = [
            [f"{row['length']:,}", row["contender"], f"{row['ms']:.2f}", _ratio(row), f"{row['peak_mib']:,.0f}"]
            for row in result["rows"]
        ]
        found.append(f"{_on(result)}\n\n{_table(['tokens', 'contender', 'ms', 'time', 'MiB'], table)}")
    return _section(
        "Windows and sinks, as in gpt-oss",
        "`benchmarks/windows.py`: forward and backward of 64 heads, 8 key heads, size 64, window 128. 1.00 is the same "
        "kernel without a sink.",
        found,
    )


def clipped() -> str:
    result = _read("clipped-cuda")
    if result is None:
        return ""
    header = list(result["table"]["columns"])
    return _section(
        "Clipped softmax", result["table"]["words"], [f"{_on(result)}\n\n{_table(header, result['table']['rows'])}"]
    )


def layers() -> str:
    results = {device: _read(f"layer-{device}") for device in ("cpu", "cuda")}
    given = {device: result for device, result in results.items() if result is not None}
    if not given:
        return ""
    names = [name for (name,) in _distinct(next(iter(given.values()))["rows"], "layer")][1:]
    table = [
        [name, *(_ratio(next(iter(_where(result["rows"], layer=name)), None)) for result in given.values())]
        for name in names
    ]
    header = [
        "layer",
        *(f"{_device(r)}, {_shape((r['batch'], r['length'], r['size']))}, {r['heads']} heads" for r in given.values()),
    ]
    return _section(
        "Hopfield layers",
        "`benchmarks/layer.py`: forward and backward, as a ratio to `torch.nn.MultiheadAttention`.",
        [_table(header, table)],
    )


def memory() -> str:
    found = []
    for device in ("cuda", "cpu"):
        result = _read(f"memory-{device}")
        if result is None:
            continue
        table = []
        rounded = [p for p in ("tf32", "bfloat16") if p in result["rows"][0]["queries_per_second"]]
        for row in result["rows"]:
            rate, peak = row["queries_per_second"], row["peak_mib"]
            plain = f"{peak['plain']:,.0f}" if "plain" in peak else _NONE
            speeds = [f"{rate[p] / rate['plain']:.2f}" if "plain" in rate else _NONE for p in ("fused", *rounded)]
            table.append([f"{row['patterns']:,}", f"{rate['fused']:,.0f}", *speeds, f"{peak['fused']:.1f}", plain])
        precisions = [f"in {p}" for p in rounded]
        header = ["patterns", "queries/s", "speed over plain", *precisions, "MiB", "plain, MiB"]
        found.append(f"{_on(result)}\n\n{_table(header, table)}")
    return _section(
        "Associative memory",
        "`benchmarks/memory.py`: retrieval with 4,096 queries of size 64 in float32. *Plain* writes all scores.",
        found,
    )


def observing() -> str:
    outliers, penalty = _read("outliers-cpu"), _read("penalty-cpu-1-thread")
    cuda = {"outliers": _read("outliers-cuda"), "penalty": _read("penalty-cuda")}
    found = []
    for result in (cuda["outliers"], outliers):
        if result is not None:
            table = [
                [
                    row["model"],
                    f"{row['batch']}×{row['length']}",
                    _ratio(row, "tensors_ratio"),
                    _ratio(row, "tensors_and_heads_ratio"),
                ]
                for row in result["rows"]
            ]
            found.append(
                f"`outliers.measure` over a forward pass. {_on(result)}\n\n"
                + _table(["model", "batch", "tensors", "tensors and heads"], table)
            )
    for result in (cuda["penalty"], penalty):
        if result is not None:
            table = [[row["model"], row["mode"], str(row["tensors"]), _ratio(row)] for row in result["rows"]]
            found.append(
                f"A training step with `OutlierPenalty` over one without. {_on(result)}\n\n"
                + _table(["model", "mode", "tensors", "time"], table)
            )
    return _section(
        "Measuring outliers, and the penalty on them", "`benchmarks/outliers.py`, `benchmarks/penalty.py`.", found
    )


def loop() -> str:
    table = []
    for name in ("training-loop-cpu", "training-loop-cuda"):
        result = _read(name)
        if result is not None:
            table.append(
                [f"{_device(result)}, {result['model']}", f"{result['speed']:.2f}", f"{result['speed_of_fastest']:.2f}"]
            )
    return _section(
        "The training loop",
        "`benchmarks/training_loop.py`: the speed of `outeffhop train` over that of a loop written by hand.",
        [_table(["run", "median", "of the fastest steps"], table)] if table else [],
    )


PARTS: tuple[Callable[[], str], ...] = (
    attention,
    windows,
    training_step,
    generation,
    calls,
    clipped,
    layers,
    memory,
    observing,
    loop,
)


def _read(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _section(title: str, words: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"## {title}", words, *parts]) if parts else ""


def _on(result: dict[str, Any], more: str = "") -> str:
    busy = f", beside {result['busy']} processes that keep cores busy" if result.get("busy") else ""
    also = f"; {more}" if more else ""
    return f"{_device(result)}, torch {result['torch'].split('+')[0]}, {result['date']}{busy}{also}:"


def _device(result: dict[str, Any]) -> str:
    if result["cuda"]:
        return str(result["device"])
    return f"{result['device']}, {result['threads']} thread{'s' if result['threads'] > 1 else ''}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _distinct(rows: Rows, *names: str) -> list[tuple[Any, ...]]:
    """The combinations of values, in the order in which they first occur."""
    found: list[tuple[Any, ...]] = []
    for row in rows:
        if (values := tuple(row[name] for name in names)) not in found:
            found.append(values)
    return found


def _where(rows: Rows, **values: Any) -> Rows:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def _of(rows: Rows, contender: str) -> dict[str, Any]:
    return next(row for row in rows if row["contender"] == contender)


def _ratio(row: dict[str, Any] | None, name: str = "ratio") -> str:
    return _NONE if row is None or row.get(name) is None else f"{row[name]:.2f}"


def _times_faster(slow: dict[str, Any] | None, fast: dict[str, Any] | None) -> str:
    return _NONE if slow is None or fast is None else f"{slow['ratio'] / fast['ratio']:.1f}"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


if __name__ == "__main__":
    (DOCS / "performance.md").write_text(page())
    print(f"written to {DOCS / 'performance.md'}")
