"""What measuring outliers costs: the whole measurement against the plain forward, side by side in one run.

    python benchmarks/outliers.py [--device cuda] [--out FILE]

``plain`` runs the model as it was built (sdpa, or the method's fused kernel), ``tensors`` measures only the paper's
tensors, ``tensors and heads`` does all that ``outliers.measure`` does. Weights are random. Processor time is given
next to elapsed time, because other work on the machine affects it less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment, keep, ratio, times
from transformers import PreTrainedModel

from outeffhop import outliers
from outeffhop.models import presets

# model, size, method, batch, length
CASES = (
    ("bert", "paper", "vanilla", 8, 128),
    ("opt", "small", "outeffhop", 2, 512),
    ("bert", "paper", "outeffhop", 2, 512),
    ("vit", "paper", "vanilla", 4, 197),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per contender (default 6)")
    parser.add_argument("--rounds", type=int, default=12, help="turns each contender takes (default 12)")
    parser.add_argument("--threads", type=int, help="CPU threads; default torch's")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/outliers-DEVICE.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    out = arguments.out or Path(__file__).parent / "results" / f"outliers-{arguments.device}.json"
    rows: list[dict[str, Any]] = []
    print(f"{'model':24} {'batch':>9} {'plain ms':>9} {'tensors':>8} {'and heads':>10}   of processor time")
    for case in CASES:
        row = measure_case(*case, arguments.device, arguments.seconds, arguments.rounds)
        rows.append(row)
        print(
            f"{row['model']:24} {row['batch']:>4}×{row['length']:<4} {row['plain_ms']:9.1f} "
            f"{row['tensors_ratio']:8.3f} {row['tensors_and_heads_ratio']:10.3f}   "
            f"{row['tensors_cpu_ratio']:.3f} {row['tensors_and_heads_cpu_ratio']:.3f}",
            flush=True,
        )
        keep(out, {"question": __doc__.splitlines()[0], **environment(arguments.device), "rows": rows})
    print(f"\nwritten to {out}")


def measure_case(
    name: str, size: str, method: str, batch: int, length: int, device: str, seconds: float, rounds: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = presets.build(name, size, method).to(device).eval()
    inputs = make_inputs(model, batch, length, device)
    contenders: dict[str, Callable[[], object]] = {
        "plain": lambda: forward(model, inputs),
        "tensors": lambda: outliers.measure(model, [inputs], attention=False),
        "tensors and heads": lambda: outliers.measure(model, [inputs]),
    }
    spent: dict[str, list[float]] = {kind: [] for kind in contenders}
    samples = times({kind: counted(work, spent[kind]) for kind, work in contenders.items()}, device, seconds, rounds)
    cpu = {kind: statistics.median(found[2:]) for kind, found in spent.items()}  # the first two warm up
    return {
        "model": f"{name} {size} {method}",
        "batch": batch,
        "length": length,
        "plain_ms": statistics.median(samples["plain"]),
        "tensors_ratio": ratio(samples, "tensors", "plain"),
        "tensors_and_heads_ratio": ratio(samples, "tensors and heads", "plain"),
        "tensors_cpu_ratio": cpu["tensors"] / cpu["plain"],
        "tensors_and_heads_cpu_ratio": cpu["tensors and heads"] / cpu["plain"],
    }


def counted(work: Callable[[], object], spent: list[float]) -> Callable[[], object]:
    def both() -> object:
        start = time.process_time()
        out = work()
        spent.append(time.process_time() - start)
        return out

    return both


def make_inputs(model: PreTrainedModel, batch: int, length: int, device: str) -> dict[str, torch.Tensor]:
    config: Any = model.config
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(batch, 3, config.image_size, config.image_size, device=device)}
    return {"input_ids": torch.randint(3, config.vocab_size, (batch, length), device=device)}


@torch.no_grad()
def forward(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> object:
    return model(**inputs)


if __name__ == "__main__":
    main()
