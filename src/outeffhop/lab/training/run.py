"""Training from a config to a run's folder, and on from where a run stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, TrainingArguments, set_seed
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.utils import logging

from outeffhop import __version__
from outeffhop._dataclass_io import JsonReport
from outeffhop._io import read_json, write_whole
from outeffhop.lab.data import Prepared, prepare
from outeffhop.lab.training.callbacks import Interrupt, Journal, Patience
from outeffhop.lab.training.card import CARD, model_card
from outeffhop.lab.training.checks import check_device, check_run
from outeffhop.lab.training.config import RunConfig, to_dict
from outeffhop.lab.training.processes import roll_call
from outeffhop.lab.training.recipes import TASK, resolve
from outeffhop.lab.training.rundir import RunFolder
from outeffhop.lab.training.sharding import shard
from outeffhop.lab.training.trainer import RunTrainer
from outeffhop.models import convert, model_summary, presets
from outeffhop.models.checkpoint import load_checkpoint

__all__ = ["train", "resume", "build", "prepare_data", "Result"]

_CHIEF = {"mlm": ("eval_loss", False), "clm": ("eval_loss", False)} | {
    "classification": ("eval_accuracy", True),
    "forecasting": ("eval_mse", False),
}
_PACKAGES = ("torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True)
class Result(JsonReport):
    """How a run ended; ``result.json``.

    Attributes:
        steps: taken in all.
        metrics: of the last evaluation on the validation set.
        max_inf_norm, avg_kurtosis: as the paper measures them, of the last model.
        stopped_early: no gain for ``train.patience`` evaluations.
    """

    steps: int
    metrics: dict[str, float]
    max_inf_norm: float
    avg_kurtosis: float
    stopped_early: bool


def train(config: RunConfig, *, resume: bool = False, quiet: bool = False) -> Result:
    """Trains a model as the config says, into its folder ``config.out``.

    Args:
        config: fields left at None are filled in by the recipe.
        resume: go on from the last whole checkpoint where ``out`` holds a run of this config already.
        quiet: no progress on the terminal.
    """
    config = resolve(config)
    if not config.out:
        raise ValueError("out is missing: the folder of the run")
    folder = RunFolder(config.out)
    fresh = not (folder.exists and resume)
    if not fresh:
        _check_same(folder.config(), config)
        if folder.finished:
            return Result.load(folder.path / "result.json")
    elif _rank() == 0:
        folder.check_new()
    with folder.locked() if _rank() == 0 else nullcontext():
        return _run(config, folder, quiet, fresh)


def resume(path: str | Path, *, quiet: bool = False) -> Result:
    """Goes on with the run in a folder from its last whole checkpoint, to the numbers it would have had.

    A finished run without checkpoints is left as it is, and says its numbers again.
    """
    folder = RunFolder(path)
    config = dataclasses.replace(folder.config(), out=str(path))
    if folder.finished and folder.last_checkpoint() is None:  # it would begin again
        return Result.load(folder.path / "result.json")
    with folder.locked() if _rank() == 0 else nullcontext():
        return _run(config, folder, quiet, fresh=False)


def prepare_data(config: RunConfig) -> Prepared:
    """The data of a resolved config."""
    samples = {k: v for k, v in dataclasses.asdict(config.samples).items() if v is not None}
    if config.init is not None and TASK[config.model] in ("mlm", "clm") and "tokenizer" not in samples:
        samples["tokenizer"] = config.init  # another one's ids would mean nothing to the weights
    return prepare(config.data, TASK[config.model], seed=config.train.seed, **samples)


def build(config: RunConfig, changes: dict[str, Any]) -> PreTrainedModel:
    """The model of a resolved config; ``changes`` are those the data asks for."""
    logging.disable_progress_bar()  # transformers' own, for every file it reads or writes
    if config.init is not None:
        return convert(load_checkpoint(config.init), config.method)
    if config.model in ("bert", "opt"):
        longest = presets.config(config.model, config.preset).max_position_embeddings
        changes = {**changes, "max_position_embeddings": max(longest, config.samples.length or 0)}
    return presets.build(config.model, config.preset, config.method, **{**changes, **config.changes})


def _run(config: RunConfig, folder: RunFolder, quiet: bool, fresh: bool) -> Result:
    arguments = _arguments(config, folder)
    with roll_call(folder, config.train.timeout):
        return _trained(config, folder, arguments, quiet, fresh)


def _trained(config: RunConfig, folder: RunFolder, arguments: TrainingArguments, quiet: bool, fresh: bool) -> Result:
    train = config.train
    if arguments.world_size > 1 and (train.batch_size or 1) % (arguments.world_size * train.accumulate):
        raise ValueError(
            f"train.batch_size={train.batch_size} does not divide by {arguments.world_size} processes times "
            f"train.accumulate={train.accumulate}: batch_size counts the samples of a whole step"
        )
    if train.fsdp and not dist.is_initialized():
        raise ValueError("train.fsdp=True shards over the processes of torchrun: start it with torchrun")
    with arguments.main_process_first(desc="data"):
        prepared = prepare_data(config)
    set_seed(train.seed)
    model: Any = build(config, prepared.changes)
    check_run(config, model, prepared)
    last = folder.last_checkpoint()
    if arguments.process_index == 0:  # nothing is wrong with the config: the run begins
        if fresh:
            folder.create(config)
        folder.clean()
        folder.write_json("env.json", _began(folder) | _environment(config, model, prepared, arguments))
        folder.forget_after(json.loads((last / "progress.json").read_text())["lines"] if last else 0)
    if getattr(model.config, "use_cache", False):
        model.config.use_cache = False  # a cache serves generation, and breaks the graph of torch.compile
    if train.fsdp:
        shard(model.to(arguments.device), arguments.device, train.precision)
    tokens = config.samples.length if prepared.tokenizer is not None else None
    journal = Journal(train.batch_size or 1, tokens, quiet)
    callbacks: list[Any] = [journal]
    if train.patience:
        callbacks.append(Patience(train.patience, *_CHIEF[prepared.task]))
    if train.track == "tensorboard":
        callbacks.append(TensorBoardCallback())
        callbacks[-1].logging_dir = str(folder.path / "track")
    with Interrupt() as interrupt:
        trainer = RunTrainer(
            model, arguments, train, prepared, folder, config.model == "opt", callbacks=[*callbacks, interrupt]
        )
        journal.trainer = trainer
        for unwanted in ("PrinterCallback", "ProgressCallback"):
            for callback in [c for c in trainer.callback_handler.callbacks if type(c).__name__ == unwanted]:
                trainer.remove_callback(callback)
        try:
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
        finally:
            journal.stop()
    if interrupt.ended:
        raise KeyboardInterrupt
    trainer.check_finite()
    with folder.writing("the last model"):
        return _finish(trainer, folder, config)


def _finish(trainer: RunTrainer, folder: RunFolder, config: RunConfig) -> Result:
    """The last numbers, and the model as a checkpoint of its own."""
    metrics = trainer.evaluate()
    report = trainer.measure_outliers()
    state = trainer.state
    result = Result(
        steps=state.global_step,
        metrics={k.removeprefix("eval_"): v for k, v in metrics.items()},
        max_inf_norm=report.max_inf_norm,
        avg_kurtosis=report.avg_kurtosis,
        stopped_early=state.global_step < (config.train.max_steps or 0),
    )
    weights = trainer.whole_weights()
    if trainer.is_world_process_zero():
        side = folder.path / ".tmp-model"
        shutil.rmtree(side, ignore_errors=True)
        trainer.model.save_pretrained(side, state_dict=weights)
        if trainer.prepared.tokenizer is not None:
            trainer.prepared.tokenizer.save_pretrained(side)
        write_whole(side / CARD, model_card(folder, dataclasses.asdict(result)))
        shutil.rmtree(folder.model, ignore_errors=True)
        os.replace(side, folder.model)
        report.save(folder.path / "outliers.json")
        folder.write_json("result.json", dataclasses.asdict(result))
    return result


def _arguments(config: RunConfig, folder: RunFolder) -> TrainingArguments:
    train = config.train
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_device(train)
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    # sharded weights have their precision from the sharding itself
    precision = {} if train.fsdp else {"bf16": train.precision == "bf16", "fp16": train.precision == "fp16"}
    if train.track != "none" and find_spec(train.track) is None:
        raise ValueError(f"train.track={train.track!r} is not installed: pip install 'outeffhop[tracking]'")
    settings: dict[str, Any] = dict(
        output_dir=str(folder.checkpoints),
        use_cpu=on_cpu,
        max_steps=train.max_steps,
        per_device_train_batch_size=max((train.batch_size or 1) // (train.accumulate * world), 1),
        gradient_accumulation_steps=train.accumulate,
        max_grad_norm=train.clip_norm,
        seed=train.seed,
        logging_steps=train.log_steps,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=train.save_steps,
        eval_strategy="steps",
        eval_steps=train.eval_steps,
        report_to=[]
        if train.track in ("none", "tensorboard")
        else [train.track],  # tensorboard: with its folder, above
        run_name=folder.path.name,
        torch_compile=train.compile,
        tf32=False,  # or torch_compile turns it on for this process, and what is measured after training is rounded
        gradient_checkpointing=train.gradient_checkpointing,
        dataloader_num_workers=train.workers,
        dataloader_drop_last=True,
        dataloader_pin_memory=not on_cpu,
        accelerator_config={"non_blocking": not on_cpu},  # or every batch would wait for the GPU to be done
        remove_unused_columns=False,
        disable_tqdm=True,
        ddp_backend="gloo" if on_cpu and world > 1 else None,
        ddp_timeout=train.timeout,
        ddp_find_unused_parameters=False,  # there are none, and looking for them costs a pass over the graph
        **precision,
    )
    if on_cpu and world > 1 and not dist.is_initialized():  # TrainingArguments would, on a CPU without the timeout
        dist.init_process_group("gloo", timeout=timedelta(seconds=train.timeout))
    arguments = TrainingArguments(**settings)
    if arguments.n_gpu > 1:
        arguments._n_gpu = 1  # or Trainer gives each GPU here a batch of its own; torchrun is the way to use them all
    return arguments


def _check_same(old: RunConfig, new: RunConfig) -> None:
    """A run goes on as it began, but for how often it looks and saves."""
    free = {
        "out",
        "eval_steps",
        "log_steps",
        "save_steps",
        "keep",
        "workers",
        "track",
        "cache_dir",
        "device",
        "timeout",
    }
    a, b = _flat(to_dict(old)), _flat(to_dict(new))
    for key in a | b:
        if key.split(".")[-1] not in free and a.get(key) != b.get(key):
            raise ValueError(
                f"the run in {new.out!r} was begun with {key}={a.get(key)!r}, not {b.get(key)!r}: "
                "go on as it began (outeffhop resume), or choose another out"
            )


def _flat(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return out


def _environment(
    config: RunConfig, model: PreTrainedModel, prepared: Prepared, arguments: TrainingArguments
) -> dict[str, Any]:
    return {
        "packages": {"outeffhop": __version__, **{name: version(name) for name in _PACKAGES}},
        "python": platform.python_version(),
        "device": "cpu" if arguments.use_cpu else torch.cuda.get_device_name(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": arguments.world_size,
        "git": _revision(),
        "seed": config.train.seed,
        "parameters": model_summary(model).parameters,
        "data": prepared.about,
    }


def _began(folder: RunFolder) -> dict[str, str]:
    """When the run was begun, however often it went on since."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # it was killed before the file was written
        return {"began": read_json(folder.path / "env.json")["began"]}
    return {"began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _revision() -> str | None:
    """Of the folder the command was given in, where it is a git repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # there is no git here
        return None
    return found.stdout.strip() or None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
