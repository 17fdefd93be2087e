"""What ``outeffhop train`` costs beyond a hand-written PyTorch loop for the same model, batches and optimizer.

    python benchmarks/training_loop.py [--device cuda] [--compile] [--out FILE]

Tiny OPT in fp32 on a CPU, small OPT in bf16 autocast on a GPU. The two take turns, round after round, each
starting from the same weights. The steps between two lines of metrics are timed, except those before the first
line. Both see the same batches in the same order, and their losses are compared as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import pydoc_data.topics
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from measure import environment, keep
from torch.utils.data import DataLoader

from outeffhop.lab.data import Prepared
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, prepare_data, train
from outeffhop.lab.training.optimization import make_optimizer, make_schedule
from outeffhop.lab.training.recipes import resolve
from outeffhop.lab.training.starting_model import build
from outeffhop.lab.training.train_loader import EpochSampler

# device → preset, precision, copies of the text (a small model has more in a batch), steps between two lines, lines
SETTINGS = {"cpu": ("tiny", "fp32", 1, 5, 6), "cuda": ("small", "bf16", 30, 20, 6)}
ASKED = {"cpu": 0.95, "cuda": 0.9}

Windows = tuple[list[float], list[float]]  # seconds of a step and mean loss between two lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=list(SETTINGS))
    parser.add_argument("--preset", help="tiny, small or paper; default depends on the device")
    parser.add_argument("--method", default="outeffhop")
    parser.add_argument("--compile", action="store_true", help="compile both with torch.compile")
    parser.add_argument("--rounds", type=int, default=8, help="turns that each takes (default 8)")
    parser.add_argument("--threads", type=int, help="PyTorch's threads on a CPU; default its own choice")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/results/training-loop-DEVICE.json")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = arguments.device
    with tempfile.TemporaryDirectory() as folder:
        config = _config(arguments, Path(folder))
        prepared = prepare_data(config)
        rows = []
        for turn in range(arguments.rounds):
            found: dict[str, Windows] = {}
            for name in sorted(("outeffhop train", "by hand"), reverse=bool(turn % 2)):
                torch.compiler.reset()
                found[name] = by_hand(config, prepared, device) if name == "by hand" else ours(config, turn)
            rows.append(_compared(found))
            print(
                "  {hand_ms:8.2f} ms by hand {ours_ms:8.2f} ms ours, speed {speed:.3f}".format(**rows[-1]), flush=True
            )
    speed = statistics.median(row["speed"] for row in rows)
    fastest = min(row["hand_fastest_ms"] for row in rows) / min(row["ours_fastest_ms"] for row in rows)
    out = arguments.out or Path(__file__).parent / "results" / f"training-loop-{device}.json"
    result = {
        "question": __doc__.splitlines()[0],
        **environment(device),
        "transformers": transformers.__version__,
        "model": f"opt {config.preset} {config.method}",
        "precision": config.train.precision,
        "compiled": arguments.compile,
        "tokens_per_step": config.train.batch_size * config.samples.length,
        "asked": ASKED[device],
        "speed": speed,  # the median over rounds of our steps per second to those of the loop by hand
        "speed_of_fastest": fastest,  # of the fastest steps of either in all rounds, which other work disturbs least
        "largest_difference_of_losses": max(row["difference"] for row in rows),
        "rounds": rows,
    }
    keep(out, result)
    print(f"speed to the loop by hand: median {speed:.3f}, of the fastest steps {fastest:.3f}; written to {out}")


def _config(arguments: argparse.Namespace, folder: Path) -> RunConfig:
    preset, precision, copies, every, lines = SETTINGS[arguments.device]
    text = folder / "text.txt"
    text.write_text("\n\n".join(pydoc_data.topics.topics.values()) * copies)
    steps = every * lines
    # neither evaluates, saves or measures before the last step, whose time is not used
    rare = dict(max_steps=steps, log_steps=every, eval_steps=steps, save_steps=steps, outlier_steps=0, eval_batches=1)
    return resolve(
        RunConfig(
            preset=arguments.preset or preset,
            method=arguments.method,
            data=str(text),
            out=str(folder / "run"),
            train=TrainConfig(precision=precision, compile=arguments.compile, device=arguments.device, **rare),
            samples=DataConfig(cache_dir=str(folder / "cache")),
        )
    )


def ours(config: RunConfig, turn: int) -> Windows:
    out = f"{config.out}-{turn}"
    train(dataclasses.replace(config, out=out), quiet=True)
    lines = [line for line in RunFolder(out).metrics() if "tokens_per_second" in line]
    tokens = config.train.batch_size * config.samples.length
    return [tokens / line["tokens_per_second"] for line in lines], [line["loss"] for line in lines]


def by_hand(config: RunConfig, prepared: Prepared, device: str) -> Windows:
    """The loop one would write for this model only."""
    settings = config.train
    transformers.set_seed(settings.seed)
    net: Any = build(config, prepared.changes).to(device).train()
    net.config.use_cache = False
    optimizer = make_optimizer(net, settings, decay_norms=True)
    sampler = EpochSampler(len(prepared.train), settings.batch_size, settings.seed)
    loader = DataLoader(
        prepared.train,
        settings.batch_size,
        sampler=sampler,
        collate_fn=prepared.collate,
        drop_last=True,
        pin_memory=device == "cuda",
    )
    schedule = make_schedule(optimizer, settings, len(loader))
    forward = torch.compile(net) if settings.compile else net
    seconds, losses = [], []
    total, since = torch.zeros((), device=device), time.perf_counter()
    for step, batch in enumerate(_stream(loader, sampler, prepared, settings.max_steps), 1):
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        with torch.autocast(device, torch.bfloat16, enabled=settings.precision == "bf16"):
            loss = forward(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), settings.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % settings.log_steps == 0:
            losses.append(float(total) / settings.log_steps)  # waits for the device
            seconds.append((time.perf_counter() - since) / settings.log_steps)
            total.zero_()
            since = time.perf_counter()
    return seconds, losses


def _stream(loader: Any, sampler: EpochSampler, prepared: Prepared, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    taken = 0
    for epoch in range(steps):
        sampler.set_epoch(epoch)
        prepared.set_epoch(epoch)
        for batch in loader:
            yield batch
            taken += 1
            if taken == steps:
                return


def _compared(found: dict[str, Windows]) -> dict[str, float]:
    (ours_s, our_losses), (hand_s, hand_losses) = found["outeffhop train"], found["by hand"]
    steps = {name: [s * 1e3 for s in seconds[1:]] for name, seconds in (("ours", ours_s), ("hand", hand_s))}
    return {
        **{f"{name}_ms": statistics.median(values) for name, values in steps.items()},
        **{f"{name}_fastest_ms": min(values) for name, values in steps.items()},
        "speed": statistics.median(steps["hand"]) / statistics.median(steps["ours"]),
        "difference": max(abs(a - b) for a, b in zip(our_losses, hand_losses, strict=True)),
    }


if __name__ == "__main__":
    main()
