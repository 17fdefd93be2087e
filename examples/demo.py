"""What the package is for, seen on any machine in minutes.

    python examples/demo.py --out demo

A small OPT is trained twice on text that comes with Python, with softmax and with softmax1 (OutEffHop); outliers are
watched as they grow, both models are quantized to 8 bits, and half-hidden digits are retrieved from memories of every
kind. The results are printed, and written with figures to OUT/report.html. A demo that was stopped resumes.

The text is small and the models memorize it. Perplexity is measured on the training text and says nothing about others.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import retrieve_digits

from outeffhop.cli.reproduce import show
from outeffhop.lab.paper import drawing
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values
from outeffhop.lab.paper.ranking import mean_std
from outeffhop.lab.paper.running import run
from outeffhop.lab.paper.table1_verdicts import loss_verdict
from outeffhop.lab.paper.trained_models import measured, quantized
from outeffhop.lab.paper.training_outliers import curve_of
from outeffhop.lab.paper.training_runs import finished, run_config
from outeffhop.lab.paper.training_verdicts import growth_verdict
from outeffhop.lab.report import write_report
from outeffhop.models import presets

METHODS = ("vanilla", "outeffhop")
ABOUT = "A tiny OPT trained with softmax and with softmax1: its outliers, and what 8 bits cost it."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for all results (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1200, help="training steps of each model (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs; numbers mean nothing")
    arguments = parser.parse_args()
    steps = 4 if arguments.quick else arguments.steps
    began = time.monotonic()

    def cells(settings: Settings) -> list[Cell]:
        models = [Cell(f"opt-{method}", {"method": method, "steps": steps}) for method in METHODS]
        return [*models, Cell("digits")]

    demo = Experiment("demo", "Demo", ABOUT, cells, measure, conclude)
    settings = Settings(out=arguments.out, quick=arguments.quick)
    result = run(demo, settings, tell=lambda line: print(line, file=sys.stderr))
    page = write_report(arguments.out, "Outliers, 8 bits and memories: a demo")
    print()
    show(result)
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes. With figures: {page}")
    print("Next: docs/quickstart.md goes through the same steps with your own data.")


def measure(cell: Cell, settings: Settings) -> Values:
    if cell.key == "digits":
        return {"table": retrieve_digits.compare()[1]}
    method = cell.values["method"]
    print(f"training OPT with {method}", file=sys.stderr)
    config = run_config(settings, "opt", method, 0, group="demo", train={"max_steps": cell.values["steps"]})
    folder = finished(config, settings, quiet=False)
    print(f"measuring and quantizing OPT with {method}", file=sys.stderr)
    found = {**measured(config, settings, "train"), "w8a8": quantized(config, settings, split="train")}
    size: Any = presets.config("opt", "tiny", **config.changes)
    about = f"OPT, {size.num_hidden_layers} layers, {size.hidden_size} wide"
    return {**found, "curve": curve_of(folder, "opt"), "about": about, "length": config.samples.length}


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    models = {method: found[f"opt-{method}"] for method in METHODS}
    losses = {m: [float(x) - v["metrics"]["perplexity"] for x in v["w8a8"]["perplexity"]] for m, v in models.items()}
    columns = ["method", "max inf norm", "avg kurtosis", "perplexity", "in W8A8", "loss by W8A8"]
    rows = [
        [
            method,
            *(float(values[field]) for field in ("inf_norm", "kurtosis")),
            float(values["metrics"]["perplexity"]),
            mean(map(float, values["w8a8"]["perplexity"])),
            mean_std(losses[method], 2),
        ]
        for method, values in models.items()
    ]
    note = (
        "Perplexity on the training text; W8A8: everything that the paper quantizes in 8 bits, per tensor; "
        "± over three calibration draws."
    )
    digits = ["model", "β", "mean squared error", "digits found", "no-op weight of the negative"]
    some = models["vanilla"]
    return Result(
        "demo",
        "Demo",
        ABOUT,
        [
            Table("OPT, trained here", columns, rows, dict.fromkeys(columns[1:], "low"), note=note),
            Table("A hundred digits, retrieved from their upper halves", digits, found["digits"]["table"]),
        ],
        _figures(models, folder),
        [
            growth_verdict({("opt", method): [values["curve"]] for method, values in models.items()}, "opt", *METHODS),
            loss_verdict("opt", "vanilla", ([models["vanilla"]], [models["outeffhop"]])),
        ],
        {
            "model": f"{some['about']}, {some['parameters']:,} parameters; one seed",
            "data": some["data"],
            "training": f"{some['steps']} steps of {some['batch']} × {some['length']} tokens, lr {some['lr']:g}",
        },
    )


def _figures(models: dict[str, Values], folder: Path) -> list[Figure]:
    figure, axis = drawing.new(6.4, 3.2)
    for method, values in models.items():
        curve = values["curve"]
        axis.plot(curve["steps"], curve["max_inf_norm"], color=drawing.colour(method), label=method)
    axis.set(xlabel="training steps", ylabel="max inf norm")
    axis.legend(frameon=False)
    drawing.save(figure, folder, "training")
    rows, _, grey = retrieve_digits.compare()
    retrieve_digits.draw(rows, grey, folder / "digits.png")
    return [
        Figure("training", "Outliers over training", "The largest of the tensors the paper looks at."),
        Figure("digits", "Digits from memory", "The last query is a negative: nothing stored is like it."),
    ]


if __name__ == "__main__":
    main()
