"""What a training step of OPT-125m and BERT-base costs with each method, against transformers' own sdpa.

    python benchmarks/training_step.py [--device cuda] [--size paper] [--out FILE]

One step is forward, backward and AdamW; bf16 autocast and torch.compile on a GPU. All methods of a
model are measured side by side in one run; speeds are tokens per second as a ratio to sdpa, memory is
the peak of one step, weights and optimizer included.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import environment, keep, ratio, times

from outeffhop.models import presets

BASE = "sdpa"
METHODS = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")
# model → tokens in a sequence, sequences in a batch: the paper's length; its batch over several GPUs, for BERT whole
SHAPES = {"opt": (512, 32), "bert": (128, 256)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", default="paper", choices=presets.SIZES)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"methods to measure besides {BASE}")
    parser.add_argument("--batch", type=int, help="sequences in a batch; default depends on the model")
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per contender (default 6)")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/training-step-DEVICE.json")
    arguments = parser.parse_args()
    device = arguments.device
    # the contenders share a model's code, which Dynamo compiles again for each
    torch._dynamo.config.recompile_limit = 64
    out = arguments.out or Path(__file__).parent / "results" / f"training-step-{device}.json"
    result = {
        "question": __doc__.splitlines()[0],
        **environment(device),
        "transformers": transformers.__version__,
        "size": arguments.size,
        "compiled": not arguments.no_compile,
        "autocast": "bfloat16" if device == "cuda" else None,
        "rows": [],
    }
    for model in arguments.models:
        length = min(SHAPES[model][0], presets.config(model, arguments.size).max_position_embeddings)
        batch = arguments.batch or SHAPES[model][1]
        result["rows"] += measure(model, length, batch, arguments)
        keep(out, result)
    print(f"\nwritten to {out}")


def measure(model: str, length: int, batch: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = arguments.device
    steps, memory = {}, {}
    for name in (BASE, *arguments.methods):
        steps[name] = step(model, name, length, batch, arguments)
        for _ in range(3):  # compiles, and lets the optimizer make its state
            steps[name]()
        memory[name] = _peak(steps[name], device)
        print(f"  {model} {name}: ready", flush=True)
    samples = times(steps, device, arguments.seconds)
    rows = [
        {
            "model": model,
            "method": name,
            "length": length,
            "batch": batch,
            "ms": statistics.median(samples[name]),
            "tokens_per_second": batch * length / statistics.median(samples[name]) * 1e3,
            "speed_ratio": 1 / ratio(samples, name, BASE),
            "peak_mib": memory[name],
            "memory_ratio": memory[name] / memory[BASE] if memory[BASE] else None,
        }
        for name in steps
    ]
    print(f"{model} {arguments.size}, {batch} × {length} tokens")
    print(f"  {'method':20} {'ms':>9} {'tokens/s':>10} {'speed':>7} {'MiB':>8} {'memory':>7}")
    for row in rows:
        shares = f"{row['speed_ratio']:7.3f} {row['peak_mib']:8.0f} {row['memory_ratio'] or float('nan'):7.3f}"
        print(f"  {row['method']:20} {row['ms']:9.2f} {row['tokens_per_second']:10.0f} {shares}")
    steps.clear()
    gc.collect()
    torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()
    return rows


def step(model: str, name: str, length: int, batch: int, arguments: argparse.Namespace) -> Callable[[], None]:
    device = arguments.device
    torch.manual_seed(0)
    # dropout is off: with it, PyTorch chooses other kernels, for sdpa and for ours
    off = (
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        if model in ("bert", "vit")
        else {"dropout": 0.0}
    )
    if name == BASE:
        settings = presets.config(model, arguments.size, **off)
        net = presets.MODELS[model].auto_class.from_config(settings, attn_implementation=BASE)
    else:
        net = presets.build(model, arguments.size, presets.paper_method(model, name), **off)
    net = net.to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    forward = net if arguments.no_compile else torch.compile(net)
    ids = torch.randint(5, net.config.vocab_size, (batch, length), device=device)
    labels = ids.clone()
    # a cache is of no use in training, and breaks OPT's graph at every layer
    options = {"use_cache": False} if model == "opt" else {}
    if model == "bert":
        labels[torch.rand(labels.shape, device=device) > 0.15] = -100

    def work() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(input_ids=ids, labels=labels, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    work.state = sum(p.numel() * p.element_size() for p in net.parameters()) * 3 / 2**20  # type: ignore[attr-defined]
    return work


def _peak(work: Any, device: str) -> float:
    """MiB of one step at its peak: what it takes beyond what was in use, plus its weights and AdamW's two moments."""
    if device != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20 + work.state


if __name__ == "__main__":
    main()
