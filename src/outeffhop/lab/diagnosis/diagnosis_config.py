"""The settings of a diagnosis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outeffhop.lab.diagnosis.checkpoint_config import CheckpointConfig

__all__ = ["DiagnosisConfig"]


@dataclass(frozen=True, kw_only=True)
class DiagnosisConfig(CheckpointConfig):
    """What is diagnosed, and on how much data.

    The numbers of samples suit a model of BERT-base's size on two cores: a minute.

    Attributes:
        data: as for `outeffhop data`; by default the data of the run, else built-in text or images.
        batches: measure on at most this many batches.
        calibration_batches: batches of training data that static ranges are found on.
        int8: also run the model in real int8 by OpenVINO. True keeps the exported model in OUT/int8 and needs
            outeffhop[int8]; None does it where that is installed, for models up to BERT-base's size; False does not.
    """

    batch_size: int = 4
    batches: int | None = 2
    calibration_batches: int = 2
    int8: bool | None = None

    def check(self, more: Mapping[str, int] | None = None) -> None:
        super().check({"calibration_batches": self.calibration_batches, **(more or {})})
