"""transformers' Trainer with the loss scaled right, our metrics, and checkpoints that a kill cannot tear."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import Trainer, TrainingArguments

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.training import training_state as kept
from outeffhop.lab.training.checks import chosen_tensors
from outeffhop.lab.training.config import TrainConfig
from outeffhop.lab.training.lr_schedule import make_optimizer, make_schedule
from outeffhop.lab.training.nonfinite import broken_weights, what_broke
from outeffhop.lab.training.rundir import RunFolder
from outeffhop.lab.training.sharding import Sharded
from outeffhop.metrics import metric_for
from outeffhop.outliers import measure

__all__ = ["RunTrainer", "EpochSampler", "NotFinite"]

_ENDING = {signal.SIGINT, signal.SIGTERM}


class NotFinite(RuntimeError):
    """Training cannot go on: the loss is not a number."""


class EpochSampler(Sampler[int]):
    """A shuffle that depends on seed and epoch alone, cut to whole steps: it is the same for any number of
    processes and any accumulation."""

    def __init__(self, size: int, batch: int, seed: int) -> None:
        self.size, self.batch, self.seed, self.epoch = size, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size // self.batch * self.batch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(self.size, generator=generator)[: len(self)].tolist()


class RunTrainer(Trainer):
    """One recipe for all four tasks.

    Args:
        model: in place sharded already where ``train.fsdp``.
        arguments: Trainer's own.
        train: ours, resolved.
        prepared: the data.
        folder: the run's.
        decay_norms: weight decay also on the scales of norms.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any,
        arguments: TrainingArguments,
        train: TrainConfig,
        prepared: Prepared,
        folder: RunFolder,
        decay_norms: bool,
        **kwargs: Any,
    ) -> None:
        self.settings, self.prepared, self.folder, self.decay_norms = train, prepared, folder, decay_norms
        self.sampler = EpochSampler(len(prepared.train), train.batch_size or 1, train.seed)
        self._measured = self._evaluated = -1  # the last steps they were done at
        self._last_report: tuple[int, Any] = (-1, None)
        self._last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._restored: dict[str, Any] | None = None
        super().__init__(
            model,
            arguments,
            train_dataset=prepared.train,  # type: ignore[arg-type]
            eval_dataset=prepared.validation,  # type: ignore[arg-type]
            data_collator=prepared.collate,
            processing_class=prepared.tokenizer,
            **kwargs,
        )
        # The loss below is the mean over all items of a step already, whoever computed which part of it
        self.model_accepts_loss_kwargs = True
        self.loss_is_scaled_for_ga = True
        # The first step whose loss was not finite, looked at only now and then: a look waits for the device
        self._bad_step = torch.full((), -1, dtype=torch.long, device=arguments.device)

    # data

    def _get_train_sampler(self, *_: Any) -> EpochSampler:
        return self.sampler

    def get_train_dataloader(self) -> Any:
        loader: Any = super().get_train_dataloader()
        loader.base_dataloader.worker_init_fn = partial(_begin_worker, loader.base_dataloader.worker_init_fn)
        return loader

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_training_stop or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # killed between the last checkpoint and the result
            return
        self.sampler.set_epoch(kwargs["epoch"])
        self.prepared.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    # loss

    def _items(self, batch: dict[str, Tensor]) -> Tensor | int:
        """What the loss is a mean over: tokens to predict, pictures, numbers to forecast.

        A tensor only where it must be counted on the device: to move a number there waits for all work in its queue.
        """
        if self.prepared.task == "forecasting":
            return batch["future_values"].numel()
        if self.prepared.task == "classification":
            return len(batch["labels"])
        labels = batch["labels"][:, 1:] if self.prepared.task == "clm" else batch["labels"]
        return labels.ne(-100).sum()

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Tensor]], device: torch.device) -> Tensor | int:
        total = sum(self._items(batch) for batch in batch_samples)
        if dist.is_initialized() and dist.get_world_size() > 1:
            total = torch.as_tensor(total, device=device)
            dist.all_reduce(total)
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The part of the step's mean that these inputs have, times the processes, whose gradients are averaged."""
        soft = inputs.get("soft_labels")
        given = {name: value for name, value in inputs.items() if name != "soft_labels"}
        if soft is not None:
            given.pop("labels")
        outputs = model(**given)
        loss = outputs.loss if soft is None else nn.functional.cross_entropy(outputs.logits.float(), soft)
        if num_items_in_batch is not None:
            loss = loss * (self._items(inputs) / num_items_in_batch) * self.args.world_size
        self._watch_loss(model, given, loss.detach())
        return (loss, outputs) if return_outputs else loss

    def _watch_loss(self, model: nn.Module, inputs: dict[str, Tensor], loss: Tensor) -> None:
        bad = ~torch.isfinite(loss)
        if loss.device.type == "cpu":
            if bool(bad):  # before the weights have changed: what broke can still be found
                raise NotFinite(self._diagnosis(self.state.global_step + 1, inputs))
            return
        step = torch.full_like(self._bad_step, self.state.global_step + 1)
        self._bad_step = torch.where(bad & (self._bad_step < 0), step, self._bad_step)

    def check_finite(self) -> None:
        """Waits for the device, and raises where a loss since the last look was not finite."""
        step = int(self._bad_step)
        if step >= 0:
            raise NotFinite(self._diagnosis(step, None))

    def _diagnosis(self, step: int, inputs: dict[str, Tensor] | None) -> str:
        inputs = None if self.settings.fsdp else inputs  # a forward of one process alone would wait for the others
        return f"the loss is not finite at step {step} ({what_broke(self.model, inputs)}); {self._last_good()}"

    def _last_good(self) -> str:
        last = self.folder.last_checkpoint()
        return f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"

    # optimizer

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.model, self.settings, self.decay_norms)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            per_epoch = max(len(self.sampler) // self.sampler.batch, 1)
            self.lr_scheduler = make_schedule(self.optimizer, self.settings, per_epoch)
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if self.settings.fsdp and model is self.model:
            return Sharded(model)
        return model if isinstance(model, Sharded) else super()._wrap_model(model, *args, **kwargs)

    # metrics

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save:
            self.check_finite()
        step, every = self.state.global_step, self.settings.outlier_steps
        if every and step % every == 0 and step > self._measured:
            self.measure_outliers()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def measure_outliers(self) -> Any:
        """Max inf norm and average kurtosis now, and of every tensor looked at; into metrics.jsonl."""
        if self._last_report[0] == self.state.global_step:
            return self._last_report[1]
        limit = self.settings.outlier_batches
        share = list(batches(self.prepared.validation, self.prepared.eval_collate, self._eval_batch(), limit=limit))
        report = measure(self.model, self._own(share), chosen_tensors(self.settings), attention=False)
        self._last_report = self.state.global_step, report
        if self._measured == self.state.global_step:  # before a kill: its line is there
            return report
        self._measured = self.state.global_step
        tensors = {t.name: [t.inf_norm, t.kurtosis] for t in report.tensors}
        found = {"max_inf_norm": report.max_inf_norm, "avg_kurtosis": report.avg_kurtosis}
        self.note({**found, "tensors": tensors})
        due = self.control.should_log
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, dict(found))
        self.control.should_log = due  # the line with the loss is yet to come
        return report

    def _own(self, whole: list[Any]) -> list[Any]:
        """This process's share, where every process has as many: a sharded model works with all at once."""
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return whole
        if len(whole) % dist.get_world_size():
            return whole if dist.get_rank() == 0 or self.settings.fsdp else []
        return whole[dist.get_rank() :: dist.get_world_size()]

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:  # type: ignore[override]
        """The task's metric on the validation set. Every process computes all of it, so none needs to wait."""
        if self._last_metrics[0] == self.state.global_step:
            return self._last_metrics[1]
        was_training = self.model.training
        self.model.eval()
        limit = self.settings.eval_batches
        given = batches(self.prepared.validation, self.prepared.eval_collate, self._eval_batch(), limit=limit)
        try:
            found = metric_for(self.prepared.task)(self.model, given)
        finally:
            self.model.train(was_training)
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self._last_metrics = self.state.global_step, metrics
        if self._evaluated == self.state.global_step:  # before a kill: its line is there
            return metrics
        self._evaluated = self.state.global_step
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _eval_batch(self) -> int:
        return min(self.settings.batch_size or 1, 64)  # however a step is divided, the numbers are the same

    def note(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl."""
        if self.is_world_process_zero():
            self.folder.append({"step": self.state.global_step, **line})

    # checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        step, main = self.state.global_step, self.is_world_process_zero()
        broken = broken_weights(self.model)
        if broken:  # a gradient that was not finite, of a loss that was
            raise NotFinite(f"weights are not finite after step {step}: {', '.join(broken[:5])}; {self._last_good()}")
        self.store_flos()
        weights = kept.model_state(self.model)
        optimizer = kept.optimizer_state(self.model, _inner(self.optimizer))
        loss = self._tr_loss.clone()
        if self.args.world_size > 1:
            dist.all_reduce(loss)
            loss /= self.args.world_size
        side = self.folder.checkpoints / f".partial-{step}"
        with self.folder.writing(f"checkpoint {step}"):
            if main:
                self.folder.side_folder(step)
            self._wait()
            kept.save_random_state(side, self.args.process_index)
            if main:
                self._write(side, weights, optimizer, float(loss))
            self._wait()
            if main:
                self.folder.accept(side, step, self.settings.keep)
        self._wait()

    def _write(self, side: Path, weights: Any, optimizer: dict[str, Any], loss: float) -> None:
        self.model.save_pretrained(side, state_dict=weights)
        if self.prepared.tokenizer is not None:
            self.prepared.tokenizer.save_pretrained(side)
        kept.save_optimizer(optimizer, side)
        schedule = {k: v for k, v in self.lr_scheduler.state_dict().items() if k != "lr_lambdas"}
        scaler = getattr(self.accelerator, "scaler", None)
        progress = {
            "schedule": schedule,
            "scaler": None if scaler is None else scaler.state_dict(),
            "loss_since_log": loss,
            "last_logged": self._globalstep_last_logged,
            "measured": self._measured,
            "evaluated": self._evaluated,
            "lines": len(self.folder.metrics()),
        }
        (side / "progress.json").write_text(json.dumps(progress))
        self.state.save_to_json(str(side / "trainer_state.json"))

    def whole_weights(self) -> dict[str, Tensor] | None:
        """For ``save_pretrained``, where the model is sharded. Collective."""
        return kept.model_state(self.model)

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        kept.load_model_state(self.model, Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        kept.load_optimizer(self.model, _inner(self.optimizer), Path(checkpoint))
        self._restored = json.loads((Path(checkpoint) / "progress.json").read_text())
        self.lr_scheduler.load_state_dict(
            {**self._restored["schedule"], "lr_lambdas": [None] * _groups(self.optimizer)}
        )
        self._measured, self._evaluated = self._restored["measured"], self._restored["evaluated"]

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = getattr(self.accelerator, "scaler", None)
        if scaler is not None and self._restored is not None and self._restored["scaler"] is not None:
            scaler.load_state_dict(self._restored["scaler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            kept.load_random_state(Path(checkpoint), self.args.process_index)

    def restore_loss(self) -> None:
        """What was added up since the last line of metrics, as training goes on."""
        if self._restored is not None:
            self._tr_loss += self._restored["loss_since_log"]
            self._globalstep_last_logged = self._restored["last_logged"]
            self.state.compute_steps(self.args, self.state.max_steps)  # how often it logs and saves may be new


def _begin_worker(seed: Callable[[int], None], number: int) -> None:
    """Signals end a worker of the loader only where they come from the process that trains: where a whole job is sent
    one, that process finishes its step, and needs data for it."""
    seed(number)
    if hasattr(signal, "sigwaitinfo"):  # macOS has none
        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
        threading.Thread(target=_heed_parent, daemon=True).start()


def _heed_parent() -> None:
    while signal.sigwaitinfo(_ENDING).si_pid != os.getppid():
        pass
    os._exit(0)


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


def _groups(optimizer: Any) -> int:
    return len(_inner(optimizer).param_groups)
