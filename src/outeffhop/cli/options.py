"""The options of every command, each declared once: its flag, its default and its line of help.

Help is built from these classes alone, so this module imports nothing heavy. A command receives its options as one
value and hands on what it needs.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Annotated, Literal, TypeVar

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from outeffhop.cli.usage import one_line_errors
from outeffhop.lab.diagnosis.checkpoint_config import CheckpointConfig
from outeffhop.lab.diagnosis.diagnosis_config import DiagnosisConfig
from outeffhop.lab.mending.mend_config import MendConfig
from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig, from_yaml

__all__ = [
    "Data",
    "Diagnose",
    "Doctor",
    "Evaluate",
    "Mend",
    "Methods",
    "Outliers",
    "Presets",
    "Quantize",
    "Reproduce",
    "Resume",
    "Runs",
    "Train",
    "parse",
    "parse_train",
]

Options = TypeVar("Options")

_Folder = Annotated[str, Positional, arg(metavar="FOLDER")]
# What may be left out shows what to write, not that its default is None.
_Spec = Annotated[str | None, arg(metavar="SPEC", help_behavior_hint="")]
_Text = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
_Path = Annotated[str | None, arg(metavar="FOLDER", help_behavior_hint="")]
_Flag = Annotated[bool, arg(help_behavior_hint="")]
_Count = Annotated[int | None, arg(metavar="N", help_behavior_hint="")]
_Number = Annotated[float | None, arg(metavar="X", help_behavior_hint="")]
_Out = Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")]
_N = Annotated[int, arg(metavar="N")]


@dataclass(frozen=True)
class Train:
    """Train a model.

    Example: outeffhop train --model opt --method outeffhop --data builtin:text --out runs/a

    Attributes:
        run: the run.
        config: a YAML file with any of the fields below; flags override it.
        resume: auto continues the run in --out, if there is one.
        dry_run: print the resolved config and what it will cost; train nothing.
        json: print JSON instead of tables.
    """

    run: Annotated[RunConfig, arg(name="")] = field(default_factory=RunConfig)
    config: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    resume: Literal["never", "auto"] = "never"
    dry_run: _Flag = False
    json: _Flag = False


@dataclass(frozen=True)
class Doctor:
    """Show what is installed, and which attention backends work on this machine.

    Example: outeffhop doctor --json

    Attributes:
        json: print JSON instead of tables.
    """

    json: _Flag = False


@dataclass(frozen=True)
class Methods:
    """List the attention methods and their parameters.

    Example: outeffhop methods 'outeffhop(n=4)'

    Attributes:
        name: show this method in full; all methods by default.
        json: print JSON instead of tables.
    """

    name: Annotated[str | None, Positional, arg(metavar="[METHOD]", help_behavior_hint="")] = None
    json: _Flag = False


@dataclass(frozen=True)
class Presets:
    """List the models and sizes, with the paper's parameter counts beside ours.

    Example: outeffhop presets

    Attributes:
        json: print JSON instead of tables.
    """

    json: _Flag = False


@dataclass(frozen=True)
class Data:
    """List the available data, or show what a spec gives.

    Example: outeffhop data builtin:text

    Attributes:
        spec: builtin:text, builtin:images, builtin:series, a path, or hub:NAME[/CONFIG]; by default, list them all.
        task: mlm, clm, seq2seq, classification, forecasting or embedding: refuse data that cannot serve it.
        json: print JSON instead of tables.
    """

    spec: Annotated[str | None, Positional, arg(metavar="[SPEC]", help_behavior_hint="")] = None
    task: _Text = None
    json: _Flag = False


@dataclass(frozen=True, kw_only=True)
class Checkpoint(CheckpointConfig):
    """A checkpoint, and the data it is measured on.

    Attributes:
        json: print JSON instead of tables.
    """

    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    data: _Spec = None
    batch_size: _N = 32
    batches: _Count = None
    length: _Count = None
    tokenizer: _Path = None
    task: _Text = None
    dtype: Annotated[Literal["float32", "bfloat16", "float16"] | None, arg(metavar="NAME", help_behavior_hint="")] = (
        None
    )
    device: _Text = None
    trust_remote_code: _Flag = False
    json: _Flag = False


@dataclass(frozen=True, kw_only=True)
class Evaluate(Checkpoint):
    """Compute the metric of a checkpoint on data.

    Example: outeffhop evaluate RUN --split test

    Attributes:
        split: the part of the data to use.
        out: folder for evaluation.json.
    """

    split: Literal["train", "validation", "test"] = "validation"
    out: _Out = None


@dataclass(frozen=True, kw_only=True)
class Diagnose(Checkpoint, DiagnosisConfig):
    """Say what 8 bits cost a checkpoint, why, and what to do.

    Example: outeffhop diagnose CHECKPOINT

    Attributes:
        data: as for `outeffhop data`; by default the data of the run, else built-in text or images.
        compare: another checkpoint, or the folder of its diagnosis, for the page to show beside this one.
        out: folder for diagnosis.json and diagnosis.html; by default diagnosis/NAME.
        batches: measure on at most this many batches.
        calibration_batches: batches of training data that static ranges are found on.
        int8: also export to OUT/int8 and run it (needs outeffhop[int8]).
        no_int8: do not run real int8, as is done for models up to BERT-base's size where outeffhop[int8] is installed.
    """

    compare: Annotated[str | None, arg(metavar="OTHER", help_behavior_hint="")] = None
    out: _Out = None
    batch_size: _N = 4
    batches: Annotated[int | None, arg(metavar="N")] = 2
    calibration_batches: _N = 2
    int8: _Flag = False
    no_int8: _Flag = False


@dataclass(frozen=True, kw_only=True)
class Outliers(Checkpoint):
    """Find the outliers of a checkpoint.

    Example: outeffhop outliers RUN --out DIR

    Attributes:
        out: folder for outliers.json and outliers.html.
        tensors: the tensors the paper measures, or the output of every module.
        batches: measure on at most this many batches.
    """

    out: Annotated[Path, arg(metavar="FOLDER")]
    tensors: Literal["paper", "all"] = "paper"
    batches: _N = 16
    batch_size: _N = 16


@dataclass(frozen=True, kw_only=True)
class Quantize(Checkpoint):
    """Measure what quantization costs a checkpoint.

    Example: outeffhop quantize RUN --out RUN

    Attributes:
        bits: of weights and activations, 2 to 16; W8A8KV8: the KV cache too.
        scheme: all that the paper quantizes, Linear layers, or a rival.
        range: of activations: running (default), minmax (of smoothquant), percentile or mse.
        calibration_batches: batches of training data for each seed.
        seeds: number of calibration draws; mean ± std.
        out: folder for quantization.json.
        exclude: patterns of modules or tensors that stay in floating point, such as --exclude '*.layer.0.*'.
        fold_layernorm: fold the scale of LayerNorms into the next layers first.
        save: folder for a checkpoint to deploy (needs outeffhop[deploy]).
        int8: also export to OUT/int8 and run it (needs outeffhop[int8]).
    """

    bits: str = "W8A8"
    scheme: Literal["paper", "linear", "per-channel", "per-token", "smoothquant", "fp8"] = "paper"
    range: Annotated[
        Literal["running", "minmax", "percentile", "mse"] | None,
        arg(metavar="HOW", help_behavior_hint=""),
    ] = None
    calibration_batches: _N = 16
    seeds: _N = 3
    out: _Out = None
    exclude: tuple[str, ...] = ()
    fold_layernorm: _Flag = False
    save: _Out = None
    int8: _Flag = False


@dataclass(frozen=True, kw_only=True)
class Mend(MendConfig):
    """Remove the outliers of a trained model, so that it survives 8 bits.

    Example: outeffhop mend CHECKPOINT --data text/ --out mended

    Attributes:
        resume: auto continues the mending in --out, if there is one.
        json: print JSON instead of tables.
    """

    checkpoint: Annotated[str, Positional, arg(metavar="CHECKPOINT")]
    data: Annotated[str, arg(metavar="SPEC")]
    out: Annotated[str, arg(metavar="FOLDER")]
    method: Annotated[str, arg(metavar="auto|NAME")] = "auto"
    steps: _Count = None
    minutes: _Number = None
    penalty: _Number = None
    lr: _Number = None
    teacher: _Path = None
    plain: _Flag = False
    batch_size: _N = 16
    accumulate: _N = 1
    length: _Count = None
    tokenizer: _Path = None
    batches: _N = 16
    calibration_batches: _N = 16
    seeds: _N = 1
    seed: _N = 0
    gradient_checkpointing: _Flag = False
    device: Annotated[Literal["cpu", "cuda"] | None, arg(metavar="cpu|cuda", help_behavior_hint="")] = None
    resume: Literal["never", "auto"] = "never"
    json: _Flag = False


@dataclass(frozen=True)
class Resume:
    """Continue an interrupted run or mending.

    Example: outeffhop resume runs/a

    Attributes:
        run: its folder.
        json: print JSON instead of tables.
    """

    run: _Folder
    json: _Flag = False


@dataclass(frozen=True)
class Runs:
    """List the runs in a folder, with their metrics.

    Example: outeffhop runs runs

    Attributes:
        folder: where to look.
        json: print JSON instead of tables.
    """

    folder: Annotated[str, Positional, arg(metavar="[FOLDER]")] = "runs"
    json: _Flag = False


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a table or figure of the paper.

    Example: outeffhop reproduce energy --out results

    Attributes:
        name: an experiment, or all; by default, list the experiments.
        scale: tiny takes two CPU cores, small one GPU, paper what the paper used.
        seeds: number of seeds, 3 or at paper scale the paper's; ten in memory experiments, except at tiny scale.
        out: folder for results, figures and report.html; cells measured there earlier are kept.
        data: folder with the public data sets (prose/, cifar10/, mnist/, ett/, wth/, mil/); not needed at tiny scale.
        text: what BERT and OPT learn from instead of a folder in data, such as hub:NAME.
        tokenizer: of BERT and OPT: a folder, hub:NAME or trained; at paper scale their own.
        workers: cells measured at the same time.
        device: cuda if available, otherwise cpu.
        quick: cut down to seconds, to see that it runs; the numbers mean nothing.
        only: measure only these cells, such as --only 'opt-*' 'bert-vanilla-0', combined with cells measured earlier.
        dry_run: print each setting beside the paper's, and measure nothing.
        json: print JSON instead of tables.
    """

    name: Annotated[str | None, Positional, arg(metavar="[NAME|all]", help_behavior_hint="")] = None
    scale: Literal["tiny", "small", "paper"] = "tiny"
    seeds: _Count = None
    out: Annotated[Path, arg(metavar="FOLDER")] = Path("results")
    data: _Out = None
    text: _Text = None
    tokenizer: _Text = None
    workers: _N = 1
    device: _Text = None
    quick: _Flag = False
    only: tuple[str, ...] = ()
    dry_run: _Flag = False
    json: _Flag = False


