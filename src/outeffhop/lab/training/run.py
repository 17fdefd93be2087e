"""Trains a config into a run's folder, and resumes a run from where it stopped."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shutil
import subprocess
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, PreTrainedModel, TrainerState, set_seed
from transformers.integrations import TensorBoardCallback  # type: ignore[attr-defined]

from outeffhop import __version__
from outeffhop._dataclass_io import JsonReport
from outeffhop._io import read_json, remove_folder, write_whole
from outeffhop._naming import require
from outeffhop.lab.data import Prepared, prepare
from outeffhop.lab.data.image_settings import image_fields
from outeffhop.lab.training.callbacks import Interrupt, Journal, KeepBest, Patience
from outeffhop.lab.training.card import CARD, model_card
from outeffhop.lab.training.checks import check_run, chosen_tensors
from outeffhop.lab.training.chief_metric import CHIEF_METRICS
from outeffhop.lab.training.config import RunConfig, TrainConfig, to_dict
from outeffhop.lab.training.imitation import without_dropout
from outeffhop.lab.training.nonfinite import NotFinite
from outeffhop.lab.training.processes import roll_call
from outeffhop.lab.training.recipes import counts_epochs, in_steps, resolve
from outeffhop.lab.training.rundir import RunFolder, step_of
from outeffhop.lab.training.sharding import shard
from outeffhop.lab.training.starting_model import first_model, has_tokenizer, load_teacher
from outeffhop.lab.training.trainer import RunTrainer
from outeffhop.lab.training.trainer_arguments import RunArguments, trainer_arguments
from outeffhop.lab.training.training_state import model_state
from outeffhop.lab.training.weight_bounds import WeightBounds
from outeffhop.models import model_summary
from outeffhop.outliers import OutlierPenalty

__all__ = ["train", "resume", "prepare_data", "Result"]

_PACKAGES = ("torch", "transformers", "accelerate", "numpy")


@dataclass(frozen=True)
class Result(JsonReport):
    """How a run ended; ``result.json``.

    Attributes:
        steps: the number of steps taken.
        metrics: those of the saved model on the validation set.
        max_inf_norm, avg_kurtosis: outliers of the saved model, as the paper measures them.
        stopped_early: whether ``train.patience`` evaluations without improvement ended it.
        best_step: the step whose model was saved; None without ``train.keep_best``, which saves the last one.
    """

    steps: int
    metrics: dict[str, float]
    max_inf_norm: float
    avg_kurtosis: float
    stopped_early: bool
    best_step: int | None = None


def train(config: RunConfig, *, resume: bool = False, quiet: bool = False) -> Result:
    """Trains a model as the config says, into its folder ``config.out``.

    Args:
        config: fields left at None are filled in by the recipe.
        resume: if ``out`` holds a run of this config already, continue it from its last whole checkpoint.
        quiet: show no progress.
    """
    require("accelerate")
    config = resolve(config)
    if not config.out:
        raise ValueError("out is missing: name the folder of the run")
    folder = RunFolder(config.out)
    fresh = not (folder.exists and resume)
    if fresh and _rank() == 0:
        folder.check_new()
    prepared = None
    if counts_epochs(config.train):
        prepared = prepare_data(config)
        config = in_steps(config, prepared)
    if not fresh:
        _check_same(folder.config(), config)
        if folder.finished:
            return Result.load(folder.path / "result.json")
    with folder.locked() if _rank() == 0 else nullcontext():
        return _run(config, folder, quiet, fresh, prepared)


def resume(path: str | Path, *, quiet: bool = False) -> Result:
    """Continues the run in a folder from its last whole checkpoint, to the numbers it would have reached.

    A finished run without checkpoints is left as it is; its result is returned.
    """
    require("accelerate")
    folder = RunFolder(path)
    config = dataclasses.replace(folder.config(), out=str(path))
    if folder.finished and folder.last_checkpoint() is None:  # it would start from the beginning
        return Result.load(folder.path / "result.json")
    with folder.locked() if _rank() == 0 else nullcontext():
        return _run(config, folder, quiet, fresh=False)


def prepare_data(config: RunConfig) -> Prepared:
    """The data of a resolved config."""
    samples = {k: v for k, v in dataclasses.asdict(config.samples).items() if v is not None}
    if config.init is not None and samples.get("image_size"):  # the weights know images of this kind only
        sizes = AutoConfig.from_pretrained(config.init, local_files_only=True, trust_remote_code=False)
        samples = {**image_fields(sizes, config.init), **samples}
    own = config.init or (config.model if has_tokenizer(str(config.model)) else None)
    if own is not None and "vocab_size" in samples and "tokenizer" not in samples:
        samples["tokenizer"] = own  # the weights know no other tokenizer's ids
    return prepare(config.data, str(config.task), seed=config.train.seed, **samples)


def _check_version(folder: RunFolder) -> None:
    """Refuses to continue a run of an earlier version, whose checkpoints have another form."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        began = str(read_json(folder.path / "env.json")["packages"]["outeffhop"])
        if began.split(".")[:2] != __version__.split(".")[:2]:
            raise RuntimeError(
                f"the run in {str(folder.path)!r} was started by outeffhop {began}, this is {__version__}: continue it "
                "with that version, or start another"
            )


