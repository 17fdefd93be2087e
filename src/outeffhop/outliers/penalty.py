"""Training against the tail: a penalty on the outliers of the tensors that ``measure`` watches.

The loss of a trained model does not mind outliers, so nothing removes them. The penalty puts a measure of their tail
into it, averaged over tensors.

    penalty = OutlierPenalty(model, weight=0.1)     # from now on the loss of the model contains it
    trainer = Trainer(model, ..., callbacks=[penalty.callback()])   # optional: warm-up and logging
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from outeffhop._naming import known
from outeffhop.outliers.tails import excess_range, fourth_power, log_kurtosis, log_tail
from outeffhop.outliers.tensors import Pick, pick

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["KINDS", "OutlierPenalty"]

KINDS = {"log_tail": log_tail, "excess_range": excess_range, "log_kurtosis": log_kurtosis, "fourth_power": fourth_power}


class OutlierPenalty:
    """Adds a penalty on outliers to the loss of a model while it is in training mode.

    The model keeps its class and its weights; only hooks are added. They work under autocast, gradient checkpointing
    (``use_reentrant=False``), gradient accumulation, DDP, FSDP and ``torch.compile`` of the model they were added to.
    A model that returns no loss, or whose loss is not used, gets it by ``loss = own_loss + penalty.term()`` after each
    forward.

    The penalty is a mean over samples. Equal shares of a batch, on several processes or one after the other, therefore
    give its gradient. Where the loss is a mean over tokens of the whole step (``num_items_in_batch``), each part's
    penalty has the weight of its tokens: the same if parts have equally many, close to it in masked language modelling.

    Args:
        model: any transformers model, or any module with patterns for ``tensors``.
        weight: of the penalty in the loss, after the warm-up.
        kind: "log_tail", log(mean x⁴ / (mean |x|)⁴); "excess_range", which costs nothing where a tail is short and
            presses longest tails hardest; "log_kurtosis", the logarithm of the paper's own measure, which has no
            gradient where one value outweighs all others; or "fourth_power", mean (x/3)⁴, which has a scale.
        tensors: which ones, as for ``outliers.measure``.
        warmup_steps: optimizer steps over which ``callback`` raises the weight from 0.
    """

    def __init__(
        self,
        model: nn.Module,
        weight: float = 0.1,
        *,
        kind: Literal["log_tail", "excess_range", "log_kurtosis", "fourth_power"] = "log_tail",
        tensors: str | Sequence[str] = "paper",
        warmup_steps: int = 0,
    ) -> None:
        if not 0 <= weight < float("inf"):
            raise ValueError(f"weight={weight}: must be finite and not negative")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps}: must not be negative")
        self.kind = known("kind", kind, KINDS)
        self.full_weight, self.warmup_steps = weight, warmup_steps
        self.weight = weight if warmup_steps == 0 else 0.0
        self._tails: dict[str, Tensor] = {}
        self._keep: Tensor | None = None
        self._share: Tensor | float = 1.0
        modules = dict(model.named_modules())
        chosen = pick(model, tensors)
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            *(self._watch(modules[each.module], each) for each in chosen),
            model.register_forward_hook(self._end),
        ]

    def term(self) -> Tensor | float:
        """weight · mean over tensors, of the last forward in training mode; 0 if there was none."""
        return self.weight * self._mean() if self._tails else 0.0

    @property
    def value(self) -> float:
        """The mean over tensors of the last forward, without the weight."""
        return float(self._mean().detach()) if self._tails else float("nan")

    def set_step(self, step: int) -> None:
        """Sets the weight to that of an optimizer step of the warm-up."""
        done = 1.0 if self.warmup_steps == 0 else min(step / self.warmup_steps, 1.0)
        self.weight = self.full_weight * done

    def remove(self) -> None:
        """Takes the hooks away: the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._tails.clear()

    def callback(self) -> TrainerCallback:
        """For ``Trainer(callbacks=[...])``: the warm-up, and ``outlier_penalty`` in what is logged."""
        from outeffhop.outliers.penalty_callback import PenaltyCallback

        return PenaltyCallback(self)

    def _mean(self) -> Tensor:
        device = next(iter(self._tails.values())).device  # a model may be spread over several
        return torch.stack([tail.to(device) for tail in self._tails.values()]).mean()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:  # what a measurement in between finds is not the penalty
            self._tails.clear()
        mask = kwargs.get("attention_mask")
        self._keep = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        # Trainer divides the loss of each part of a step by the tokens of the whole step, and adds them up
        labels, items = kwargs.get("labels"), kwargs.get("num_items_in_batch")
        if labels is None or items is None:
            self._share = 1.0
        else:
            counted = labels[..., 1:] if "ForCausalLM" in type(model).__name__ else labels
            self._share = (counted != -100).sum() / items

    def _watch(self, module: nn.Module, each: Pick) -> Any:
        def tail(x: Any) -> None:
            x = x[0] if isinstance(x, tuple | list) and x else x
            if not module.training or not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
                return
            keep = self._keep if self._keep is not None and self._keep.shape == x.shape[:2] else None
            # by name: gradient checkpointing runs forward a second time
            self._tails[each.name] = KINDS[self.kind](x, keep)

        if each.side == "input":
            return module.register_forward_pre_hook(lambda _, args: tail(args))
        return module.register_forward_hook(lambda _, args, output: tail(output))

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, Tensor) and self._tails and model.training:
            output["loss"] = loss + self._share * self.term()
            self._tails = {name: tail.detach() for name, tail in self._tails.items()}  # a model's copy copies its hooks
        return output
