"""The command ``outeffhop``."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from outeffhop import __version__
from outeffhop.cli.console import print_error

__all__ = ["main"]

_Folder = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]


def doctor(json: bool = False) -> None:
    """What is installed here, and which attention backends serve.

    Example: outeffhop doctor --json

    Args:
        json: print JSON instead of tables.
    """
    from outeffhop.cli.doctor import examine, show

    show(examine(), as_json=json)


def methods(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[METHOD]")] = None, json: bool = False
) -> None:
    """The attention methods and their parameters.

    Example: outeffhop methods 'outeffhop(n=4)'

    Args:
        name: a method with or without parameters, to see it in full; all of them if left out.
        json: print JSON instead of a table.
    """
    from outeffhop.cli.methods import show

    show(name, as_json=json)


def presets(json: bool = False) -> None:
    """The models and sizes there are; the paper's parameter counts beside ours.

    Example: outeffhop presets

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
    """What data there is, what a spec would give, its first samples.

    Example: outeffhop data builtin:text

    Args:
        spec: builtin:text, builtin:images, builtin:series, a path, or hub:NAME[/CONFIG]; left out: all there is.
        task: mlm, clm, classification or forecasting: refuse data that does not serve it.
        json: print JSON instead of tables.
    """
    from outeffhop.cli.data import show

    show(spec, task, as_json=json)


def outliers(
    checkpoint: _Folder,
    out: Path,
    data: str | None = None,
    tensors: Literal["paper", "all"] = "paper",
    batches: int = 16,
    batch_size: int = 16,
    length: int | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
) -> None:
    """Where a checkpoint's outliers are.

    Example: outeffhop outliers RUN --out DIR

    Args:
        checkpoint: folder of a run, or of a saved model.
        out: folder for outliers.json and outliers.html.
        data: as for `outeffhop data`, by default the run's; its validation split.
        tensors: those the paper measures, or every module's output.
        batches: how many at most.
        batch_size: samples of a batch.
        length: text: tokens of a sample; by default the run's, or 128.
        tokenizer: its folder, where the checkpoint has none.
        device: cuda if there is one, else cpu.
        trust_remote_code: run the Python files a checkpoint brings along; without it they are refused.
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
        trust_remote_code=trust_remote_code,
    )
    show(report, out, as_json=json)


def quantize(
    checkpoint: _Folder,
    data: str | None = None,
    bits: str = "W8A8",
    scheme: Literal["paper", "linear", "per-token", "smoothquant"] = "paper",
    range: Literal["running", "minmax", "percentile", "mse"] | None = None,
    calibration_batches: int = 16,
    batch_size: int = 32,
    seeds: int = 3,
    length: int | None = None,
    tokenizer: str | None = None,
    limit: int | None = None,
    device: str | None = None,
    out: Path | None = None,
    fold_layernorm: bool = False,
    int8: bool = False,
    trust_remote_code: bool = False,
    json: bool = False,
) -> None:
    """What quantization costs a checkpoint.

    Example: outeffhop quantize RUN --out RUN

    Args:
        checkpoint: folder of a run, or of a saved model.
        data: as for `outeffhop data`, by default the run's.
        bits: of weights and activations, 2 to 16 each, as W4A8.
        scheme: all the paper quantizes, Linear layers alone, or a rival.
        range: of activations; by default running (smoothquant: minmax).
        calibration_batches: of training data, drawn anew for each seed.
        batch_size: of calibration and measurement.
        seeds: how many calibration draws; mean ± std.
        length: text: tokens of a sample; by default the run's, or 128.
        tokenizer: its folder, where the checkpoint has none.
        limit: measure on this many batches; all if left out.
        device: cuda if there is one, else cpu.
        out: folder to write quantization.json into.
        fold_layernorm: fold LayerNorm's scale into the next layers.
        int8: also export to OUT/int8 and run that (outeffhop[int8]).
        trust_remote_code: run the Python files a checkpoint brings along.
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
        fold=fold_layernorm,
        int8=int8,
        trust_remote_code=trust_remote_code,
    )
    if json:
        print(report.to_json())
    else:
        show(report, out)
        if int8 and out is not None:
            show_int8(out)