def parse(kind: type[Options], command: str, words: Sequence[str], default: Options | None = None) -> Options:
    """The options that the words of a command line give. Prints help, or what is wrong, and exits where asked to."""
    if command in _SHORT_HELP and {"-h", "--help"} & set(words):
        print(_SHORT_HELP[command]())
        sys.exit(0)
    words = ["--help" if word == "--help-all" else word for word in words]
    given = {} if default is None else {"default": default}
    asks = bool({"-h", "--help"} & set(words))  # help is as wide as the terminal

    def parsed(words: Sequence[str]) -> Options:
        with nullcontext() if asks else one_line_errors(command):
            return tyro.cli(kind, prog=f"outeffhop {command}", args=words, config=(FlagCreatePairsOff,), **given)  # type: ignore[call-overload, no-any-return]

    try:
        return parsed(words)
    except ValueError as error:
        if str(error).startswith("checkpoint needs") or str(error).startswith("run needs"):
            parsed(["-", *words])  # the parser takes an unknown flag before these for them; after them it is named
        raise


def parse_train(words: Sequence[str]) -> Train:
    """The options of ``train``, whose defaults are those of the file given by ``--config``."""
    config = None if {"-h", "--help"} & set(words) else _config_in(words)
    default = RunConfig() if config is None else from_yaml(config)
    # tyro would make one flag for each name of a mapping that is not empty, and accept no others
    start = Train(run=dataclasses.replace(default, changes={}))
    chosen = parse(Train, "train", words, start)
    changes = {**default.changes, **chosen.run.changes}
    return dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, changes=changes))


