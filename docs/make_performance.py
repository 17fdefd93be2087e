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

See what the method costs you in time and memory. Figures are ratios to vanilla attention, medians over rounds in which
both took turns. For times lower is better, for speeds higher. `benchmarks/results/` has the files."""

Rows = list[dict[str, Any]]
_NONE = "\N{EN DASH}"  # in a cell that was not measured


def page() -> str:
    """The page as text."""
    parts = [INTRODUCTION, *(part() for part in PARTS)]
    return "\n\n".join(part for part in parts if part) + "\n"


def attention() -> str:
    found = []
    for device in ("cuda", "cpu"):
        result = _read(f"attention-{device}")
        if result is None:
            continue
        ours = [row for row in result["rows"] if row["contender"].startswith("ours")]
        times = {(_shape(row["shape"]), row["kind"], row["pass"]): row["ratio"] for row in ours}
        shapes = dict.fromkeys(shape for shape, kind, _ in times if kind in ("full", "causal"))
        columns = [(kind, which) for kind in ("full", "causal") for which in ("forward", "forward+backward")]
        table = [[shape, *(_number(times.get((shape, *column))) for column in columns)] for shape in shapes]
        header = ["B×H×S×D", "full: forward", "with backward", "causal: forward", "with backward"]
        others = "; ".join(
            f"{kind}, {shape}: {time:.2f} forward"
            + (f", {both:.2f} with backward" if (both := times.get((shape, kind, "forward+backward"))) else "")
            for (shape, kind, which), time in times.items()
            if kind not in ("full", "causal") and which == "forward"
        )
        slower = [
            row["ratio"] / times[shape]
            for row in result["rows"]
            if row["contender"] == "eager" and (shape := (_shape(row["shape"]), row["kind"], row["pass"])) in times
        ]
        most = max(float(row.get("memory_ratio") or 0) for row in ours)
        more = f"at most {most:.2f} times the memory; eager takes {min(slower):.1f} to {max(slower):.0f} times as long"
        last = f"\n\n{others[0].upper()}{others[1:]}." if others else ""
        found.append(f"{_on(result, more)}\n\n{_table(header, table)}{last}")
    return _section(
        "Attention",
        "`benchmarks/attention.py`: time over the fastest of PyTorch's own kernels for the same call, by batch, heads, "
        "length and size of a head. The forward pass reads and writes the output once more; the backward pass costs "
        "nothing ([why](../src/outeffhop/ops/README.md)). *Eager* attention writes all scores.",
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
        "device. *New length*: the number of keys was never seen before, as in generation, where cuDNN makes a plan.",
        found,
    )


def training_step() -> str:
    result = _read("training-step-cuda")
    if result is None:
        return ""
    names = {"opt": "OPT-125m", "bert": "BERT-base"}
    models = [model for (model,) in _distinct(result["rows"], "model")]
    table = []
    for (method,) in _distinct(result["rows"], "method"):
        line = [f"`{method}`"]
        for model in models:
            row = next(iter(_where(result["rows"], method=method, model=model)), None)
            line += [_NONE] * 2 if row is None else [_ratio(row, "speed_ratio"), _ratio(row, "memory_ratio")]
        table.append(line)
    header = ["method", *(word for model in models for word in (f"{names[model]}: speed", "memory"))]
    return _section(
        "Training steps",
        "`benchmarks/training_step.py`: forward, backward and AdamW, bf16 autocast, `torch.compile`, no dropout, as "
        "ratios to transformers' own `sdpa`. `vanilla` is softmax through our attention.",
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
        *(
            f"{_on(r).removesuffix(':')}, {_shape((r['batch'], r['length'], r['size']))}, {r['heads']} heads"
            for r in given.values()
        ),
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
            table.append([f"{row['patterns']:,}", *speeds, f"{peak['fused']:.1f}", plain])
        precisions = [f"in {p}" for p in rounded]
        header = ["patterns", "speed over plain", *precisions, "MiB", "plain, MiB"]
        found.append(f"{_on(result)}\n\n{_table(header, table)}")
    return _section(
        "Associative memory",
        "`benchmarks/memory.py`: 4,096 queries of size 64 in float32. *Plain* writes all scores.",
        found,
    )


def observing() -> str:
    found = []
    for name in ("outliers-cuda", "outliers-cpu"):
        result = _read(name)
        if result is not None:
            rows = result["rows"]
            found.append(
                f"- A forward pass takes {_span(rows, 'tensors_ratio')} times as long under `outliers.measure`, with "
                f"heads {_span(rows, 'tensors_and_heads_ratio')} times ({_device(result)}, {len(rows)} models)."
            )
    for name in ("penalty-cuda", "penalty-cpu-1-thread"):
        result = _read(name)
        if result is not None:
            found.append(
                f"- A training step with `OutlierPenalty` takes {_span(result['rows'], 'ratio')} times as long as one "
                f"without ({_device(result)}, {len(result['rows'])} models)."
            )
    for name in ("training-loop-cpu", "training-loop-cuda"):
        result = _read(name)
        if result is not None:
            found.append(
                f"- `outeffhop train` has {result['speed']:.2f} times the speed of a loop written by hand "
                f"({_device(result)}, {result['model']})."
            )
    words = "`benchmarks/outliers.py`, `benchmarks/penalty.py`, `benchmarks/training_loop.py`."
    return _section("Measuring, penalizing, training", words, ["\n".join(found)] if found else [])


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
)


def _read(name: str) -> dict[str, Any] | None:
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else None


def _section(title: str, words: str, parts: Sequence[str]) -> str:
    return "\n\n".join([f"## {title}", words, *parts]) if parts else ""


def _on(result: dict[str, Any], more: str = "") -> str:
    busy = f", beside {result['busy']} processes that keep cores busy" if result.get("busy") else ""
    note = f", before {result['before']}" if "before" in result else ""  # a change that came after
    also = f"; {more}" if more else ""
    return f"{_device(result)}, torch {result['torch'].split('+')[0]}, {result['date']}{note}{busy}{also}:"


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
    return _number(None if row is None else row.get(name))


def _span(rows: Rows, name: str) -> str:
    values = [row[name] for row in rows]
    return f"{min(values):.2f} to {max(values):.2f}"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


if __name__ == "__main__":
    (DOCS / "performance.md").write_text(page())
    print(f"written to {DOCS / 'performance.md'}")