def evaluate(
    checkpoint: _Folder,
    data: str | None = None,
    split: Literal["train", "validation", "test"] = "validation",
    batch_size: int = 32,
    limit: int | None = None,
    length: int | None = None,
    tokenizer: str | None = None,
    device: str | None = None,
    out: Path | None = None,
    trust_remote_code: bool = False,
    json: bool = False,
) -> None:
    """A checkpoint's metric on data.

    Example: outeffhop evaluate RUN --split test

    Args:
        checkpoint: folder of a run, or of a saved model.
        data: as for `outeffhop data`, by default the run's.
        split: which part of it.
        batch_size: samples of a batch.
        limit: measure on this many batches; all if left out.
        length: text: tokens of a sample; by default the run's, or 128.
        tokenizer: its folder, where the checkpoint has none.
        device: cuda if there is one, else cpu.
        out: folder to write evaluation.json into.
        trust_remote_code: run the Python files a checkpoint brings along; without it they are refused.
        json: print JSON instead of a table.
    """
    from outeffhop.cli.evaluate import run, show

    result = run(
        checkpoint,
        data,
        split=split,
        batch_size=batch_size,
        limit=limit,
        length=length,
        tokenizer=tokenizer,
        device=device,
        out=out,
        trust_remote_code=trust_remote_code,
    )
    show(result, out, as_json=json)


def resume(run: _Folder, json: bool = False) -> None:
    """Go on with an interrupted run.

    Example: outeffhop resume runs/a

    Args:
        run: its folder.
        json: print JSON instead of tables.
    """
    from outeffhop.cli.train import resume as go_on

    go_on(Path(run), json)


def runs(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = "runs", json: bool = False
) -> None:
    """The runs under a folder, with their metrics.

    Example: outeffhop runs runs

    Args:
        folder: where to look.
        json: print JSON instead of a table.
    """
    from outeffhop.cli.runs import show

    show(Path(folder), as_json=json)


def reproduce(
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME|all]")] = None,
    scale: Literal["tiny", "small", "paper"] = "tiny",
    seeds: int = 3,
    out: Path = Path("results"),
    data: Path | None = None,
    workers: int = 1,
    device: str | None = None,
    quick: bool = False,
    only: tuple[str, ...] = (),
    json: bool = False,
) -> None:
    """The paper's tables and figures, each by its name.

    Example: outeffhop reproduce energy --out results

    Args:
        name: an experiment, or all of them; left out: which there are.
        scale: tiny is two CPU cores, small one GPU, paper the paper's.
        seeds: how many; the memory experiments have ten but for a tiny scale.
        out: folder for results, figures and report.html; what is measured there already is not measured again.
        data: folder with the public data sets (prose/, cifar10/, mnist/, ett/, wth/, mil/), for all but a tiny scale.
        workers: cells measured at the same time.
        device: cuda if there is one, else cpu.
        quick: cut down to seconds, to see that it runs; the numbers mean nothing.
        only: these cells alone, as --only 'opt-*' 'bert-vanilla-0'; with what is there already they make the result.
        json: print JSON instead of tables.
    """
    from outeffhop.cli.reproduce import list_experiments, run, settings_of

    if name is None:
        list_experiments(as_json=json)
        return
    run(name, settings_of(scale, seeds, out, data, workers, device, quick, only), as_json=json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 141 unread."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know α, nor a file's name be UTF-8
    if given[:1] in (["-h"], ["--help"]):
        print(_overview())
        return 0
    if given == ["--version"]:
        print(f"outeffhop {__version__}")
        return 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            tyro.extras.subcommand_cli_from_dict(
                {**_COMMANDS, "train": _train(given)},
                prog="outeffhop",
                args=["--help" if word == "--help-all" else word for word in given],
            )
    except ValueError as error:
        print_error(error)
        return 2
    except BrokenPipeError:  # who reads has read enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains of it at its end
        return 141
    except (OSError, RuntimeError) as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print_error(f"warning: {message}")


def train() -> None:
    """Train a model.

    Example: outeffhop train --model opt --method outeffhop --data builtin:text --out runs/a
    """


_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "resume": resume,
    "runs": runs,
    "evaluate": evaluate,
    "outliers": outliers,
    "quantize": quantize,
    "reproduce": reproduce,
    "data": data,
    "methods": methods,
    "presets": presets,
    "doctor": doctor,
}


def _train(given: list[str]) -> Callable[..., None]:
    """The command as the arguments call for it: its defaults are those of the file given by ``--config``."""
    if given[:1] != ["train"]:
        return train
    from outeffhop.cli.train import command, help_page

    if {"-h", "--help"} & set(given):
        print(help_page())
        sys.exit(0)
    return command(given)


def _overview() -> str:
    lines = [f"  {name:10}{(f.__doc__ or '').splitlines()[0]}" for name, f in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: outeffhop COMMAND [--help] | outeffhop --version",
            "",
            "Transformers free of activation outliers. Example: outeffhop doctor",
            "",
            *lines,
            "",
            "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
