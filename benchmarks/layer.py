"""What a Hopfield layer's training step costs, as ratios measured side by side in one run.

    python benchmarks/layer.py [--device cuda] [--out FILE]

Against torch.nn.MultiheadAttention (forward and backward, self-attention, no weights asked for), for
several methods; and several updates of the query against one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment, keep, ratio, times
from torch import nn

from outeffhop.nn import OutEffHop

BASE = "nn.MultiheadAttention"
METHODS = ("vanilla", "outeffhop", "outeffhop(sink=learned)", "gated-outeffhop", "clipped-outeffhop")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=3.0, help="measuring time per contender (default 3)")
    parser.add_argument("--rounds", type=int, default=24, help="rounds in which all take a turn (default 24)")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/layer-DEVICE.json")
    arguments = parser.parse_args()
    device = arguments.device
    batch, length, size, heads = (4, 512, 512, 8) if device == "cpu" else (32, 512, 768, 12)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    x = torch.randn(batch, length, size, device=device, dtype=dtype, requires_grad=True)
    kept: dict[str, Any] = {"batch_first": True, "device": device, "dtype": dtype}
    layers: dict[str, nn.Module] = {BASE: nn.MultiheadAttention(size, heads, **kept)}
    layers |= {method: OutEffHop(size, heads, method=method, **kept) for method in METHODS}
    layers |= {f"outeffhop, {n} updates": OutEffHop(size, heads, steps=n, **kept) for n in (2, 4)}
    samples = times(
        {name: step(layer, x) for name, layer in layers.items()}, device, arguments.seconds, arguments.rounds
    )
    rows = [
        {
            "layer": name,
            "ms": statistics.median(samples[name]),
            "ratio": ratio(samples, name, BASE),
            "ratio_to_one_update": ratio(samples, name, "outeffhop"),
        }
        for name in layers
    ]
    print(f"forward and backward, [{batch}, {length}, {size}], {heads} heads, {dtype}")
    print(f"  {'layer':26} {'ms':>9} {'to MHA':>8} {'to one update':>14}")
    for row in rows:
        print(f"  {row['layer']:26} {row['ms']:9.3f} {row['ratio']:8.2f} {row['ratio_to_one_update']:14.2f}")
    out = arguments.out or Path(__file__).parent / "results" / f"layer-{device}.json"
    shape = {"batch": batch, "length": length, "size": size, "heads": heads, "dtype": str(dtype)}
    keep(out, {"question": __doc__.splitlines()[0], **environment(device), **shape, "rows": rows})
    print(f"\nwritten to {out}")


def step(layer: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    parameters = [x, *layer.parameters()]

    def work() -> object:
        out, _ = layer(x, x, x, need_weights=False)
        return torch.autograd.grad(out.sum(), parameters)

    return work


if __name__ == "__main__":
    main()