def _config_in(words: Sequence[str]) -> str | None:
    found = None
    for at, word in enumerate(words):
        if word == "--config" and at + 1 < len(words):
            found = words[at + 1]
        if word.startswith("--config="):
            found = word.removeprefix("--config=")
    return found


def _train_help() -> str:
    """One screen: what every run needs, and the names of the rest."""

    def names(kind: type[TrainConfig] | type[DataConfig]) -> str:
        found = ", ".join(f.name.replace("_", "-") for f in dataclasses.fields(kind))
        return fill(found, 90, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)

    return f"""\
usage: outeffhop train --data SPEC --out FOLDER [options]

Example: outeffhop train --model opt --method outeffhop --data builtin:text --out runs/a

  --model bert|opt|vit|stanhop     or a folder with a config.json; default: opt
  --preset tiny|small|paper        its size; default: tiny
  --method NAME    attention method (see outeffhop methods); default: outeffhop
  --data SPEC      training data (see outeffhop data)
  --out FOLDER     folder of the run; must not hold a run yet
  --init FOLDER    start from this checkpoint of any transformers model, converted to the method
  --teacher FOLDER imitate the outputs of this checkpoint instead of learning from labels
  --task NAME      mlm, clm, seq2seq, classification, forecasting; by default that of the model
  --changes NAME VALUE ...         fields of the model's config
  --config FILE    YAML with any of these; flags override it
  --resume auto    continue the run in --out, if there is one
  --dry-run        print the whole config and what it will cost; train nothing
  --json           print JSON
  --train.NAME VALUE; the defaults are those of the recipe for the model and size:
{names(TrainConfig)}
  --samples.NAME VALUE; likewise:
{names(DataConfig)}
  --help-all       explain each of them"""


