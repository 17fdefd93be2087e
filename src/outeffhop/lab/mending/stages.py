"""Mends a checkpoint: measures it, fine-tunes it against its outliers, measures it again, and writes both down.

    OUT/mend.yaml  before.json  run/  [plain/  plain.json]  after.json  model/  mend.json  mend.html

Every stage leaves a file when it is done, so a mending that was killed goes on after the last one. ``run`` and
``plain`` are training runs with checkpoints of their own.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from outeffhop._io import check_folder, read_json, remove_folder, write_json, write_whole
from outeffhop._naming import require
from outeffhop.lab.data import Prepared
from outeffhop.lab.mending.measuring_models import measured
from outeffhop.lab.mending.mend_config import MendConfig, from_mend_yaml, to_mend_yaml
from outeffhop.lab.mending.mend_recipe import minutes_of, recipe, with_steps
from outeffhop.lab.mending.mend_report import Measured, MendReport
from outeffhop.lab.mending.mending_page import mending_page
from outeffhop.lab.mending.step_time import steps_in
from outeffhop.lab.training import RunConfig, RunFolder, prepare_data, resume, train
from outeffhop.lab.training.checks import check_device, check_run
from outeffhop.lab.training.imitation import Teacher
from outeffhop.lab.training.starting_model import build, load_teacher
from outeffhop.models import load_checkpoint

__all__ = ["mend", "resume_mending", "mending_file"]

_SETTINGS = "mend.yaml"
Tell = Callable[[str], None]


def mend(
    model: str | os.PathLike[str] | PreTrainedModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    resume: bool = False,
    quiet: bool = False,
    progress: Tell | None = None,
    **settings: Any,
) -> MendReport:
    """Mends a trained model, so that it survives quantization to 8 bits. The mended one is saved in ``OUT/model``.

    Args:
        model: folder of a checkpoint, which is never changed; or a model, which is saved to ``OUT/start`` first.
        data: what it is fine-tuned and measured on: a folder or file with text or images, ``builtin:text``, or
            ``hub:NAME``.
        out: a new or empty folder.
        tokenizer: of a text model; by default that in the checkpoint's folder. A tokenizer or the folder of one.
        resume: continue the mending in ``out``, if there is one.
        quiet: show no progress of the fine-tuning.
        progress: called with a few words at the start of each stage.
        settings: the fields of ``MendConfig``, such as ``method``, ``steps``, ``minutes``, ``teacher``, ``plain``.
    """
    place = Path(out).expanduser()
    if isinstance(model, PreTrainedModel):
        model, tokenizer = _saved(model, tokenizer, place, resume)
    config = MendConfig(
        checkpoint=os.fspath(model),
        data=os.fspath(data),
        out=str(place),
        tokenizer=None if tokenizer is None else os.fspath(tokenizer),
        **settings,
    )
    return run_mending(config, resume=resume, quiet=quiet, progress=progress)


def resume_mending(out: str | os.PathLike[str], *, quiet: bool = False, progress: Tell | None = None) -> MendReport:
    """Continues a mending that was interrupted."""
    config = from_mend_yaml(mending_file(out))
    return run_mending(dataclasses.replace(config, out=os.fspath(out)), resume=True, quiet=quiet, progress=progress)


def mending_file(out: str | os.PathLike[str]) -> Path:
    """The file with the settings of a mending; it does not have to exist."""
    return Path(out) / _SETTINGS


def run_mending(
    config: MendConfig, *, resume: bool = False, quiet: bool = False, progress: Tell | None = None
) -> MendReport:
    """Mends as the config says; continues what is in its folder if ``resume``."""
    require("accelerate")
    config.check()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "mend measures and fine-tunes in one process: start it without torchrun; on several GPUs, use "
            "outeffhop train --init CHECKPOINT --train.penalty 0.02 --train.penalty-kind excess_range "
            "--train.weight-bound 16"
        )
    out = Path(config.out)
    begun = mending_file(out).is_file()
    contained = f"out={config.out!r} already contains a mending: continue it with outeffhop resume {out}"
    if begun and not resume:
        raise ValueError(contained)
    if begun:
        _check_same(from_mend_yaml(mending_file(out)), config)
        if (out / "mend.json").is_file():
            _tidy(out)
            return MendReport.load(out / "mend.json")
    elif out.exists() and (not out.is_dir() or any(p.name not in ("run.lock", "start") for p in out.iterdir())):
        raise ValueError(f"out={config.out!r} exists and is not empty: choose a new or an empty folder")
    check_folder(out)
    tell = progress or (lambda _: None)
    tell("reading the checkpoint and the data")
    run = recipe(config)
    prepared = _checked(run)
    with RunFolder(out).locked():
        if not begun:
            if mending_file(out).is_file():  # another process has begun since, and ended
                raise ValueError(contained)
            write_whole(mending_file(out), to_mend_yaml(config))
        return _mended(config, run, prepared, quiet, tell)


def _checked(run: RunConfig) -> Prepared:
    """The data. What would fail later is said before anything is written: the model, its method, its teacher."""
    check_device(run.train)
    prepared = prepare_data(run)
    model = build(run, prepared.changes)
    check_run(run, model, prepared)
    load_teacher(run, model, torch.device("cpu"))
    return prepared


def _mended(config: MendConfig, run: RunConfig, prepared: Prepared, quiet: bool, tell: Tell) -> MendReport:
    logging.disable_progress_bar()
    out, device = Path(config.out), config.device or ("cuda" if torch.cuda.is_available() else "cpu")

    def look(name: str, folder: str | Path, words: str) -> Measured:
        """The measurement kept under a name, or a new one of the model in a folder."""
        file = out / f"{name}.json"
        if file.is_file():
            return Measured.load(file)
        original = None if run.task != "embedding" else Teacher(load_checkpoint(str(run.init)).to(device))  # type: ignore[arg-type]
        model: Any = load_checkpoint(folder)
        found = measured(model.to(device), prepared, config, original, lambda text: tell(f"{words}: {text}"))
        found.save(file)
        return found

    before = look("before", str(run.init), "as it came")
    steps = _steps(config, run, prepared, out, tell)
    seconds = _train(with_steps(run, steps, str(out / "run")), quiet, tell, f"mending, {steps:,} steps")
    after = look("after", out / "run" / "model", "mended")
    plain = None
    if config.plain:
        rival = with_steps(recipe(config, plain=True), steps, str(out / "plain"))
        _train(rival, quiet, tell, f"plain fine-tuning, {steps:,} steps")
        plain = look("plain", out / "plain" / "model", "plain fine-tuning")
    report = MendReport(
        checkpoint=_name(config.checkpoint),
        data=config.data,
        method=run.method,
        task=str(run.task),
        teacher=None if run.teacher is None else _name(run.teacher),
        steps=steps,
        batch_size=config.batch_size,
        length=run.samples.length if prepared.tokenizer is not None else None,
        penalty=run.train.penalty,
        penalty_kind=run.train.penalty_kind,
        weight_bound=run.train.weight_bound,
        lr=float(run.train.lr or 0.0),
        seconds=seconds,
        seed=config.seed,
        before=before,
        after=after,
        plain=plain,
    )
    _publish(out)
    write_whole(out / "mend.html", mending_page(report))
    report.save(out / "mend.json")  # last: it says that the mending is done
    _tidy(out)
    return report


def _tidy(out: Path) -> None:
    """Removes the checkpoints of the fine-tuning, which a finished mending needs no more."""
    for each in ("run", "plain"):
        folder = RunFolder(out / each)
        folder.clean()  # what a process left that was killed here
        remove_folder(folder.checkpoints)


def _steps(config: MendConfig, run: RunConfig, prepared: Prepared, out: Path, tell: Tell) -> int:
    """The number of steps; found once, since a mending that goes on needs the same schedule."""
    if config.steps is not None:
        return config.steps
    file = out / "steps.json"
    if not file.is_file():
        tell("timing a few steps")
        found = steps_in(float(minutes_of(config) or 0), with_steps(run, 1000, ""), prepared)
        write_json(file, {"steps": found})
    return int(read_json(file)["steps"])


def _train(run: RunConfig, quiet: bool, tell: Tell, words: str) -> float:
    """Trains or continues; returns the seconds it took, since it was last resumed."""
    folder = RunFolder(run.out)
    file = folder.path / "seconds.json"
    if not (folder.finished and file.is_file()):
        tell(words)
        begin = time.perf_counter()
        if folder.exists:
            resume(run.out, quiet=quiet)
        else:
            train(run, quiet=quiet)
        write_json(file, {"seconds": time.perf_counter() - begin})
    return float(read_json(file)["seconds"])


def _publish(out: Path) -> None:
    """Puts the mended model where people look for it."""
    if not (out / "model").exists():
        shutil.rmtree(out / ".tmp-model", ignore_errors=True)
        shutil.copytree(out / "run" / "model", out / ".tmp-model", copy_function=_link)
        os.replace(out / ".tmp-model", out / "model")


def _link(source: str, target: str) -> None:
    """One file under two names, where the file system can: a model may be large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _name(checkpoint: str) -> str:
    """The name of a checkpoint's folder; that above it too if it is merely "model", as in a run."""
    path = Path(checkpoint).resolve()
    return f"{path.parent.name}/{path.name}" if path.name == "model" else path.name


def _saved(model: PreTrainedModel, tokenizer: Any, out: Path, resume: bool) -> tuple[str, str | None]:
    """Saves a model, and its tokenizer, from memory."""
    start = out / "start"
    if not (resume and start.is_dir()):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"out={str(out)!r} exists and is not empty: choose a new or an empty folder")
        model.save_pretrained(start)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(start)
    return str(start), None if tokenizer is None or hasattr(tokenizer, "save_pretrained") else os.fspath(tokenizer)


def _check_same(old: MendConfig, new: MendConfig) -> None:
    for field in dataclasses.fields(MendConfig):
        a, b = getattr(old, field.name), getattr(new, field.name)
        if field.name not in ("out", "device") and a != b:
            raise ValueError(
                f"the mending in {new.out!r} was started with {field.name}={a!r}, not {b!r}: continue it with its own "
                "settings (outeffhop resume), or choose another out"
            )
