"""The command ``outeffhop``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from outeffhop.cli.console import print_error

__all__ = ["main"]


def doctor(json: bool = False) -> None:
    """What is installed here, and which attention backends serve. Example: outeffhop doctor --json

    Args:
        json: print JSON instead of tables.
    """
    from outeffhop.cli.doctor import examine, show

    show(examine(), as_json=json)


def methods(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[METHOD]")] = None, json: bool = False
) -> None:
    """The attention methods and their parameters. Example: outeffhop methods 'outeffhop(n=4)'

    Args:
        name: a method with or without parameters, to see it in full; all of them if left out.
        json: print JSON instead of a table.
    """
    from outeffhop.cli.methods import show

    show(name, as_json=json)


def presets(json: bool = False) -> None:
    """The models and sizes there are; the paper's parameter counts beside ours. Example: outeffhop presets

    Args:
        json: print JSON instead of tables.
    """
    from outeffhop.cli.presets import show

    show(as_json=json)


def data(
    spec: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[SPEC]")] = None,
    task: str | None = None,
    json: bool = False,
) -> None:
    """What data there is, what a spec would give, its first samples. Example: outeffhop data builtin:text

    Args:
        spec: builtin:text, builtin:images, builtin:series, a path, or hub:NAME[/CONFIG]; left out: all there is.
        task: mlm, clm, classification or forecasting: refuse data that does not serve it.
        json: print JSON instead of tables.
    """
    from outeffhop.cli.data import show

    show(spec, task, as_json=json)


def outliers(
    checkpoint: Annotated[str, tyro.conf.Positional],
    data: str,
    out: Path,
    tensors: Literal["paper", "all"] = "paper",
    batches: int = 16,
    batch_size: int = 16,
    length: int = 128,
    tokenizer: str | None = None,
    device: str | None = None,
    json: bool = False,
) -> None:
    """Where a checkpoint's outliers are. Example: outeffhop outliers RUN/checkpoint --data builtin:text --out DIR

    Args:
        checkpoint: folder of a saved model.
        data: as for `outeffhop data`; the validation split is measured.
        out: folder for outliers.json and outliers.html.
        tensors: those the paper measures, or every module's output.
        batches: how many at most.
        batch_size: samples of a batch.
        length: text: tokens of a sample.
        tokenizer: its folder, where the checkpoint has none.
        device: cuda if there is one, else cpu.
        json: print JSON instead of tables.
    """
    from outeffhop.cli.outliers import run, show

    report = run(
        checkpoint,
        data,
        out,
        tensors=tensors,
        count=batches,
        batch_size=batch_size,
        length=length,
        tokenizer=tokenizer,
        device=device,
    )
    show(report, out, as_json=json)


def quantize(
    checkpoint: Annotated[str, tyro.conf.Positional],
    data: str,
    bits: str = "W8A8",
    scheme: Literal["paper", "linear", "per-token", "smoothquant"] = "paper",
    range: Literal["running", "minmax", "percentile", "mse"] | None = None,
    calibration_batches: int = 16,
    batch_size: int = 32,
    seeds: int = 3,
    length: int = 128,
    tokenizer: str | None = None,
    limit: int | None = None,
    device: str | None = None,
    out: Path | None = None,
    int8: bool = False,
    json: bool = False,
) -> None:
    """What quantization costs a checkpoint. Example: outeffhop quantize RUN/checkpoint --data builtin:text

    Args:
        checkpoint: folder of a saved model.
        data: as for `outeffhop data`; calibrates on train, measures on validation.
        bits: of weights and activations.
        scheme: the paper's W8A8, Linear inputs and weights alone, and two rivals.
        range: how activations get theirs; by default running min-max, or as the scheme needs it.
        calibration_batches: drawn anew for each seed.
        batch_size: of calibration and measurement.
        seeds: how many calibration draws.
        length: text: tokens of a sample.
        tokenizer: its folder, where the checkpoint has none.
        limit: measure on this many batches; all if left out.
        device: cuda if there is one, else cpu.
        out: folder to write quantization.json into.
        int8: also export to OpenVINO into OUT/int8 and measure real integer execution; needs outeffhop[int8].
        json: print JSON instead of tables.
    """
    from outeffhop.cli.quantize import run, show, show_int8
    from outeffhop.quantization import Scheme

    report = run(
        checkpoint,
        data,
        Scheme.parse(f"{bits} {scheme}").with_range(range),
        calibration_batches=calibration_batches,
        batch_size=batch_size,
        seeds=seeds,
        length=length,
        tokenizer=tokenizer,
        limit=limit,
        device=device,
        out=out,
        int8=int8,
    )
    if json:
        print(report.to_json())
    else:
        show(report)
        if int8 and out is not None:
            show_int8(out)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "doctor": doctor,
                "methods": methods,
                "presets": presets,
                "data": data,
                "outliers": outliers,
                "quantize": quantize,
            },
            prog="outeffhop",
            description="Transformers free of activation outliers. Start with: outeffhop doctor",
            args=arguments,
        )
    except ValueError as error:
        print_error(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
