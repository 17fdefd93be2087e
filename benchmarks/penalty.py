"""What a training step costs with the outlier penalty in the loss, against the same step without it.

    python benchmarks/penalty.py [--device cuda] [--out FILE]

One step is forward, backward and AdamW: float32 on a CPU; bf16 autocast on a GPU, eager and compiled. Models of 6
layers of width 512 with random weights; the penalty is on the tensors that ``outliers.measure`` watches. Steps with
and without it take turns in one run. Processor time is given next to elapsed time, because other work on the machine
affects it less.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import environment, keep, peak_memory, ratio, times
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, LlamaConfig, OPTConfig, PreTrainedModel

from outeffhop.outliers import OutlierPenalty

# dropout is off: with it, PyTorch chooses other kernels for attention
COMMON: dict[str, Any] = dict(
    hidden_size=512, num_hidden_layers=6, num_attention_heads=8, vocab_size=8192, attn_implementation="sdpa"
)
CONFIGS = {
    "bert": BertConfig(**COMMON, intermediate_size=2048, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "opt": OPTConfig(**COMMON, ffn_dim=2048, word_embed_proj_dim=512, dropout=0.0),
    "llama": LlamaConfig(**COMMON, intermediate_size=1376),
}
# sequences in a batch, tokens in a sequence
SHAPES = {"cpu": (8, 256), "cuda": (32, 512)}
CONTENDERS = {"without": 0.0, "with": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--models", nargs="+", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=12, help="turns each contender takes (default 12)")
    parser.add_argument("--seconds", type=float, default=6.0, help="measuring time per contender (default 6)")
    parser.add_argument("--batch", type=int, help="sequences in a batch; default 8 on a CPU, else 32")
    parser.add_argument("--threads", type=int, help="CPU threads; default torch's")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/penalty-DEVICE.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = arguments.device
    out = arguments.out or Path(__file__).parent / "results" / f"penalty-{device}.json"
    batch, length = SHAPES[device]
    batch = arguments.batch or batch
    result = {
        "question": __doc__.splitlines()[0],
        **environment(device),
        "transformers": transformers.__version__,
        "autocast": "bfloat16" if device == "cuda" else None,
        "batch": batch,
        "length": length,
        "rows": [],
    }
    print(f"{'model':6} {'mode':9} {'tensors':>7} {'ms without':>11} {'with':>6} {'processor':>10} {'memory':>7}")
    for name in arguments.models:
        for compiled in (False, True) if device == "cuda" else (False,):
            row = measure(name, compiled, batch, length, arguments)
            result["rows"].append(row)
            print(
                f"{name:6} {row['mode']:9} {row['tensors']:7} {row['ms_without']:11.1f} {row['ratio']:6.3f} "
                f"{row['processor_ratio']:10.3f} {row['memory_ratio']:7.3f}",
                flush=True,
            )
            keep(out, result)
    print(f"\nwritten to {out}")


def measure(name: str, compiled: bool, batch: int, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    steps: dict[str, Callable[[], object]] = {}
    memory, spent = {}, {}
    for contender, weight in CONTENDERS.items():
        torch.manual_seed(0)
        auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
        model = auto.from_config(CONFIGS[name]).to(device).train()
        penalty = OutlierPenalty(model, weight) if weight else None
        work = step(model, compiled, batch, length, device)
        for _ in range(3):  # compiles, and lets the optimizer make its state
            work()
        memory[contender] = peak_memory(work, device)
        spent[contender] = []
        steps[contender] = counted(work, spent[contender])
        tensors = len(penalty._tails) if penalty else 0
    samples = times(steps, device, arguments.seconds, arguments.rounds)
    row = {
        "model": name,
        "mode": "compiled" if compiled else "eager",
        "tensors": tensors,
        "ms_without": statistics.median(samples["without"]),
        "ms_with": statistics.median(samples["with"]),
        "ratio": ratio(samples, "with", "without"),
        "processor_ratio": statistics.median(spent["with"]) / statistics.median(spent["without"]),
        "memory_ratio": memory["with"] / memory["without"],
    }
    steps.clear()
    gc.collect()
    torch.compiler.reset()
    return row


def step(model: PreTrainedModel, compiled: bool, batch: int, length: int, device: str) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    forward = torch.compile(model) if compiled else model
    ids = torch.randint(5, 8192, (batch, length), device=device)
    # a cache is of no use in training, and breaks OPT's graph at every layer
    options = {} if model.config.model_type == "bert" else {"use_cache": False}

    def work() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = forward(input_ids=ids, labels=ids, **options).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return work


def counted(work: Callable[[], None], spent: list[float]) -> Callable[[], object]:
    def both() -> None:
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)

    return both


if __name__ == "__main__":
    main()