def _run(config: RunConfig, folder: RunFolder, quiet: bool, fresh: bool, prepared: Prepared | None = None) -> Result:
    if not fresh:
        _check_version(folder)
    arguments = trainer_arguments(config, folder)
    with roll_call(folder, config.train.timeout):
        return _trained(config, folder, arguments, quiet, fresh, prepared)


def _trained(
    config: RunConfig,
    folder: RunFolder,
    arguments: RunArguments,
    quiet: bool,
    fresh: bool,
    prepared: Prepared | None,
) -> Result:
    train = config.train
    if arguments.world_size > 1 and (train.batch_size or 1) % (arguments.world_size * train.accumulate):
        raise ValueError(
            f"train.batch_size={train.batch_size} is not divisible by {arguments.world_size} processes times "
            f"train.accumulate={train.accumulate}: batch_size counts the samples of a whole step"
        )
    if train.fsdp and not dist.is_initialized():
        raise ValueError("train.fsdp=True shards over the processes of torchrun: start the run with torchrun")
    with arguments.main_process_first(desc="data"):
        prepared = prepared or prepare_data(config)
    set_seed(train.seed)
    model, schedule = first_model(config, prepared, arguments.device)
    check_run(config, model, prepared)
    bounds = WeightBounds(model, train.weight_bound, (train.max_steps or 1) // 2) if train.weight_bound else None
    teacher = load_teacher(config, model, arguments.device)
    if teacher is not None:
        without_dropout(model)
    chief = CHIEF_METRICS[prepared.task]
    # a model that the schedule still moves is not the method's yet; it moves before a step, and evaluation comes after
    best = KeepBest(chief, 0 if schedule is None else schedule.steps + 1) if train.keep_best else None
    last = folder.last_checkpoint(None if best is None else best.step_at)
    if schedule is not None and last is not None:  # its weights are loaded into what there was at its last step
        schedule.apply(model, step_of(last) - 1)
    if arguments.process_index == 0:  # all checks have passed: the run begins
        if fresh:
            folder.create(config)
        folder.clean()
        folder.write_json("env.json", _began(folder) | _environment(config, model, prepared, arguments))
        folder.forget_after(json.loads((last / "progress.json").read_text())["lines"] if last else 0)
    penalty = None
    if train.penalty:
        chosen = chosen_tensors(str(train.penalty_tensors))
        penalty = OutlierPenalty(
            model, train.penalty, kind=train.penalty_kind, tensors=chosen, warmup_steps=train.warmup_steps or 0
        )
    if train.fsdp:
        shard(model.to(arguments.device), arguments.device, train.precision)
    tokens = config.samples.length if prepared.tokenizer is not None else None
    journal = Journal(folder, train.batch_size or 1, tokens, quiet)
    patience = Patience(train.patience, chief) if train.patience else None
    moving = [part.callback() for part in (schedule, penalty) if part is not None]
    if bounds is not None:
        moving.append(bounds.callback(model))
    callbacks: list[Any] = [*moving, journal, *(part for part in (patience, best) if part is not None)]
    if train.track == "tensorboard":
        callbacks.append(TensorBoardCallback())
        callbacks[-1].logging_dir = str(folder.path / "track")
    with Interrupt() as interrupt:
        trainer = RunTrainer(
            model,
            arguments,
            train,
            prepared,
            folder,
            decay_norms=config.model == "opt",
            penalty=penalty,
            teacher=teacher,
            checkpoint=last,
            over=last is not None and _over(last, train, patience),
            best=best,
            callbacks=[*callbacks, interrupt],
        )
        try:
            trainer.train()
        except BaseException as error:
            if isinstance(error, NotFinite) and arguments.process_index == 0:
                folder.abandon()
            if train.workers:  # they end with the loader's iterator, which the traceback's frames keep alive
                traceback.clear_frames(error.__traceback__)
            raise
        finally:
            journal.stop()
    if interrupt.ended:
        raise KeyboardInterrupt
    trainer.check_finite()
    if penalty is not None:
        penalty.remove()
    best_step = trainer.restore_best()
    with folder.writing("the last model"):
        return _finish(trainer, folder, config, best_step)


def _over(checkpoint: Path, train: TrainConfig, patience: Patience | None) -> bool:
    """Whether a run was killed after its last step, while the result was measured and written."""
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    return state.global_step >= (train.max_steps or 0) or (patience is not None and patience.spent(state.log_history))


def _finish(trainer: RunTrainer, folder: RunFolder, config: RunConfig, best_step: int | None) -> Result:
    """Measures and writes the result, and saves the model as a checkpoint of its own."""
    metrics = trainer.evaluate()
    report = trainer.measure_outliers()
    state = trainer.state
    result = Result(
        steps=state.global_step,
        metrics={k.removeprefix("eval_"): v for k, v in metrics.items()},
        max_inf_norm=report.max_inf_norm,
        avg_kurtosis=report.avg_kurtosis,
        stopped_early=state.global_step < (config.train.max_steps or 0),
        best_step=best_step,
    )
    weights = model_state(trainer.model)
    if trainer.is_world_process_zero():
        side = folder.path / ".tmp-model"
        shutil.rmtree(side, ignore_errors=True)
        trainer.save_pretrained(side, weights)
        write_whole(side / CARD, model_card(folder, config, dataclasses.asdict(result)))
        remove_folder(folder.model)
        os.replace(side, folder.model)
        report.save(folder.path / "outliers.json")
        folder.write_json("result.json", dataclasses.asdict(result))
    return result


def _check_same(old: RunConfig, new: RunConfig) -> None:
    """Raises if a run would continue with other settings; how often it measures and saves may change."""
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
                f"the run in {new.out!r} was started with {key}={a.get(key)!r}, not {b.get(key)!r}: "
                "continue it with its own settings (outeffhop resume), or choose another out"
            )


def _flat(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= _flat(value, f"{at}{key}.") if isinstance(value, dict) else {f"{at}{key}": value}
    return out


def _environment(
    config: RunConfig, model: PreTrainedModel, prepared: Prepared, arguments: RunArguments
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
    """When the run was first started."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # it was killed before the file was written
        return {"began": read_json(folder.path / "env.json")["began"]}
    return {"began": time.strftime("%Y-%m-%dT%H:%M:%S%z")}


def _revision() -> str | None:
    """The git revision of the current folder, if it is in a repository."""
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return found.stdout.strip() or None


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
