"""The outlier penalty in a Trainer: its warm-up, and its value in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from outeffhop.outliers.penalty import OutlierPenalty

__all__ = ["PenaltyCallback"]


class PenaltyCallback(TrainerCallback):
    """Raises the weight over the warm-up, also after a resume; writes the penalty beside the loss.

    What it writes is the penalty of this process's last batch, not of the whole step.
    """

    def __init__(self, penalty: OutlierPenalty) -> None:
        self.penalty = penalty

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.penalty.set_step(state.global_step + 1)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is not None and "loss" in logs:
            logs["outlier_penalty"] = self.penalty.value
            state.log_history[-1]["outlier_penalty"] = logs["outlier_penalty"]  # kept before callbacks are called
