"""Pretrain the same model with two methods, and see what 8 bits cost each.

    python examples/pretrain_and_quantize.py --steps 500 --out runs/compared

Everything uses the Python API: `train` makes a run of each method with one seed, so that the models begin with the same
weights and see the same batches; `measure` finds their outliers; `evaluate` simulates W8A8 as the paper does, over
three draws of calibration data.

A tiny model, trained for a few hundred steps, has few outliers and loses little to 8 bits with either method. To see
the difference the paper is about, use a GPU: `--preset small` and a few thousand steps.

The last table is also in OUT/numbers.json; each run, with its model, is a folder of OUT.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, prepare_data, train
from outeffhop.models import load_checkpoint
from outeffhop.outliers import compare, measure
from outeffhop.quantization import evaluate


def pretrain(method: str, given: argparse.Namespace) -> RunFolder:
    """A run of one method; the recipe of the model and its size fills in all other settings."""
    config = RunConfig(
        model=given.model,
        preset=given.preset,
        method=method,
        data=given.data,
        out=str(given.out / method),
        train=TrainConfig(
            max_steps=given.steps,
            warmup_steps=given.steps // 10,
            eval_steps=given.steps,  # only the last step's numbers are needed
            eval_batches=given.batches,
            outlier_steps=0,
            log_steps=max(given.steps // 5, 1),
            seed=given.seed,
        ),
        samples=DataConfig(length=given.length),
    )
    train(config, resume=True)  # a run that has finished is not trained again
    return RunFolder(given.out / method)


def drawn(prepared: Prepared, part: Any, count: int) -> list[Any]:
    return list(batches(part, prepared.eval_collate, 16, limit=count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("opt", "bert"), default="opt", help="(default %(default)s)")
    parser.add_argument("--preset", choices=("tiny", "small", "paper"), default="tiny", help="(default %(default)s)")
    parser.add_argument("--methods", nargs="+", default=["vanilla", "outeffhop"], help="as in `outeffhop methods`")
    parser.add_argument("--data", default="builtin:text", help="text, as in `outeffhop data` (default %(default)s)")
    parser.add_argument("--length", type=int, default=None, help="tokens per sample (default: the recipe's)")
    parser.add_argument("--steps", type=int, default=300, help="training steps of each method (default %(default)s)")
    parser.add_argument(
        "--batches", type=int, default=16, help="batches to measure and calibrate on (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and the numbers")
    given = parser.parse_args()

    outliers, costs = {}, {}
    for method in given.methods:
        print(f"{method}:", flush=True)
        run = pretrain(method, given)
        model, prepared = load_checkpoint(run.model), prepare_data(run.config())
        validation = drawn(prepared, prepared.validation, given.batches)
        outliers[method] = measure(model, validation)
        costs[method] = evaluate(
            model,
            drawn(prepared, prepared.train, 4 * given.batches),  # of which each seed draws its own
            validation,
            scheme="W8A8",
            calibration_batches=given.batches,
        )
        costs[method].save(run.path / "quantization.json")  # where `outeffhop runs` looks for it

    rows = {
        row["name"]: {
            "perplexity": costs[row["name"]].full["perplexity"],
            "perplexity W8A8": costs[row["name"]].mean("perplexity"),
            "± over calibrations": costs[row["name"]].std("perplexity"),
            "max inf norm": row["max_inf_norm"],
            "avg kurtosis": row["avg_kurtosis"],
            "attention to nothing": row["no_op"],
        }
        for row in compare(outliers)
    }
    (given.out / "numbers.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"\n{given.model} {given.preset} after {given.steps} steps on {given.data}")
    print(" " * 22 + "".join(f"{method:>20}" for method in rows))
    for name in next(iter(rows.values())):
        print(f"{name:22}" + "".join(f"{row[name]:20.5g}" for row in rows.values()))


if __name__ == "__main__":
    main()
