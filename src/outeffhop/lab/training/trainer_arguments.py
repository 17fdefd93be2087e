"""A run's config as arguments of transformers' Trainer."""

from __future__ import annotations

import os
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainingArguments

from outeffhop.lab.training.checks import check_device
from outeffhop.lab.training.config import RunConfig
from outeffhop.lab.training.rundir import RunFolder

__all__ = ["RunArguments", "trainer_arguments"]


class RunArguments(TrainingArguments):
    """Trainer's arguments, such that it writes no files and uses one GPU per process."""

    @property
    def should_save(self) -> bool:
        """False: ``RunTrainer.save_model`` writes checkpoints, without pickles and all at once."""
        return False

    @property
    def n_gpu(self) -> int:
        """At most 1: several GPUs need torchrun; Trainer would give each GPU of this process its own batch."""
        return min(int(super().n_gpu), 1)


def trainer_arguments(config: RunConfig, folder: RunFolder) -> RunArguments:
    """Trainer's arguments for a resolved config. Starts the process group of torchrun."""
    train = config.train
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_device(train)
    on_cpu = train.device == "cpu" or not torch.cuda.is_available()
    # the precision of sharded weights is set by the sharding
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
        save_only_model=True,  # RunTrainer.save_model writes the rest as well, without pickles
        save_steps=train.save_steps,
        eval_strategy="steps",
        eval_steps=train.eval_steps,
        report_to=[train.track] if train.track in ("trackio", "wandb") else [],  # tensorboard needs its folder as well
        run_name=folder.path.name,
        torch_compile=train.compile,
        tf32=False,  # torch_compile would turn it on for the whole process, and round what is measured after training
        gradient_checkpointing=train.gradient_checkpointing,
        dataloader_num_workers=train.workers,
        dataloader_drop_last=True,
        dataloader_pin_memory=not on_cpu,
        accelerator_config={"non_blocking": not on_cpu},  # otherwise every batch waits for the GPU
        remove_unused_columns=False,
        disable_tqdm=True,
        ddp_backend="gloo" if on_cpu and world > 1 else None,
        ddp_timeout=train.timeout,
        ddp_find_unused_parameters=False,  # there are none, and the search costs a pass over the graph
        **precision,
    )
    if on_cpu and world > 1 and not dist.is_initialized():  # TrainingArguments does so on a CPU without the timeout
        dist.init_process_group("gloo", timeout=timedelta(seconds=train.timeout))
    return RunArguments(**settings)
