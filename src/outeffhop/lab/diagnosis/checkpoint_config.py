"""What every command that looks at a checkpoint is told: the checkpoint, its data, and how both are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CheckpointConfig"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """A checkpoint, and the data it is measured on.

    Attributes:
        checkpoint: folder of a run or a saved model, a GGUF file, or a name on the hub.
        data: as for `outeffhop data`; by default the data of the run.
        batch_size: samples per batch.
        batches: measure on at most this many batches; all by default.
        length: text: tokens per sample; by default as in the run, or 128.
        tokenizer: folder of the tokenizer, if the checkpoint has none.
        task: if not what the architecture says; embedding compares outputs alone.
        dtype: float32, bfloat16 or float16; by default as stored.
        device: cuda if available, otherwise cpu.
        trust_remote_code: run Python files that come with the checkpoint.
    """

    checkpoint: str
    data: str | None = None
    batch_size: int = 32
    batches: int | None = None
    length: int | None = None
    tokenizer: str | None = None
    task: str | None = None
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False

    def check(self, more: Mapping[str, int]) -> None:
        """Raises a ValueError that names a count below 1, of its own or of ``more``."""
        own = {"batch_size": self.batch_size, "batches": self.batches, "length": self.length}
        for name, value in {**own, **more}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name.replace('_', '-')}={value}: must be at least 1")
