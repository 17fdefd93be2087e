"""The folder of a run: its files, its lock, and which of its checkpoints are whole.

    config.yaml  env.json  metrics.jsonl  checkpoints/checkpoint-N/  model/  outliers.json  result.json

A checkpoint is written to a temporary folder and renamed when every byte is on disk, with a manifest of sizes and
checksums. So a folder called checkpoint-N is whole, or was damaged later and is skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os.path import expanduser
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from outeffhop._io import (
    check_manifest,
    parse_json,
    publish,
    remove_folder,
    to_plain,
    write_json,
    write_manifest,
    write_whole,
)
from outeffhop._naming import check_utf8
from outeffhop.lab.training.config import RunConfig, from_yaml, to_yaml

__all__ = ["RunFolder"]


class RunFolder:
    """The files of a run.

    Args:
        path: the folder; it does not have to exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(expanduser(path))  # neither a shell (in --out=~/a) nor YAML expands ~
        self.config_file = self.path / "config.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"

    @property
    def exists(self) -> bool:
        return self.config_file.is_file()

    @property
    def finished(self) -> bool:
        return (self.path / "result.json").is_file()

    def check_new(self) -> None:
        """Raises a ValueError if the folder contains a run or other files."""
        check_utf8("out", self.path)
        if self.exists:
            raise ValueError(
                f"out={str(self.path)!r} already contains a run: choose another folder, or continue that run with "
                f"outeffhop resume {self.path}"
            )
        if self.path.is_file():
            raise ValueError(f"out={str(self.path)!r} is a file: give a folder")
        if self.path.is_dir() and any(p.name != "run.lock" for p in self.path.iterdir()):
            raise ValueError(f"out={str(self.path)!r} contains other files: choose a new or an empty folder")

    def create(self, config: RunConfig) -> None:
        """Creates the folder with its config."""
        self.check_new()
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"out={str(self.path)!r} cannot be created: {error.strerror}") from None
        write_whole(self.config_file, to_yaml(config))

    def abandon(self) -> None:
        """Frees the folder of a run that has no checkpoint: another one may begin there."""
        if not self._by_step():
            self.clean()
            for file in (self.config_file, self.metrics_file, self.path / "env.json"):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.path / "track", ignore_errors=True)
            shutil.rmtree(self.checkpoints, ignore_errors=True)

    def config(self) -> RunConfig:
        if not self.exists:
            raise ValueError(f"{str(self.path)!r} is not a run: it has no config.yaml")
        return from_yaml(self.config_file)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from training in this folder. The lock ends with the process, however it ends.

        Where nothing was written, as of a run that was refused, neither the lock nor a new folder stays.
        """
        made, file = [p for p in (self.path, *self.path.parents) if not p.exists()], self.path / "run.lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open(file, "w")  # noqa: SIM115, closed by the with below
        except OSError as error:
            raise ValueError(f"out={str(self.path)!r} cannot be written to: {error.strerror}") from None
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = os.path.samestat(os.fstat(handle.fileno()), file.stat())  # not one that was removed just now
            except OSError:
                held = False
            if not held:
                raise ValueError(f"another process is training in {str(self.path)!r}: wait for it, or stop it")
            try:
                yield
            finally:
                if [p.name for p in self.path.iterdir()] == [file.name]:
                    file.unlink()
                    with suppress(OSError):
                        for folder in made:
                            folder.rmdir()

    # checkpoints

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"checkpoint-{step}"

    def last_checkpoint(self, best_at: Callable[[Path], int | None] | None = None) -> Path | None:
        """The newest checkpoint that is whole; None if there is none. Damaged ones are skipped with a warning.

        Args:
            best_at: the best step when a checkpoint was written; its checkpoint must be whole as well.
        """
        for path in self._by_step():
            try:
                check_manifest(path)
                if best_at is not None:
                    self._check_best(best_at(path))
            except ValueError as error:
                warnings.warn(f"{path} is skipped: {error}", stacklevel=2)
            else:
                return path
        return None

    def _check_best(self, step: int | None) -> None:
        try:
            if step is not None:
                check_manifest(self.checkpoint(step))
        except ValueError as error:
            raise ValueError(f"checkpoint-{step}, the best at that step, is missing or damaged: {error}") from None

    def side_folder(self, step: int) -> Path:
        """Creates the temporary folder that a checkpoint is written to."""
        side = self.checkpoints / f".partial-{step}"
        shutil.rmtree(side, ignore_errors=True)
        side.mkdir(parents=True)
        return side

    def accept(self, side: Path, step: int, keep: int, best: int | None = None) -> Path:
        """Turns a temporary folder into the checkpoint of a step; removes all but the newest ``keep`` and the best."""
        write_manifest(side)
        place = self.checkpoint(step)
        if place.exists():  # from before a resume: the same step again
            remove_folder(place)
        publish(side, place)
        # later ones are damaged, or the run would have continued from them: they must not replace whole ones
        later = [p for p in self._by_step() if step_of(p) > step]
        spent = [p for p in self._by_step()[len(later) :][keep:] if step_of(p) != best]
        for old in [*later, *spent]:
            remove_folder(old)
        return place

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Says in an error, such as a full disk, that ``what`` could not be written, and removes what is unfinished."""
        try:
            yield
        except (OSError, SafetensorError) as error:  # safetensors has its own class for errors of the system
            last = self.last_checkpoint()
            whole = f"the last checkpoint, {last}, is whole" if last else "there is no checkpoint yet"
            self.clean()
            why = getattr(error, "strerror", None) or error
            raise OSError(f"{what} could not be written ({why}); {whole}") from error

    def clean(self) -> None:
        """Removes what a killed process left unfinished."""
        for partial in [*self.checkpoints.glob(".*"), *self.path.glob(".*tmp*")]:
            shutil.rmtree(partial, ignore_errors=True) if partial.is_dir() else partial.unlink(missing_ok=True)

    def _by_step(self) -> list[Path]:
        named = [p for p in self.checkpoints.glob("checkpoint-*") if p.is_dir() and p.name.split("-")[1].isdecimal()]
        return sorted(named, key=step_of, reverse=True)

    # metrics

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl; a last line that was cut short is left out."""
        return self._metrics() if self.metrics_file.is_file() else []

    def _metrics(self, count: int | None = None) -> list[dict[str, Any]]:
        *lines, last = self.metrics_file.read_bytes().split(b"\n")  # last: empty, or part of a line
        found = []
        for number, line in enumerate(lines[:count], 1):
            try:
                found.append(_metrics_line(line))
            except ValueError as error:
                raise ValueError(f"{self.metrics_file}, line {number}: {error}; remove it") from error
        if count is None or len(lines) < count:
            with suppress(ValueError):
                found.append(_metrics_line(last))
        return found

    def append(self, line: dict[str, Any]) -> None:
        with self.writing(self.metrics_file.name), open(self.metrics_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(to_plain(line)) + "\n")

    def forget_after(self, count: int) -> None:
        """Keeps the first ``count`` lines of metrics: a run that continues writes the others again."""
        lines = self._metrics(count) if self.metrics_file.is_file() else []
        write_whole(self.metrics_file, "".join(json.dumps(line) + "\n" for line in lines))

    def write_json(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)


def _metrics_line(line: bytes) -> dict[str, Any]:
    found = parse_json(line.decode())
    if not isinstance(found, dict) or not isinstance(found.get("step", 0), int):
        raise ValueError("not a line of metrics")
    return found


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])
