"""How fast models generate with each method, against transformers' own sdpa: tokens per second.

    python benchmarks/generation.py [--device cuda] [--modes eager-dynamic ...] [--busy 16] [--out FILE]

Random weights and prompts; greedy, and always the same number of new tokens. "eager-dynamic" is what ``generate`` does
by default; "eager-static" has a static cache; "compiled-static" as well, with the decoding step compiled, as
``generate`` compiles it on a GPU. All methods take turns in one run, and a ratio is the median over rounds.
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
from measure import busy, environment, keep, ratio, spread, times
from torch import nn
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, OPTConfig, PreTrainedConfig

from outeffhop.models import from_config

BASE = "sdpa"
METHODS = ("outeffhop", "outeffhop(sink=learned)", "gated-outeffhop")
MODES = ("eager-dynamic", "eager-static", "compiled-static")


def config(model: str, size: str) -> PreTrainedConfig:
    tiny = size == "tiny"
    if model == "opt":  # OPT-125m's own sizes
        sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
        return OPTConfig(**sizes, word_embed_proj_dim=32) if tiny else OPTConfig()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100}
    if not tiny:
        sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 32000}
    heads = {"num_attention_heads": 8 if tiny else 16, "num_key_value_heads": 2 if tiny else 4}
    return LlamaConfig(**sizes, **heads, max_position_embeddings=2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", choices=["paper", "tiny"], help="of the models; default tiny on a CPU, else paper")
    parser.add_argument("--models", nargs="+", default=["opt", "llama"], choices=["opt", "llama"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help=f"methods to measure besides {BASE}")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt (default 128)")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate (default 64)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which all methods take a turn (default 7)")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep cores busy meanwhile (default 0)")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/generation-DEVICE.json")
    arguments = parser.parse_args()
    device = arguments.device
    arguments.size = arguments.size or ("tiny" if device == "cpu" else "paper")
    torch._dynamo.config.recompile_limit = 64  # the methods share a model's code
    out = arguments.out or Path(__file__).parent / "results" / f"generation-{device}.json"
    result = {
        "question": __doc__.splitlines()[0],
        **environment(device),
        "transformers": transformers.__version__,
        "size": arguments.size,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        "busy": arguments.busy,
        "rows": [],
    }
    with busy(arguments.busy):
        for model in arguments.models:
            models = {name: build(model, name, arguments.size, device) for name in (BASE, *arguments.methods)}
            for mode in arguments.modes:
                for batch in arguments.batches:
                    result["rows"] += measure(model, models, mode, batch, arguments)
                    keep(out, result)
            del models
            gc.collect()
    print(f"\nwritten to {out}")


def build(model: str, name: str, size: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    settings = config(model, size)
    if name == BASE:
        net = AutoModelForCausalLM.from_config(settings, attn_implementation=BASE)
    else:
        net = from_config(AutoModelForCausalLM, settings, name)
    net = net.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    net.generation_config.pad_token_id = 1
    return net


def measure(
    model: str, models: dict[str, Any], mode: str, batch: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    device, new = arguments.device, arguments.new
    generator = torch.Generator().manual_seed(0)
    vocabulary = next(iter(models.values())).config.vocab_size
    prompt = torch.randint(5, vocabulary, (batch, arguments.prompt), generator=generator).to(device)
    settings: dict[str, Any] = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False}
    if mode.endswith("static"):
        settings |= {"cache_implementation": "static", "disable_compile": mode.startswith("eager")}
    if mode.startswith("compiled"):
        torch.compiler.reset()
        settings["compile_config"] = CompileConfig(mode="reduce-overhead" if device == "cuda" else "default")
        if device == "cpu":  # where generate compiles only if told to
            settings["compile_config"]._compile_all_devices = True

    def work(net: Any) -> Callable[[], object]:
        return lambda: net.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

    works = {name: work(net) for name, net in models.items()}
    for name, once in works.items():
        for _ in range(3 if mode.startswith("compiled") else 1):
            once()
        print(f"  {model} {mode} batch {batch} {name}: ready", flush=True)
    samples = times(works, device, seconds=0.0, rounds=arguments.rounds)
    rows = []
    for name in works:
        seconds = statistics.median(samples[name]) / 1e3
        rows.append(
            {
                "model": model,
                "mode": mode,
                "batch": batch,
                "prompt": arguments.prompt,
                "new": new,
                "method": name,
                "tokens_per_second": batch * new / seconds,
                "ms_per_token": seconds / new * 1e3,
                "ms_per_token_quartiles": [t / new for t in spread(samples[name])],
                "speed_ratio": 1 / ratio(samples, name, BASE),
            }
        )
    print(f"{model} {arguments.size}, {mode}, batch {batch}")
    for row in rows:
        print(f"  {row['method']:26} {row['ms_per_token']:9.3f} ms/token {row['speed_ratio']:7.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
