"""What one call of attention costs in a plain Python loop, as ratios to scaled_dot_product_attention.

    python benchmarks/calls.py [--device cuda] [--busy 16] [--out FILE]

Small calls take as long as Python and the launches do, not as the kernels. "forward" runs without gradients,
"forward+backward" is a training step of the call alone, and "new length" calls with a length that no call
had before, as every step of generation does.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import busy, environment, keep, ratio, spread, times
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outeffhop.ops import attention, explain

BASE = "sdpa"
# name → (B, H, G, Lq, Lk, D), is_causal
SHAPES: dict[str, dict[str, tuple[tuple[int, int, int, int, int, int], bool]]] = {
    "cuda": {
        "small": ((8, 12, 12, 128, 128, 64), False),
        "small causal": ((8, 12, 12, 128, 128, 64), True),
        "one query": ((8, 12, 12, 1, 1024, 64), False),
        "one query, batch 32": ((32, 12, 12, 1, 1024, 64), False),
        "one query, grouped": ((1, 16, 4, 1, 1024, 64), False),
        "one query, grouped, batch 32": ((32, 16, 4, 1, 1024, 64), False),
    },
    "cpu": {
        "small": ((1, 8, 8, 64, 64, 64), False),
        "small causal": ((1, 8, 8, 64, 64, 64), True),
        "one query": ((1, 8, 8, 1, 256, 64), False),
    },
}
NEW_LENGTHS = {"cuda": 64, "cpu": 16}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", nargs="+", help="shapes to measure, by name; default all")
    parser.add_argument("--backends", action="store_true", help="also each backend by name")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep cores busy meanwhile (default 0)")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per contender (default 1)")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/calls-DEVICE.json")
    arguments = parser.parse_args()
    device = arguments.device
    out = arguments.out or Path(__file__).parent / "results" / f"calls-{device}.json"
    result = {"question": __doc__.splitlines()[0], **environment(device), "busy": arguments.busy, "rows": []}
    with busy(arguments.busy):
        for name in arguments.shapes or SHAPES[device]:
            result["rows"] += measure_shape(name, device, arguments)
            keep(out, result)
    print(f"\nwritten to {out}")


def measure_shape(name: str, device: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    shape, causal = SHAPES[device][name]
    query, key, value = tensors(shape, device)
    functions = contenders(query, key, value, causal, arguments.backends)
    grad = torch.randn_like(query)

    def forward(function: Attention) -> Callable[[], object]:
        def work() -> object:
            with torch.no_grad():
                return function(query, key, value)

        return work

    def both(function: Attention) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(query, key, value), (query, key, value), grad)

    passes = {"forward": forward} if shape[3] == 1 else {"forward": forward, "forward+backward": both}
    rows = []
    for kind, make in passes.items():
        samples = times({label: make(function) for label, function in functions.items()}, device, arguments.seconds)
        rows += [_row(name, shape, kind, label, samples) for label in functions]
    if shape[3] == 1:
        samples = new_lengths(functions, shape, device)
        rows += [_row(name, shape, "new length", label, samples) for label in functions]
    for row in rows:
        print(f"{name:29} {row['pass']:17} {row['contender']:24} {row['us']:9.1f} µs {row['ratio']:7.2f}", flush=True)
    return rows


def _row(name: str, shape: tuple[int, ...], kind: str, label: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(shape),
        "pass": kind,
        "contender": label,
        "us": statistics.median(samples[label]) * 1e3,
        "us_quartiles": [t * 1e3 for t in spread(samples[label])],
        "ratio": ratio(samples, label, BASE),
    }


def tensors(shape: tuple[int, int, int, int, int, int], device: str) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, groups, queries, keys, size = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def tensor(heads: int, length: int) -> Tensor:
        # [B, L, H, D] seen as [B, H, L, D], as projections in a transformer leave it
        return torch.randn(batch, length, heads, size, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

    return tensor(heads, queries), tensor(groups, keys), tensor(groups, keys)


def contenders(query: Tensor, key: Tensor, value: Tensor, causal: bool, backends: bool) -> dict[str, Attention]:
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": query.shape[1] != key.shape[1]}
    learned = torch.zeros(query.shape[1], device=query.device, requires_grad=True)
    found: dict[str, Attention] = {
        BASE: lambda q, k, v: scaled_dot_product_attention(q, k, v, **options),
        "ours": lambda q, k, v: attention(q, k, v, **options),  # type: ignore[dict-item, return-value]
        "ours, learned sink": lambda q, k, v: attention(q, k, v, sink=learned, **options),  # type: ignore[dict-item, return-value]
    }
    if backends:
        reasons = explain(query, key, value, **options).reasons
        for name in (n for n, why in reasons.items() if why is None and n != "eager"):
            found[name] = lambda q, k, v, name=name: attention(q, k, v, **options, backend=name)  # type: ignore[misc, assignment]
    return found


def new_lengths(functions: dict[str, Attention], shape: tuple[int, ...], device: str) -> dict[str, list[float]]:
    """Milliseconds of a call whose number of keys no call had before, one entry for every length.

    Each contender has lengths of its own: a plan that one made for a length would serve the others.
    """
    lengths = itertools.count(shape[4] + 1)
    samples: dict[str, list[float]] = {label: [] for label in functions}
    with torch.no_grad():
        for _ in range(NEW_LENGTHS[device]):
            for label, function in functions.items():
                at = (*shape[:4], next(lengths), shape[5])
                query, key, value = tensors(at, device)  # type: ignore[arg-type]
                _wait(device)
                start = time.perf_counter()
                function(query, key, value)
                _wait(device)
                samples[label].append((time.perf_counter() - start) * 1e3)
    return samples


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
