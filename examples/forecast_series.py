"""Forecast a multivariate series with STanHop-Net, and look at its outliers.

    python examples/forecast_series.py --out runs/forecast
    python examples/forecast_series.py --data ETTh1.csv --in-len 168 --out runs/etth1

DATA is `builtin:series` (seven synthetic hourly series, with daily and weekly waves, a trend and noise) or a CSV file
with a date column and one column per series. The model is trained with each METHOD and then forecasts windows of the
test rows, which it has never seen. "yesterday again", which copies the last 24 rows, is the baseline to beat.

The last table has the errors, of values scaled by the training rows, and the outliers; it is also in
OUT/numbers.json. OUT/forecast.png has the first series of one window, OUT/METHOD the runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from outeffhop.lab.data import batches
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, prepare_data, train
from outeffhop.metrics import metric_for
from outeffhop.models import load_checkpoint
from outeffhop.outliers import measure

DAY = 24
COPY = "yesterday again"


def fit(method: str, given: argparse.Namespace) -> RunFolder:
    settings = TrainConfig(
        max_steps=given.steps,
        eval_steps=max(given.steps // 4, 1),
        log_steps=max(given.steps // 4, 1),
        save_steps=given.steps,
        outlier_steps=0,  # measured below, on test windows
        eval_batches=8,
    )
    samples = DataConfig(in_len=given.in_len, out_len=given.out_len)
    out = given.out / method
    config = RunConfig("stanhop", "tiny", method, given.data, str(out), train=settings, samples=samples)
    train(config, resume=True)  # a run that has finished is not trained again
    return RunFolder(out)


def yesterday(past: Tensor, length: int) -> Tensor:
    """The last day, over and over.  [B, in_len, D] → [B, length, D]"""
    last = past[:, -DAY:]
    return last.repeat(1, -(-length // last.shape[1]), 1)[:, :length]


def draw(past: Tensor, future: Tensor, forecasts: dict[str, Tensor], out: Path) -> None:
    """Draws one series: the rows given, the rows that followed, and each forecast."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    axes = figure.subplots()
    hours = torch.arange(-len(past), len(future))
    axes.plot(hours, torch.cat([past, future]), color="#666666", lw=1.2, label="the series")
    axes.axvline(-0.5, color="#666666", lw=0.8, ls=":")
    for name, values in forecasts.items():
        axes.plot(hours[-len(future) :], values, lw=2, label=name, ls="--" if name == COPY else "-")
    axes.set(xlabel="rows after the last one given", ylabel="scaled value")
    figure.legend(loc="outside upper center", ncols=2 + len(forecasts), frameon=False)
    figure.savefig(out / "forecast.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="builtin:series", help="or a CSV file (default %(default)s)")
    parser.add_argument("--methods", nargs="+", default=["vanilla", "outeffhop"], help="as in `outeffhop methods`")
    parser.add_argument("--in-len", type=int, default=48, help="rows given, at least a day (default %(default)s)")
    parser.add_argument("--out-len", type=int, default=24, help="rows to forecast (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="training steps of each method (default %(default)s)")
    parser.add_argument("--batches", type=int, default=16, help="batches of 32 test windows (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, the figure and the numbers")
    given = parser.parse_args()
    if given.in_len < DAY:
        parser.error(f"--in-len {given.in_len}: must be at least {DAY}, one day")

    rows: dict[str, dict[str, float]] = {}
    shown: dict[str, Tensor] = {}
    for method in given.methods:
        print(f"{method}:", flush=True)
        run = fit(method, given)
        model, prepared = load_checkpoint(run.model), prepare_data(run.config())
        test: list[Any] = list(batches(prepared.test, prepared.eval_collate, 32, limit=given.batches))
        outliers = measure(model, test)
        named = {"max inf norm": outliers.max_inf_norm, "avg kurtosis": outliers.avg_kurtosis}
        rows[method] = metric_for("forecasting")(model, test) | named
        with torch.no_grad():
            shown[method] = model(past_values=test[0]["past_values"][:1]).prediction[0, :, 0]
    futures = torch.cat([batch["future_values"] for batch in test])
    copies = torch.cat([yesterday(batch["past_values"], given.out_len) for batch in test])
    error = copies - futures
    rows[COPY] = {"mse": float(error.square().mean()), "mae": float(error.abs().mean())}
    shown[COPY] = copies[0, :, 0]
    draw(test[0]["past_values"][0, :, 0], futures[0, :, 0], shown, given.out)

    (given.out / "numbers.json").write_text(json.dumps(rows, indent=1) + "\n")
    names = list(next(iter(rows.values())))
    print(f"\n{len(futures)} test windows of {given.data}\n{'':20}" + "".join(f"{name:>15}" for name in names))
    for title, row in rows.items():
        print(f"{title:20}" + "".join(f"{row[name]:15.4f}" if name in row else " " * 15 for name in names))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
