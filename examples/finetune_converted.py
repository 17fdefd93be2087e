"""Fine-tune a softmax checkpoint into one whose heads may attend to nothing.

    python examples/finetune_converted.py path/to/checkpoint --data text.txt --out runs/converted

CHECKPOINT is a folder that save_pretrained wrote, of a masked or causal language model with its tokenizer. Changed at
once, every head would lose the weight that the no-op takes; the row "at once" shows what that costs. Instead it is
converted to the same function (the no-op's score, log n, far below all others), and a schedule raises that score to
the method's own while a plain transformers Trainer fine-tunes. A twin that keeps softmax shows the effect of the data.

Without CHECKPOINT a tiny OPT with softmax is trained first; it stands in for yours, and its numbers say nothing about
real models. The last table has each model's metric, outliers and metric in W8A8; it is also in
OUT/numbers.json, and the converted model in OUT/model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, set_seed

import outeffhop
from outeffhop.lab.data import Prepared, batches, prepare
from outeffhop.lab.training import DataConfig, RunConfig, TrainConfig, train
from outeffhop.metrics import task_of
from outeffhop.models import load_checkpoint
from outeffhop.outliers import measure
from outeffhop.quantization import evaluate

BATCH = 16


def stand_in(data: str, length: int, out: Path, steps: int) -> Path:
    """A checkpoint to use if none was given."""
    print(f"no checkpoint was given: a tiny OPT with softmax is trained for {steps} steps and stands in for it")
    how = TrainConfig(max_steps=steps, warmup_steps=min(100, steps // 4), eval_steps=steps, eval_batches=4)
    samples = DataConfig(length=length)
    train(RunConfig(model="opt", method="vanilla", data=data, out=str(out), train=how, samples=samples))
    return out / "model"


def fine_tune(model: Any, prepared: Prepared, steps: int, lr: float, out: Path, callbacks: list[Any]) -> None:
    settings = TrainingArguments(
        output_dir=str(out),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=lr,
        warmup_steps=min(20, steps // 4),
        logging_steps=max(steps // 5, 1),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        remove_unused_columns=False,  # the collator needs whole samples
        seed=0,
    )
    set_seed(0)  # the twins see the same masks and dropout
    parts: Any = dict(train_dataset=prepared.train, data_collator=prepared.collate)
    Trainer(model, settings, **parts, callbacks=callbacks).train()


def numbers(model: Any, prepared: Prepared, count: int, seeds: int) -> dict[str, float]:
    """The metric in floating point and in W8A8, and the paper's two measures of outliers."""

    def draw(part: Any) -> list[Any]:
        return list(batches(part, prepared.eval_collate, BATCH, limit=count))

    outliers = measure(model, draw(prepared.validation), attention=False)
    report = evaluate(model, draw(prepared.train), draw(prepared.validation), scheme="W8A8", seeds=seeds)
    chief = next(iter(report.full))
    return {
        chief: report.full[chief],
        f"{chief} W8A8": report.mean(chief),
        "max inf norm": outliers.max_inf_norm,
        "avg kurtosis": outliers.avg_kurtosis,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="folder; without it a small model is trained first")
    parser.add_argument("--data", default="builtin:text", help="training data, as in `outeffhop data` (%(default)s)")
    parser.add_argument("--method", default="outeffhop", help="outeffhop, gated or gated-outeffhop (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="fine-tuning steps; the sink rises over the first half")
    parser.add_argument("--lr", type=float, default=5e-4, help="highest learning rate (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens per sample (%(default)s)")
    parser.add_argument("--batches", type=int, default=8, help="batches to measure on (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model and the numbers")
    given = parser.parse_args()

    start = given.checkpoint or stand_in(given.data, given.length, given.out / "start", 2 * given.steps)
    kept = load_checkpoint(start)
    prepared = prepare(given.data, task_of(kept), tokenizer=start, length=given.length)
    # the sinks of each head start where they take 1 % of the weight on the training data
    some = list(batches(prepared.train, prepared.eval_collate, 16, limit=4))
    model = outeffhop.convert(load_checkpoint(start), given.method, calibrate=some)
    rows = {"as it came": numbers(kept, prepared, given.batches, seeds=2)}
    at_once = outeffhop.convert(load_checkpoint(start), given.method)
    rows[f"{given.method} at once"] = numbers(at_once, prepared, given.batches, seeds=2)

    print("fine-tuning with softmax, for comparison")
    fine_tune(kept, prepared, given.steps, given.lr, given.out, [])
    rows["softmax, fine-tuned"] = numbers(kept, prepared, given.batches, seeds=2)
    print(f"fine-tuning to {given.method}")
    schedule = outeffhop.SinkSchedule(steps=max(given.steps // 2, 1))
    fine_tune(model, prepared, given.steps, given.lr, given.out, [schedule.callback()])
    rows[f"{given.method}, fine-tuned"] = numbers(model, prepared, given.batches, seeds=2)

    model.save_pretrained(given.out / "model")
    prepared.tokenizer.save_pretrained(given.out / "model")
    (given.out / "numbers.json").write_text(json.dumps(rows, indent=1) + "\n")
    names = list(rows["as it came"])
    print(f"\n{'':28}" + "".join(f"{name:>17}" for name in names))
    for title, row in rows.items():
        print(f"{title:28}" + "".join(f"{row[name]:17.4g}" for name in names))
    print(f"the model is in {given.out / 'model'}")


if __name__ == "__main__":
    main()