def _mend_help() -> str:
    """One screen: what most people need, and the names of the rest."""
    return """\
usage: outeffhop mend CHECKPOINT --data SPEC --out FOLDER [options]

Example: outeffhop mend CHECKPOINT --data text/ --out mended

Remove the outliers of a trained model, so that it survives 8 bits. CHECKPOINT is the folder of any
transformers model of text or images; it is never changed. The result is in OUT/model, OUT/mend.json
and OUT/mend.html.

  --data SPEC      what the model is fine-tuned and measured on (see outeffhop data)
  --out FOLDER     must be new or empty
  --minutes X      of fine-tuning; default: 10
  --steps N        optimizer steps, instead of minutes
  --method NAME    auto (default) keeps the architecture; others convert to a method
  --teacher FOLDER imitate this checkpoint instead of learning from labels; it may be CHECKPOINT
  --plain          also fine-tune without any remedy, to compare with; takes as long again
  --penalty X      weight of the penalty on outliers; default: 0.02, with a teacher 0.01
  --weight-bound X largest weight of a matrix in its standard deviations; default: 16
  --lr X           highest learning rate; default: 3e-4 with labels, 2e-4 or less otherwise
  --batch-size N   samples per step; default: 16
  --length N       tokens per sample; default: 512 for causal models, 128 for others
  --precision fp32|bf16            default: fp32
  --resume auto    continue the mending in --out, if there is one
  --json           print JSON
  also: --accumulate --batches --calibration-batches --device --gradient-checkpointing --seed --seeds
        --tokenizer
  --help-all       explain each of them"""


def _quantize_help() -> str:
    """One screen: what most people need, and the names of the rest."""
    return """\
usage: outeffhop quantize CHECKPOINT [options]

Measure what quantization costs a checkpoint.

Example: outeffhop quantize RUN --out RUN

CHECKPOINT is the folder of a run or of a saved model, a GGUF file, or a model's name on the Hugging
Face hub. `outeffhop diagnose` compares all schemes in one command.

  --data SPEC      as for outeffhop data; by default the data of the run
  --scheme NAME    paper (default), linear, per-channel, per-token, smoothquant or fp8
  --bits STR       of weights and activations, 2 to 16; W8A8KV8: the KV cache too; default: W8A8
  --range HOW      of activations: running (default), minmax (of smoothquant), percentile or mse
  --exclude P ...  modules or tensors that stay in floating point, such as --exclude '*.layer.0.*'
  --fold-layernorm fold the scale of LayerNorms into the next layers first
  --batches N      measure on at most this many batches; all by default
  --calibration-batches N          of training data for each seed; default: 16
  --seeds N        calibration draws, mean ± std; default: 3
  --out FOLDER     for quantization.json
  --save FOLDER    write a checkpoint to deploy (needs outeffhop[deploy])
  --int8           also export to OUT/int8 and run it (needs outeffhop[int8])
  --json           print JSON
  also: --batch-size --device --dtype --length --task --tokenizer --trust-remote-code
  --help-all       explain each of them"""


# commands with more flags than a screen has lines
_SHORT_HELP = {"train": _train_help, "mend": _mend_help, "quantize": _quantize_help}
