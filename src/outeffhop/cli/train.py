"""``outeffhop train`` and ``outeffhop resume``: a run from a config, flags, or both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import torch.distributed
import tyro

from outeffhop._io import to_plain
from outeffhop.cli.console import print_error, print_json, print_table, speaks
from outeffhop.lab.training import Result, RunConfig, RunFolder
from outeffhop.lab.training import resume as resume_run
from outeffhop.lab.training import train as train_run
from outeffhop.lab.training.config import DataConfig, TrainConfig, from_yaml, to_dict, to_yaml

__all__ = ["command", "help_page", "resume"]


def command(arguments: Sequence[str]) -> Callable[..., None]:
    """The command ``train``, whose defaults are those of the file given by ``--config``."""
    return _with_defaults(_config_in(arguments))


def _with_defaults(default: RunConfig) -> Callable[..., None]:
    # of a mapping that is not empty tyro makes a flag for each name, and takes no others
    without_changes = dataclasses.replace(default, changes={})

    def train(
        run: Annotated[RunConfig, tyro.conf.arg(name="")] = without_changes,
        config: Path | None = None,
        resume: Literal["never", "auto"] = "never",
        dry_run: bool = False,
        json: bool = False,
    ) -> None:
        """Train a model.

        Example: outeffhop train --model opt --method outeffhop --data builtin:text --out runs/a

        Args:
            run: the run.
            config: a YAML file with any of the fields below; flags win over it.
            resume: auto goes on with the run in --out, where there is one.
            dry_run: print the resolved config and what it will cost; train nothing.
            json: print JSON instead of tables.
        """
        run = dataclasses.replace(run, changes={**default.changes, **run.changes})
        if dry_run:
            _show_plan(run, as_json=json)
            return
        with _interruptible(run.out):
            result = train_run(run, resume=resume == "auto", quiet=json)
        _show(result, run.out, as_json=json)

    return train


def help_page() -> str:
    """One screen: what every run needs, and the names of the rest."""

    def names(kind: type[TrainConfig] | type[DataConfig]) -> str:
        found = ", ".join(f.name.replace("_", "-") for f in dataclasses.fields(kind))
        return fill(found, 90, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)

    return f"""\
usage: outeffhop train --data SPEC --out FOLDER [options]

Example: outeffhop train --model opt --method outeffhop --data builtin:text --out runs/a

  --model bert|opt|vit|stanhop     opt, if left out
  --preset tiny|small|paper        its size; tiny, if left out
  --method NAME    how it attends (outeffhop methods); outeffhop, if left out
  --data SPEC      what to learn from (outeffhop data)
  --out FOLDER     the run's folder, which must not hold a run yet
  --init FOLDER    go on from a checkpoint, converted to the method, instead of new weights
  --changes NAME VALUE ...         fields of the model's config
  --config FILE    YAML with any of these; flags win over it
  --resume auto    go on with the run in --out, where there is one
  --dry-run        print the whole config and what it will cost; train nothing
  --json           print JSON
  --train.NAME VALUE, by default as the recipe of the model and size:
{names(TrainConfig)}
  --samples.NAME VALUE, likewise:
{names(DataConfig)}
  --help-all       what each of them means"""


def resume(path: Path, json: bool) -> None:
    folder = RunFolder(path)
    if folder.finished:
        raise ValueError(f"the run in {str(path)!r} is finished: its numbers are in {folder.path / 'result.json'}")
    with _interruptible(str(path)):
        result = resume_run(path, quiet=json)
    _show(result, str(path), as_json=json)


@contextmanager
def _interruptible(out: str) -> Iterator[None]:
    """An interrupted run says how to go on with it."""
    try:
        yield
    except KeyboardInterrupt:
        if speaks() and RunFolder(out).exists:
            print_error(f"interrupted; go on with: outeffhop resume {out}")
        raise
    # its threads must end before the interpreter does
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _config_in(arguments: Sequence[str]) -> RunConfig:
    found = None
    for at, word in enumerate(arguments):
        if word == "--config" and at + 1 < len(arguments):
            found = arguments[at + 1]
        if word.startswith("--config="):
            found = word.removeprefix("--config=")
    return RunConfig() if found is None else from_yaml(found)


def _show_plan(run: RunConfig, as_json: bool) -> None:
    from outeffhop.lab.training.estimate import estimate
    from outeffhop.lab.training.recipes import resolve
    from outeffhop.lab.training.run import prepare_data

    resolved = resolve(run)
    found = estimate(resolved, prepare_data(resolved))
    if as_json:
        print_json({"config": to_dict(resolved), "estimate": dataclasses.asdict(found)})
        return
    print(to_yaml(resolved))
    rows = [
        ("parameters", f"{found.parameters:,}"),
        ("samples per step", f"{found.samples_per_step:,}"),
        *([("tokens per step", f"{found.tokens_per_step:,}")] if found.tokens_per_step else []),
        ("epochs", f"{found.epochs:.2f}"),
        ("floating point operations per step", f"{found.flops_per_step:.3g}"),
        ("time, roughly", _duration(found.seconds)),
        ("memory, roughly", f"{found.memory_mib:,.0f} MiB"),
    ]
    print_table("What it will cost", ("", ""), rows)


def _show(result: Result, out: str, as_json: bool) -> None:
    if not speaks():
        return
    if as_json:
        print_json(to_plain(dataclasses.asdict(result)))
        return
    values: dict[str, Any] = {
        **result.metrics,
        "max inf norm": result.max_inf_norm,
        "avg kurtosis": result.avg_kurtosis,
    }
    title = f"{out} after {result.steps} steps{', stopped early' if result.stopped_early else ''}"
    print_table(title, ("metric", "validation"), [(k, f"{v:.4g}") for k, v in values.items()])
    print(f"The model is in {Path(out) / 'model'}; next: outeffhop outliers {out} --out {out}/report")


def _duration(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {name}"
    return f"{seconds:.0f} seconds"
