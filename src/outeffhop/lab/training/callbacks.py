"""Callbacks: metrics.jsonl and progress, interruption by a signal, early stopping, keeping the best step."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerState

from outeffhop.lab.training.chief_metric import ChiefMetric
from outeffhop.lab.training.rundir import RunFolder

__all__ = ["Journal", "Interrupt", "Patience", "KeepBest"]


class Journal(TrainerCallback):
    """Writes metrics.jsonl and shows progress: a bar in a terminal, plain lines elsewhere."""

    def __init__(self, folder: RunFolder, samples_per_step: int, tokens_per_sample: int | None, quiet: bool) -> None:
        self.folder, self.quiet = folder, quiet
        self.samples, self.tokens = samples_per_step, tokens_per_sample
        self.shown: dict[str, float] = {}
        self._bar: Any = None
        self._since = (0.0, 0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._since = (time.perf_counter(), state.global_step)
        if state.is_world_process_zero and not self.quiet and state.global_step:
            print(f"resuming from step {state.global_step} of {state.max_steps}", flush=True)
        if state.is_world_process_zero and not self.quiet and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[values]}"))
            self._bar = Progress(*columns)
            self._bar.start()
            self._task = self._bar.add_task("", total=state.max_steps, completed=state.global_step, values="")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        logs = {k: v for k, v in (logs or {}).items() if isinstance(v, int | float) and not k.startswith("train_")}
        if not state.is_world_process_zero or "total_flos" in logs:
            return
        if "loss" in logs:
            begun, step = self._since
            seconds = time.perf_counter() - begun
            per_second = (state.global_step - step) * self.samples / max(seconds, 1e-9)
            self._since = (time.perf_counter(), state.global_step)
            name = "tokens_per_second" if self.tokens else "samples_per_second"
            logs[name] = per_second * (self.tokens or 1)
        if "max_inf_norm" not in logs:  # written with its tensors already
            self.folder.append({"step": state.global_step, **logs})
        self.shown.update(logs)
        self._show(state, logs)

    def _show(self, state: Any, logs: dict[str, float]) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            names = ("loss", "eval_perplexity", "eval_accuracy", "eval_mse", "max_inf_norm", "avg_kurtosis")
            speed = [n for n in self.shown if n.endswith("_per_second")]
            values = "  ".join(f"{_short(n)} {self.shown[n]:.4g}" for n in (*names, *speed) if n in self.shown)
            self._bar.update(self._task, values=values)
        else:
            values = "  ".join(f"{_short(k)} {v:.4g}" for k, v in logs.items() if k not in ("epoch", "step"))
            print(f"step {state.global_step}/{state.max_steps}  {values}", flush=True)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.stop()

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _short(name: str) -> str:
    return name.removeprefix("eval_").replace("_per_second", "/s").replace("learning_rate", "lr").replace("_", " ")


class Interrupt(TrainerCallback):
    """Ctrl-C or SIGTERM: finishes the step, writes a checkpoint, and ends training. A second one ends it at once."""

    def __init__(self) -> None:
        self.wanted = False  # by a signal to this process
        self.ended = False  # training has ended, on all processes
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for kind in (signal.SIGINT, signal.SIGTERM):
                self._before[kind] = signal.signal(kind, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)
        self._before.clear()

    def _heard(self, number: int, frame: Any) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        # all processes must end at the same step, or some would wait forever; they ask each other at every log
        if args.world_size == 1 or state.global_step % args.logging_steps == 0:
            self._agree(args)
        if self.ended:
            control.should_save = control.should_training_stop = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._agree(args)

    def _agree(self, args: Any) -> None:
        if args.world_size == 1:  # no tensor: after every step it would wait for the GPU
            self.ended = self.wanted
            return
        wanted = torch.tensor(int(self.wanted), device=args.device)
        dist.all_reduce(wanted, dist.ReduceOp.MAX)
        self.ended = bool(wanted)


class Patience(TrainerCallback):
    """Ends training when the chief metric has not improved for some evaluations."""

    def __init__(self, patience: int, chief: ChiefMetric) -> None:
        self.patience, self.chief = patience, chief

    def spent(self, history: list[dict[str, float]]) -> bool:
        """Whether the metrics logged so far end training."""
        return self.chief.stagnant(history, self.patience)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.spent(state.log_history):
            control.should_training_stop = control.should_save = True  # the last step is always saved
        return control


class KeepBest(TrainerCallback):
    """Saves a checkpoint at every evaluation that is the best so far.

    Args:
        chief: the metric that decides.
        since: the first step that counts; before it, the model is not yet what the run is to produce.
    """

    def __init__(self, chief: ChiefMetric, since: int = 0) -> None:
        self.chief, self.since = chief, since

    def step(self, history: list[dict[str, float]]) -> int | None:
        """The best step so far; None if no evaluation counts yet."""
        return self.chief.best_step(history, self.since)

    def step_at(self, checkpoint: Path) -> int | None:
        """The best step when a checkpoint was written."""
        return self.step(TrainerState.load_from_json(str(checkpoint / "trainer_state.json")).log_history)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if self.step(state.log_history) == state.global_step:
            control.should_save = True
        return control
