"""transformers' Trainer with a correctly scaled loss, our metrics, and checkpoints that survive a kill.

Trainer drives the loop. What it leaves open is filled in through its public methods and callbacks; the one private
method that must be replaced, ``_load_from_checkpoint``, says why. Trainer itself writes no files: ``RunArguments``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.training import training_state as kept
from outeffhop.lab.training.callbacks import KeepBest
from outeffhop.lab.training.checks import chosen_tensors
from outeffhop.lab.training.config import TrainConfig
from outeffhop.lab.training.imitation import Teacher, inputs_of
from outeffhop.lab.training.nonfinite import LossWatch, NotFinite, broken_weights, what_broke
from outeffhop.lab.training.optimization import make_optimizer, make_schedule
from outeffhop.lab.training.rundir import RunFolder
from outeffhop.lab.training.sharding import Sharded
from outeffhop.lab.training.train_loader import EpochSampler, make_loader
from outeffhop.lab.training.trainer_arguments import RunArguments
from outeffhop.metrics import evaluating, metric_for
from outeffhop.outliers import OutlierPenalty, measure

__all__ = ["RunTrainer"]

_STATE = "trainer_state.json"


class RunTrainer(Trainer):
    """One training loop for all four tasks.

    Args:
        model: already sharded if ``train.fsdp``.
        arguments: Trainer's own.
        train: ours, resolved.
        prepared: the data.
        folder: the run's.
        decay_norms: apply weight decay to the scales of norms as well.
        penalty: added to the loss; already attached to the model.
        teacher: the model to imitate, instead of learning from labels.
        checkpoint: the folder to resume from.
        over: that checkpoint is the run's last one, so no step is left to take.
        best: keeps the best checkpoint; also one of the callbacks.
        callbacks: of transformers.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any,
        arguments: RunArguments,
        train: TrainConfig,
        prepared: Prepared,
        folder: RunFolder,
        *,
        decay_norms: bool,
        penalty: OutlierPenalty | None,
        teacher: Teacher | None,
        checkpoint: Path | None,
        over: bool,
        best: KeepBest | None,
        callbacks: list[TrainerCallback],
    ) -> None:
        self.settings, self.prepared, self.folder, self.decay_norms = train, prepared, folder, decay_norms
        self.sampler = EpochSampler(len(prepared.train), train.batch_size or 1, train.seed)
        self.penalty, self.teacher, self.checkpoint, self.over = penalty, teacher, checkpoint, over
        self.best = best
        self._use_cache = getattr(model.config, "use_cache", None)  # Trainer sets it to False
        self._random_from = checkpoint  # until its random numbers are restored
        self._measured = self._evaluated = -1  # the last steps these were done at
        self._last_report: tuple[int, Any] = (-1, None)
        self._last_metrics: tuple[int, dict[str, float]] = (-1, {})
        super().__init__(
            model,
            arguments,
            train_dataset=prepared.train,  # type: ignore[arg-type]
            eval_dataset=prepared.validation,  # type: ignore[arg-type]
            data_collator=prepared.collate,
            processing_class=prepared.tokenizer,
            callbacks=[_Events(self), *callbacks],
        )
        self.remove_callback(PrinterCallback)
        if train.fsdp:
            self.model_wrapped = Sharded(model)
        # compute_loss already returns a part of the step's mean, on any process and in any accumulation step
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        self._watch = LossWatch(arguments.device)
        self._loss = torch.zeros((), device=arguments.device)  # the sum of the losses since the last log
        self._logged = 0  # the step of the last log

    def train(self, *_: Any, **__: Any) -> Any:
        """Trains from the start, or from the checkpoint."""
        if self.checkpoint is None:
            return super().train()
        # Trainer would also read pickles planted in the checkpoint's folder, so it gets a folder with its state only
        with TemporaryDirectory() as folder:
            shutil.copy(self.checkpoint / _STATE, folder)
            return super().train(resume_from_checkpoint=folder)

    # data

    def get_train_dataloader(self) -> Any:
        return self.accelerator.prepare(make_loader(self.prepared, self.sampler, self.args))

    def set_initial_training_values(self, *args: Any) -> Any:
        epochs, *others = super().set_initial_training_values(*args)
        return (0 if self.over else epochs, *others)

    def begin_epoch(self) -> None:
        epoch, steps = divmod(self.state.global_step, self.sampler.steps)
        self.sampler.set_epoch(epoch)
        self.prepared.set_epoch(epoch)
        if steps == 0:  # the loader draws a seed as an epoch begins
            self._restore_random()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int]:
        """The batches of one step, and how many items its loss is a mean over."""
        found = list(islice(epoch_iterator, num_batches))
        self._restore_random()
        items = sum(self._items(batch) for batch in found)
        if self.args.world_size > 1:
            items = torch.as_tensor(items, device=device)
            dist.all_reduce(items)
        return found, items

    # loss

    def _items(self, batch: dict[str, Tensor]) -> Tensor | int:
        """What the loss is a mean over: tokens to predict, images, numbers to forecast.

        A tensor only if the count is made on the device: moving a number there waits for all work in its queue.
        """
        if self.teacher is not None:
            return self.teacher.items(batch)
        if self.prepared.task == "forecasting":
            return batch["future_values"].numel()
        if self.prepared.task == "classification":
            return len(batch["labels"])
        labels = batch["labels"][:, 1:] if self.prepared.task == "clm" else batch["labels"]
        return labels.ne(-100).sum()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """These inputs' part of the step's mean, times the processes, whose gradients are averaged."""
        soft = inputs.get("soft_labels")
        if soft is None and self.teacher is None:
            given = dict(inputs)
            outputs = model(**given)
            loss = outputs.loss
        else:
            given = inputs_of(inputs, self.model)
            outputs = model(**given)
            if self.teacher is not None:
                loss = self.teacher.loss(outputs, inputs)
            elif soft is not None:
                loss = nn.functional.cross_entropy(outputs.logits.float(), soft)
            if self.penalty is not None:  # the model adds it to a loss of its own only
                loss = loss + self.penalty.term()
        if num_items_in_batch is not None:
            loss = loss * (self._items(inputs) / num_items_in_batch) * self.args.world_size
        self._watch.see(loss.detach(), self.state.global_step + 1)
        if loss.device.type == "cpu":  # nothing to wait for, and what broke can be found before the weights change
            self.check_finite(given)
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self._loss += loss
        return loss

    def check_finite(self, inputs: dict[str, Tensor] | None = None) -> None:
        """Waits for the device, and raises if a loss seen so far was not finite."""
        step = self._watch.bad_step()
        if step is not None:
            inputs = None if self.settings.fsdp else inputs  # a forward on only one process would wait for the others
            raise NotFinite(
                f"the loss is not finite at step {step} ({what_broke(self.model, inputs)}); {self._last_good()}"
            )

    def _last_good(self) -> str:
        """What is left, and what to try."""
        last, lr = self.folder.last_checkpoint(), self.settings.lr
        left = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        return f"{left}; with finite data, train.lr={lr:g} is probably too large: try {(lr or 0) / 3:.1g}"

    def _loss_of_all(self) -> float:
        """The sum of the losses since the last log, averaged over the processes. Collective."""
        loss = self._loss.clone()
        if self.args.world_size > 1:
            dist.all_reduce(loss)
            loss /= self.args.world_size
        return float(loss)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:  # Trainer's own sum begins at a resume, ours at the last log before it
            self.check_finite()
            logs["loss"] = self._loss_of_all() / (self.state.global_step - self._logged)
            self._loss.zero_()
            self._logged = self.state.global_step
        super().log(logs, start_time)

    # optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.settings, self.decay_norms)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            self.lr_scheduler = make_schedule(self.optimizer, self.settings, max(self.sampler.steps, 1))
        return self.lr_scheduler

    # metrics

    def measure_if_due(self) -> None:
        step = self.state.global_step
        every: Any = self.settings.outlier_steps  # in_steps has left no epochs
        if every and step % every == 0 and step > self._measured:
            self.measure_outliers()

    def measure_outliers(self) -> Any:
        """Maximum infinity norm and average kurtosis now, and those of every tensor; also into metrics.jsonl."""
        if self._last_report[0] == self.state.global_step:
            return self._last_report[1]
        limit = self.settings.outlier_batches
        share = list(batches(self.prepared.validation, self.prepared.eval_collate, self._eval_batch(), limit=limit))
        report = measure(self.model, self._own(share), chosen_tensors(self.settings.outlier_tensors), attention=False)
        self._last_report = self.state.global_step, report
        if self._measured == self.state.global_step:  # its line was written before a kill
            return report
        self._measured = self.state.global_step
        found = {"max_inf_norm": report.max_inf_norm, "avg_kurtosis": report.avg_kurtosis}
        if self.is_world_process_zero():
            tensors = {t.name: [t.inf_norm, t.kurtosis] for t in report.tensors}
            self.folder.append({"step": self.state.global_step, **found, "tensors": tensors})
        due = self.control.should_log
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(found))
        self.control.should_log = due  # the line with the loss still follows
        return report

    def _own(self, whole: list[Any]) -> list[Any]:
        """This process's share, if all can be equal; else the first process gets all of it.

        With FSDP every process then gets all of it, since the processes of a sharded model must run together.
        """
        if self.args.world_size == 1:
            return whole
        if len(whole) % self.args.world_size:
            return whole if self.is_world_process_zero() or self.settings.fsdp else []
        return whole[self.args.process_index :: self.args.world_size]

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # type: ignore[override]
        """The task's metric on the validation set. Every process computes all of it, so none has to wait."""
        if self._last_metrics[0] == self.state.global_step:
            return self._last_metrics[1]
        limit = self.settings.eval_batches
        given = batches(self.prepared.validation, self.prepared.eval_collate, self._eval_batch(), limit=limit)
        if self.prepared.task == "embedding" and self.teacher is not None:
            found = self.teacher.likeness(self.model, given)
        else:
            with evaluating(self.model):
                found = metric_for(self.prepared.task)(self.model, given)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self._last_metrics = self.state.global_step, metrics
        if self._evaluated == self.state.global_step:  # its line was written before a kill
            return metrics
        self._evaluated = self.state.global_step
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _eval_batch(self) -> int:
        return min(
            self.settings.batch_size or 1, 64
        )  # does not depend on how a step is divided, so neither do the numbers

    # checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the checkpoint of this step: the weights, and all that training needs to continue. Collective."""
        step, main = self.state.global_step, self.is_world_process_zero()
        self.check_finite()
        broken = broken_weights(self.model)
        if broken:  # by a gradient that was not finite, although the loss was
            raise NotFinite(f"weights are not finite after step {step}: {', '.join(broken[:5])}; {self._last_good()}")
        weights = kept.model_state(self.model)
        optimizer = kept.optimizer_state(self.model, _inner(self.optimizer))
        loss = self._loss_of_all()
        side = self.folder.checkpoints / f".partial-{step}"
        with self.folder.writing(f"checkpoint {step}"):
            if main:
                self.folder.side_folder(step)
            self._wait()
            kept.save_random_state(side, self.args.process_index)
            if main:
                self._write(side, weights, optimizer, loss)
            self._wait()
            if main:
                best = None if self.best is None else self.best.step(self.state.log_history)
                self.folder.accept(side, step, self.settings.keep, best)
        self._wait()

    def _write(self, side: Path, weights: Any, optimizer: dict[str, Any], loss: float) -> None:
        self.save_pretrained(side, weights)
        kept.save_optimizer(optimizer, side)
        schedule = {k: v for k, v in self.lr_scheduler.state_dict().items() if k != "lr_lambdas"}
        scaler = self.accelerator.scaler
        progress = {
            "schedule": schedule,
            "scaler": None if scaler is None else scaler.state_dict(),
            "loss_since_log": loss,
            "last_logged": self._logged,
            "measured": self._measured,
            "evaluated": self._evaluated,
            "lines": len(self.folder.metrics()),
        }
        (side / "progress.json").write_text(json.dumps(progress))
        self.state.save_to_json(str(side / _STATE))

    def save_pretrained(self, folder: Path, weights: dict[str, Tensor] | None) -> None:
        """The model and its tokenizer; ``weights`` of a sharded model, from ``training_state.model_state``."""
        with _restored_cache(self.model.config, self._use_cache):
            self.model.save_pretrained(folder, state_dict=weights)
        if self.prepared.tokenizer is not None:
            self.prepared.tokenizer.save_pretrained(folder)

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Replaces Trainer's private method, which reads weights by the names in the file, and only whole tensors."""
        kept.load_model_state(self.model, self.checkpoint or Path(resume_from_checkpoint))

    def restore(self) -> None:
        """Restores all of a checkpoint except the weights and the random numbers, when training begins."""
        if self.checkpoint is None:
            return
        kept.load_optimizer(self.model, _inner(self.optimizer), self.checkpoint)
        progress = json.loads((self.checkpoint / "progress.json").read_text())
        lambdas = [None] * len(_inner(self.optimizer).param_groups)
        self.lr_scheduler.load_state_dict({**progress["schedule"], "lr_lambdas": lambdas})
        if self.accelerator.scaler is not None and progress["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(progress["scaler"])
        self._measured, self._evaluated = progress["measured"], progress["evaluated"]
        self._loss += progress["loss_since_log"]
        self._logged = progress["last_logged"]
        self.state.compute_steps(self.args, self.state.max_steps)  # how often it logs and saves may have changed

    def restore_best(self) -> int | None:
        """Loads the weights of the best step after training, and returns it; None if the last ones are kept."""
        if self.best is None:
            return None
        self.evaluate()  # the last step counts as well
        step, last = self.best.step(self.state.log_history), self.state.global_step
        if step is None or step == last:
            return last
        kept.load_model_state(self.model, self.folder.checkpoint(step))
        self._last_metrics, self._last_report = (-1, {}), (-1, None)  # they are of the last step
        self._measured = last  # metrics.jsonl has the steps as they were taken: nothing is added to its end
        return step

    def _restore_random(self) -> None:
        """Restores the random numbers once, after the loader has drawn those it drew before the checkpoint."""
        if self._random_from is not None:
            kept.load_random_state(self._random_from, self.args.process_index)
            self._random_from = None


class _Events(TrainerCallback):
    """Callbacks at moments of Trainer's loop that have no public method."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.restore()

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        self.trainer.begin_epoch()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.trainer.measure_if_due()


@contextmanager
def _restored_cache(config: Any, use_cache: bool | None) -> Iterator[None]:
    """A saved model generates with a cache, if it did before it was trained."""
    during = getattr(config, "use_cache", None)
    if use_cache is not None:
        config.use_cache = use_cache
    try:
        yield
    finally:
        if use_cache is not None:
            config.use_cache = during


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)
