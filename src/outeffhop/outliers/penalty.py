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
from outeffhop.models.real_tokens import RealTokens
from outeffhop.outliers.tails import excess_range, excess_size, fourth_power, log_kurtosis, log_tail
from outeffhop.outliers.tensors import Pick, pick

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["KINDS", "OutlierPenalty"]

KINDS = {
    "log_tail": log_tail,
    "excess_range": excess_range,
    "excess_size": excess_size,
    "log_kurtosis": log_kurtosis,
    "fourth_power": fourth_power,
}


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
            presses longest tails hardest; "excess_size", which also costs where all values of a tensor are large;
            "log_kurtosis", the logarithm of the paper's own measure, which has no
            gradient where one value outweighs all others; or "fourth_power", mean (x/3)⁴, which has a scale.
        tensors: which ones, as for ``outliers.measure``.
        warmup_steps: optimizer steps over which ``callback`` raises the weight from 0.
    """

    def __init__(
        self,
        model: nn.Module,
        weight: float = 0.1,
        *,
        kind: Literal["log_tail", "excess_range", "excess_size", "log_kurtosis", "fourth_power"] = "log_tail",
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
        self._real = RealTokens(model, look=False)
        self._share: Tensor | float = 1.0
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._changed: set[str] | None = None  # outputs that the model changes in place; None: not known yet
        modules = dict(model.named_modules())
        chosen = pick(model, tensors)
        self._handles = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            *(self._watch(modules[each.module], each) for each in chosen),
            *self._follow(modules),
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
            self._versions.clear()
        self._real.begin(kwargs)
        # Trainer divides the loss of each part of a step by the tokens of the whole step, and adds them up
        labels, items = kwargs.get("labels"), kwargs.get("num_items_in_batch")
        if labels is None or items is None:
            self._share = 1.0
        else:
            counted = labels[..., 1:] if "ForCausalLM" in type(model).__name__ else labels
            self._share = (counted != -100).sum() / items

    def _follow(self, modules: dict[str, nn.Module]) -> list[Any]:
        """Hooks that see what an encoder returns."""
        if self._real.encoder is None:
            return []
        encoder = modules[self._real.encoder]
        return [encoder.register_forward_hook(lambda _, args, output: self._real.encoder_returned(output))]

    def _watch(self, module: nn.Module, each: Pick) -> Any:
        def tail(x: Any, given: Any = None) -> None:
            x = x[0] if isinstance(x, tuple | list) and x else x
            if not module.training or not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
                return
            keep = self._real.of(x, each.module, given) if x.dim() > 2 else None
            # by name: gradient checkpointing runs forward a second time
            self._tails[each.name] = KINDS[self.kind](x, keep)

        if each.side == "input":
            return module.register_forward_pre_hook(lambda _, args: tail(args, *args[:1]))

        def see(_: nn.Module, args: Any, output: Any) -> Any:
            tail(output, *args[:1])
            return self._kept(each.name, output) if module.training else None

        return module.register_forward_hook(see)

    def _kept(self, name: str, output: Any) -> Any:
        """A copy of an output that the model changes in place, as Falcon does: the penalty's gradient needs it whole.

        The first forward copies every output and finds out which ones the model changes.
        """
        kept = self._changed is not None and name not in self._changed
        if kept or torch.compiler.is_compiling() or not isinstance(output, Tensor):
            return None
        copy = output.clone()
        self._versions[name] = copy, copy._version
        return copy

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        if self._changed is None and self._versions:
            self._changed = {name for name, (x, version) in self._versions.items() if x._version != version}
        self._versions.clear()
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, Tensor) and self._tails and model.training:
            output["loss"] = loss + self._share * self.term()
            self._tails = {name: tail.detach() for name, tail in self._tails.items()}  # a model's copy copies its hooks
        return output
