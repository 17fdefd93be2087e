"""Attention with sliding windows and learned sinks, as gpt-oss has it: its time, and its memory by length.

    python benchmarks/windows.py [--device cuda] [--lengths 4096 16384] [--out FILE]

64 query heads, 8 key heads, size 64, window 128, causal; forward and backward. Contenders: ours; "no sink", the same
kernel by torch.nn.attention.varlen (on a CPU our own with a sink of nothing); "mask", ours with a T × T mask; and
"eager", the plain way that writes all scores, one key head after the other where they do not fit.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment, keep, peak_memory, ratio, spread, times
from torch import Tensor

from outeffhop.ops import attention, attention_varlen, explain

HEADS, GROUPS, SIZE, WINDOW = 64, 8, 64, 128
LENGTHS = {"cuda": [4096, 8192, 16384, 32768], "cpu": [512, 1024, 2048]}
LARGEST_MASK = {"cuda": 2**28, "cpu": 2**22}  # pairs of a query and a key, for those that write them
BASE = "no sink"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", nargs="+", type=int, help="lengths to measure")
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time per contender (default 1)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds in which all take a turn (default 9)")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/windows-DEVICE.json")
    arguments = parser.parse_args()
    device = arguments.device
    out = arguments.out or Path(__file__).parent / "results" / f"windows-{device}.json"
    shape = {"heads": HEADS, "key_heads": GROUPS, "size": SIZE, "window": WINDOW}
    result = {"question": __doc__.splitlines()[0], **environment(device), **shape, "rows": []}
    for length in arguments.lengths or LENGTHS[device]:
        result["rows"] += measure(length, device, arguments.seconds, arguments.rounds)
        keep(out, result)
    print(f"\nwritten to {out}")


def measure(length: int, device: str, seconds: float, rounds: int) -> list[dict[str, Any]]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    # one packed row, [L, H, D]
    query, key, value = (
        torch.randn(length, heads, SIZE, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    sink = torch.zeros(HEADS, device=device, requires_grad=True)
    grad = torch.randn_like(query)
    works = contenders(query, key, value, sink, grad)
    memory = {name: peak_memory(work, device) for name, work in works.items()}
    samples = times(works, device, seconds, rounds)
    rows = [
        {
            "length": length,
            "contender": name,
            "ms": statistics.median(samples[name]),
            "ms_quartiles": spread(samples[name]),
            "ratio": ratio(samples, name, BASE),
            "peak_mib": memory[name],
        }
        for name in works
    ]
    print(f"{length} tokens, forward and backward")
    for row in rows:
        print(
            f"  {row['contender']:28} {row['ms']:10.3f} ms {row['ratio']:8.2f} {row['peak_mib']:10.1f} MiB", flush=True
        )
    return rows


def contenders(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, grad: Tensor
) -> dict[str, Callable[[], object]]:
    length, device = query.shape[0], query.device.type
    rows = [t.transpose(0, 1)[None] for t in (query, key, value)]  # [1, H, L, D]
    causal: dict[str, Any] = {"is_causal": True, "window": (WINDOW - 1, 0), "enable_gqa": True}
    leaves, heads_first = (query, key, value), grad.transpose(0, 1)[None]
    cu = torch.tensor([0, length], dtype=torch.int32, device=device)
    lengths = cu, cu, length, length

    def ours() -> object:
        return torch.autograd.grad(attention(*rows, sink=sink, **causal), (*leaves, sink), heads_first)

    def fixed() -> object:
        return torch.autograd.grad(attention(*rows, sink=0.0, **causal), leaves, heads_first)

    def packed() -> object:
        out = attention_varlen(query, key, value, *lengths, sink=sink, **causal)
        return torch.autograd.grad(out, (*leaves, sink), grad)

    def without() -> object:
        return torch.autograd.grad(plain(query, key, value, lengths, causal), leaves, grad)

    def masked() -> object:
        position = torch.arange(length, device=device)
        ahead = position - position[:, None]
        mask = (ahead <= 0) & (ahead > -WINDOW)
        out = attention(*rows, attn_mask=mask, sink=sink, enable_gqa=True)
        return torch.autograd.grad(out, (*leaves, sink), heads_first)

    def eager() -> object:
        found: list[Any] = []
        share = HEADS // GROUPS
        for group in range(GROUPS):  # one key head and its queries at a time
            own = slice(group * share, (group + 1) * share)
            parts = rows[0][:, own], rows[1][:, group : group + 1], rows[2][:, group : group + 1]
            out = attention(*parts, sink=sink[own], **causal, backend="eager")
            found.append(torch.autograd.grad(out, (*leaves, sink), heads_first[:, own], allow_unused=True))
        return found

    chosen = explain(*rows, sink=sink, **causal).chosen
    works = {BASE: without, f"ours ({chosen}), learned sink": ours, "ours, fixed sink": fixed, "ours, packed": packed}
    if length * length <= LARGEST_MASK[device]:
        works["mask"] = masked
        works["eager"] = eager
    return works


def plain(query: Tensor, key: Tensor, value: Tensor, lengths: tuple[Any, ...], causal: dict[str, Any]) -> Tensor:
    """The window without a sink, by PyTorch's own function where it has one for the device."""
    if not query.is_cuda:
        return attention_varlen(query, key, value, *lengths, sink=-torch.inf, **causal)  # type: ignore[return-value]
    from torch.nn.attention import varlen

    grouped = {"enable_gqa": True} if "enable_gqa" in varlen.varlen_attn.__annotations__ else {}
    return varlen.varlen_attn(query, key, value, *lengths, window_size=(WINDOW - 1, 0), **grouped)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
