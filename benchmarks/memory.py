"""What a large associative memory costs: queries per second and memory, fused against plain.

    python benchmarks/memory.py [--device cuda] [--dtype bfloat16] [--quick] [--out FILE]

One OutEffHop update of 4,096 queries of size 64 over 1,000 to 1,000,000 patterns, three ways in one run:
"fused" is HopfieldMemory.retrieve; "plain" writes the matrix of scores and takes softmax_n of it; "plain dense"
does so with torch.softmax, which has no no-op pattern: the least that writing the matrix can cost. On a GPU in float32
also "tf32" and "bfloat16", the precisions of HopfieldMemory.retrieve. The MiB are what one update takes at its peak
beyond patterns and queries, including its result.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from measure import Work, environment, keep, peak_memory, times

from outeffhop.functional import softmax_n
from outeffhop.memory import HopfieldMemory, updates
from outeffhop.ops import explain

SIZE = 64
BETA = 1 / math.sqrt(SIZE)
LARGEST_MATRIX = 4e9  # bytes of scores beyond which the plain ways are not tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64", "bfloat16", "float16"])
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/memory-DEVICE.json")
    arguments = parser.parse_args()
    device, dtype = arguments.device, getattr(torch, arguments.dtype)
    queries = 256 if arguments.quick else 4096
    about = environment(device)
    print(
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, {arguments.dtype}, {queries} queries"
    )
    print(
        f"{'':>9} | {'fused':^23} | {'plain':^23} | {'fused is':^21} | {'fused takes':^11}\n"
        f"{'patterns':>9} | {'queries/s':>12} {'MiB':>10} | {'queries/s':>12} {'MiB':>10} | "
        f"{'× plain':>9} {'× dense':>11} | {'of its MiB':>11}"
    )
    rows = []
    with torch.no_grad():
        for patterns in (1_000, 10_000) if arguments.quick else (1_000, 10_000, 100_000, 1_000_000):
            rows.append(measure_case(patterns, queries, device, dtype))
            print(line(rows[-1]))
    out = arguments.out
    if out is None and not arguments.quick:
        suffix = "" if dtype == torch.float32 else f"-{arguments.dtype}"
        out = Path(__file__).parent / "results" / f"memory-{device}{suffix}.json"
    if out is not None:
        settings = {"dtype": arguments.dtype, "queries": queries, "size": SIZE, "beta": BETA}
        keep(out, {"question": __doc__.splitlines()[0], **about, **settings, "rows": rows})
        print(f"\nwritten to {out}")


def ways(patterns: int, queries: int, device: str, dtype: torch.dtype) -> dict[str, Work]:
    torch.manual_seed(0)
    memory = HopfieldMemory(torch.randn(patterns, SIZE, dtype=dtype, device=device), BETA)
    x = torch.randn(queries, SIZE, dtype=dtype, device=device)
    stored = memory.patterns
    found: dict[str, Work] = {"fused": lambda: memory.retrieve(x).state}
    if device == "cuda" and dtype == torch.float32:
        found["tf32"] = lambda: memory.retrieve(x, precision="tf32").state
        found["bfloat16"] = lambda: memory.retrieve(x, precision="bfloat16").state
    if queries * patterns * dtype.itemsize <= LARGEST_MATRIX:
        found["plain"] = lambda: softmax_n(BETA * (x @ stored.T)) @ stored
        found["plain dense"] = lambda: torch.softmax(BETA * (x @ stored.T), -1) @ stored
    return found


def measure_case(patterns: int, queries: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    contenders = ways(patterns, queries, device, dtype)
    matrix = queries * patterns * dtype.itemsize
    rounds = 10 if matrix < 1e9 else 3  # larger ones take seconds per call
    samples = times(contenders, device, rounds=rounds)
    milliseconds = {name: statistics.median(s) for name, s in samples.items()}
    row: dict[str, Any] = {
        "patterns": patterns,
        "backend": backend(device, dtype),
        "way": updates.way(torch.empty(queries, SIZE, dtype=dtype, device=device), torch.empty(patterns, 0)),
        "milliseconds": milliseconds,
        "queries_per_second": {name: 1e3 * queries / t for name, t in milliseconds.items()},
        "peak_mib": {name: peak(name, patterns, queries, device, dtype, work) for name, work in contenders.items()},
    }
    if "plain" not in contenders:
        row["skipped"] = f"plain and plain dense: the matrix of scores alone is {matrix / 1e9:.1f} GB"
    return row


def backend(device: str, dtype: torch.dtype) -> str:
    x = torch.zeros(8, SIZE, dtype=dtype, device=device)
    return explain(x, x, x, scale=BETA, sink=0.0, return_lse=True).chosen


def peak(way: str, patterns: int, queries: int, device: str, dtype: torch.dtype, work: Work) -> float:
    """The MiB of one update; on the CPU measured in a separate process.

    glibc keeps freed blocks for the next call, whose memory then seems to cost nothing; with the threshold set,
    each block of 64 KiB or more comes from the system and goes back to it.
    """
    if device == "cuda":
        return peak_memory(work, device)
    code = (
        "import torch, memory, measure\n"
        "with torch.no_grad():\n"
        f"    work = memory.ways({patterns}, {queries}, 'cpu', {dtype})[{way!r}]\n"
        "    print(measure.peak_memory(work, 'cpu'))\n"
    )
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {way!r} failed:\n{done.stderr}")
    return float(done.stdout)


def line(row: dict[str, Any]) -> str:
    speed, peak = row["queries_per_second"], row["peak_mib"]
    others = " ".join(
        f"{name} {speed[name] / speed['fused']:.2f} × fused" for name in ("tf32", "bfloat16") if name in speed
    )
    text = f"{row['patterns']:>9,} | {speed['fused']:>12,.0f} {peak['fused']:>10,.1f} | "
    if "skipped" in row:
        return f"{text}{row['skipped']} {others}"
    text += f"{speed['plain']:>12,.0f} {peak['plain']:>10,.1f} | "
    text += f"{speed['fused'] / speed['plain']:>9.2f} {speed['fused'] / speed['plain dense']:>11.2f} | "
    return f"{text}{peak['fused'] / peak['plain']:>11.4f} {others}"


if __name__ == "__main__":
    main()
