"""What attention with a sink costs, as ratios to the fastest vanilla attention in the same run.

    python benchmarks/attention.py [--device cuda] [--quick] [--out FILE]

For each shape: PyTorch's scaled_dot_product_attention in each of its kernels (the fastest is 1.00),
ours ("auto", and each fused backend by name), the zero key/value way ("padded") and the eager way.
On a GPU, times are of CUDA graph replays, the device's own; "call" columns give what a loop of plain
calls takes, with Python's share.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment, fastest, graphs, keep, peak_memory, ratio, times
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from outeffhop.ops import attention, explain
from outeffhop.ops.dispatch import BACKENDS

# (B, H, S, D); with "decode", one query over S keys
GPU_SHAPES = [(64, 12, 128, 64), (32, 12, 512, 64), (8, 16, 2048, 64), (4, 16, 4096, 128), (1, 16, 16384, 128)]
CPU_SHAPES = [(16, 12, 128, 64), (4, 12, 512, 64), (1, 8, 2048, 64), (1, 2, 4096, 128)]
KINDS = ["full", "causal"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="only two small shapes; takes half a minute")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per contender (default 1)")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/attention-DEVICE.json")
    arguments = parser.parse_args()
    device = arguments.device
    out = arguments.out
    if out is None and not arguments.quick:
        out = Path(__file__).parent / "results" / f"attention-{device}.json"
    rows = []
    for shape, kind in cases(device, arguments.quick):
        rows += measure_case(shape, kind, device, arguments.seconds)
        show([row for row in rows if row["shape"] == list(shape) and row["kind"] == kind])
        if out is not None:  # after every case, so that an interrupted run keeps its results
            keep(out, {"question": __doc__.splitlines()[0], **environment(device), "rows": rows})
    if out is not None:
        print(f"\nwritten to {out}")


def cases(device: str, quick: bool) -> list[tuple[tuple[int, int, int, int], str]]:
    if quick:
        return [((8, 8, 256, 64), "causal"), ((1, 8, 1024, 64), "causal")]
    shapes = GPU_SHAPES if device == "cuda" else CPU_SHAPES
    found = [(shape, kind) for shape in shapes for kind in KINDS]
    return [*found, (shapes[0], "padded batch"), ((shapes[0][0] // 2, 12, 2048, 64), "decode")]


def measure_case(shape: tuple[int, int, int, int], kind: str, device: str, seconds: float) -> list[dict[str, Any]]:
    """A row per pass (forward, forward+backward) and contender."""
    batch, heads, length, size = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    queries = 1 if kind == "decode" else length

    def tensor(rows: int) -> Tensor:
        # [B, L, H, D] seen as [B, H, L, D], as projections in a transformer leave it
        t = torch.randn(batch, rows, heads, size, device=device, generator=generator)
        return t.to(dtype).transpose(1, 2).requires_grad_()

    query, key, value = tensor(queries), tensor(length), tensor(length)
    extra: dict[str, Any] = {"is_causal": True} if kind == "causal" else {}
    if kind == "padded batch":  # half of the samples are padded, by a mask as transformers makes it
        lengths = torch.full((batch,), length, device=device)
        lengths[::2] = torch.randint(length // 2, length, (len(lengths[::2]),), device=device, generator=generator)
        mask = torch.arange(length, device=device) < lengths[:, None]
        extra["attn_mask"] = mask[:, None, None, :].expand(batch, 1, length, length).contiguous()
    attentions = contenders(query, key, value, extra)
    grad = torch.randn(query.shape, device=device, generator=generator).to(dtype)

    def forward(function: Attention) -> Callable[[], object]:
        def work() -> object:
            with torch.no_grad():
                return function(query, key, value)

        return work

    def both(function: Attention) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(query, key, value), (query, key, value), grad)

    rows = []
    for name, make in {"forward": forward, "forward+backward": both}.items():
        if kind == "decode" and name != "forward":
            continue
        works = {label: make(function) for label, function in attentions.items()}
        called = timed = times(works, device, seconds)
        if device == "cuda":
            timed = times(graphs(works, together := 4), device, seconds)
            timed = {label: [t / together for t in samples] for label, samples in timed.items()}
        best, best_called = fastest(timed, "sdpa"), fastest(called, "sdpa")
        memory = {label: peak_memory(work, device) for label, work in works.items()}
        rows += [
            {
                "shape": list(shape),
                "kind": kind,
                "pass": name,
                "contender": label,
                "ms": statistics.median(timed[label]),
                "ratio": ratio(timed, label, best),
                "call_ms": statistics.median(called[label]),
                "call_ratio": ratio(called, label, best_called),
                "peak_mib": memory[label],
                "memory_ratio": memory[label] / memory[best] if memory[best] > 0.5 else None,
            }
            for label in works
        ]
    return rows


def contenders(query: Tensor, key: Tensor, value: Tensor, extra: dict[str, Any]) -> dict[str, Attention]:
    explanation = explain(query, key, value, **extra)
    found: dict[str, Attention] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):

        def vanilla(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(q, k, v, **extra)

        try:
            vanilla(query, key, value)
        except RuntimeError:  # this kernel cannot serve the call
            continue
        found[f"sdpa {backend.name.split('_')[0].lower()}"] = vanilla
    found["sdpa"] = lambda q, k, v: scaled_dot_product_attention(q, k, v, **extra)
    for name in ["auto", *BACKENDS]:
        if name == explanation.chosen or (name != "auto" and explanation.reasons[name] is not None):
            continue
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        if name == "eager" and scores > 2**31:
            continue  # tens of GiB of scores
        label = f"ours ({explanation.chosen})" if name == "auto" else name
        found[label] = lambda q, k, v, name=name: attention(q, k, v, **extra, backend=name)  # type: ignore[misc]
    return found


def show(rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"\n{tuple(first['shape'])} {first['kind']}")
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    print(f"  {'':18}" + "".join(f"{p + ':':>19} {'ratio':>6} {'call':>6} {'memory':>7}" for p in passes))
    for label in dict.fromkeys(row["contender"] for row in rows):
        line = f"  {label:18}"
        for row in (r for r in rows if r["contender"] == label):
            memory = f"{row['memory_ratio']:7.2f}" if row["memory_ratio"] is not None else f"{'-':>7}"
            line += f"{row['ms']:16.3f} ms {row['ratio']:6.2f} {row['call_ratio']:6.2f} {memory}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
