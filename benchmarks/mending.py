"""What mending buys a checkpoint, beside its rivals: every contender is fine-tuned alike and measured on every text.

    python benchmarks/mending.py run NAME OUT --checkpoint FOLDER --data TEXT [--texts NAME=TEXT ...] [--steps N] ...
    python benchmarks/mending.py run NAME OUT --checkpoint FOLDER --data TEXT [--texts NAME=TEXT ...] --cut
    python benchmarks/mending.py collect OUT --result FILE

``run`` fine-tunes one contender with the recipe of ``outeffhop mend`` and writes OUT/NAME.json; with ``--steps 0`` it
measures the checkpoint as it came. Contenders are processes of their own, so several can share a GPU; ``--cut`` cuts
and keeps the texts, or each would. One that was interrupted goes on when it is started again; what it has measured
until then is in OUT/NAME.part.json. ``collect`` joins what is in OUT.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import environment, keep

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.data.samples import random_batches
from outeffhop.lab.data.tokenizer import marking_ids
from outeffhop.lab.mending.mend_config import MendConfig
from outeffhop.lab.mending.mend_recipe import recipe, with_steps
from outeffhop.lab.training import RunConfig, RunFolder, prepare_data, train
from outeffhop.models import load_checkpoint
from outeffhop.outliers import measure
from outeffhop.quantization import SCHEMES, Scheme, evaluate
from outeffhop.quantization.observers import RANGES

_WORST = 8  # tensors to blame that are kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="fine-tune and measure one contender")
    run.add_argument("name", help="of the contender")
    run.add_argument("out", type=Path, help="folder of all contenders")
    run.add_argument("--checkpoint", required=True)
    run.add_argument("--data", required=True, help="text to fine-tune on")
    run.add_argument("--texts", nargs="+", default=[], metavar="NAME=TEXT", help="to measure on; default: the data")
    run.add_argument("--steps", type=int, default=1000, help="0: measure the checkpoint as it came (default 1000)")
    run.add_argument("--cut", action="store_true", help="only cut the texts into samples, and keep them")
    run.add_argument("--method", default="auto")
    run.add_argument("--plain", action="store_true", help="without any remedy")
    run.add_argument("--penalty", type=float, help="weight of the penalty; default: the recipe's")
    run.add_argument("--penalty-kind", help="default: the recipe's")
    run.add_argument("--weight-bound", type=float, default=16.0, help="in standard deviations (default 16)")
    run.add_argument("--lr", type=float, help="default: the recipe's")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--length", type=int)
    run.add_argument("--batch-size", type=int, default=16)
    run.add_argument("--batches", type=int, default=16, help="to measure on, and to calibrate on (default 16)")
    run.add_argument("--schemes", nargs="+", default=[*SCHEMES, "W4A8 paper", "W8A8KV8 paper"])
    run.add_argument("--range", choices=RANGES, help="of static ranges where everything is quantized")
    run.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    run.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    run.set_defaults(command=contend)
    collect_ = commands.add_parser("collect", help="join the results")
    collect_.add_argument("out", type=Path)
    collect_.add_argument("--result", type=Path, required=True)
    collect_.set_defaults(command=collect)
    arguments = parser.parse_args()
    arguments.command(arguments)


def contend(given: argparse.Namespace) -> None:
    config = MendConfig(
        checkpoint=given.checkpoint,
        data=given.data,
        out="",
        method=given.method,
        penalty=given.penalty,
        penalty_kind=given.penalty_kind,
        weight_bound=given.weight_bound,
        lr=given.lr,
        seed=given.seed,
        length=given.length,
        batch_size=given.batch_size,
        batches=given.batches,
        precision=given.precision,
        device=given.device,
    )
    resolved = recipe(config, plain=given.plain)
    texts = dict(text.split("=", 1) for text in given.texts) or {"data": given.data}
    if given.cut:
        for text in {given.data, *texts.values()}:
            prepare_data(dataclasses.replace(resolved, data=text))
        return
    folder, seconds = Path(given.checkpoint), 0.0
    if given.steps:
        fitted = with_steps(resolved, given.steps, str(given.out / given.name))
        begin = time.perf_counter()
        train(fitted, resume=True)
        seconds, folder = time.perf_counter() - begin, RunFolder(fitted.out).model
    model: Any = load_checkpoint(folder)
    model.to(given.device)
    tuning = dataclasses.asdict(resolved.train)
    kept = ("batch_size", "lr", "penalty", "penalty_kind", "penalty_tensors", "weight_bound", "precision", "seed")
    result: dict[str, Any] = {
        "contender": given.name,
        **environment(given.device),
        "method": resolved.method,
        "steps": given.steps,
        "length": resolved.samples.length,
        "range": given.range or "running",
        **({name: tuning[name] for name in kept} if given.steps else {}),
        "seconds": seconds,
        "texts": {},
    }
    part = given.out / f"{given.name}.part.json"
    if part.exists():
        before = json.loads(part.read_text())
        result |= {"texts": before["texts"], "seconds": max(seconds, before["seconds"])}
    for name, text in texts.items():
        found = result["texts"].setdefault(name, {"quantized": {}})
        measure_into(found, model, dataclasses.replace(resolved, data=text), given, lambda: keep(part, result))
    keep(given.out / f"{given.name}.json", result)
    part.unlink(missing_ok=True)


def measure_into(
    found: dict[str, Any], model: Any, run: RunConfig, given: argparse.Namespace, save: Callable[[], None]
) -> None:
    """The model's outliers on the validation split of a text, and its metrics in floating point and by each scheme.

    What ``found`` contains already is not measured again; it is saved after each scheme.
    """
    data: Prepared = prepare_data(run)
    evaluation = list(batches(data.validation, data.eval_collate, given.batch_size, limit=given.batches))
    if "samples" not in found:
        outliers = measure(model, evaluation, special_ids=marking_ids(data.tokenizer))
        found |= {
            "samples": sum(len(batch["input_ids"]) for batch in evaluation),
            "max_inf_norm": outliers.max_inf_norm,
            "avg_kurtosis": outliers.avg_kurtosis,
            "max_abs": outliers.max_abs,
        }
        save()
    for scheme in map(Scheme.parse, given.schemes):
        if str(scheme) in found["quantized"]:
            continue
        if scheme.placement == "paper" and not scheme.dynamic:
            scheme = scheme.with_range(given.range)
        report = evaluate(
            model,
            lambda seed: random_batches(data.train, data.eval_collate, given.batch_size, given.batches, seed),
            evaluation,
            scheme=scheme,
            seeds=1,
        )
        name = next(iter(report.quantized))
        found[name] = report.full[name]
        found["quantized"][report.scheme] = {
            name: report.mean(name),
            "worst": [each.name for each in report.worst[:_WORST]],
        }
        save()
        print(f"{given.name:30} {report.scheme:20} {report.full[name]:10.3f} → {report.mean(name):12.3f}", flush=True)


def collect(given: argparse.Namespace) -> None:
    rows = [json.loads(file.read_text()) for file in sorted(given.out.glob("*.json"))]
    if not rows:
        raise SystemExit(f"mending: {given.out} contains no results of contenders")
    keep(given.result, {"question": __doc__.splitlines()[0], "contenders": rows})
    print(f"{len(rows)} contenders, written to {given.result}")


if __name__ == "__main__":
    main()
