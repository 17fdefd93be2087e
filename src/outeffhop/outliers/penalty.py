"""Training against the tail: a penalty on the kurtosis of the tensors that ``measure`` watches.

The loss of a trained model does not mind outliers, so nothing removes them. The penalty puts the paper's own measure
into it: the logarithm of the kurtosis, which has no scale to choose, averaged over tensors.

    penalty = OutlierPenalty(model, weight=0.1)     # from now on the loss of the model contains it
    trainer = Trainer(model, ..., callbacks=[penalty.callback()])   # optional: warm-up and logging
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from outeffhop._naming import known
from outeffhop.outliers.tensors import Pick, pick

if TYPE_CHECKING:
    from transformers import TrainerCallback

__all__ = ["OutlierPenalty", "fourth_power", "log_kurtosis"]

KINDS = ("log_kurtosis", "fourth_power")


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
        kind: "log_kurtosis", or "fourth_power" of x / 3.
        tensors: which ones, as for ``outliers.measure``.
        warmup_steps: optimizer steps over which ``callback`` raises the weight from 0.
    """

    def __init__(
        self,
        model: nn.Module,
        weight: float = 0.1,
        *,
        kind: Literal["log_kurtosis", "fourth_power"] = "log_kurtosis",
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
        chosen = [each for each in pick(model, tensors) if each.kurtosis]
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
            self._tails[each.name] = (log_kurtosis if self.kind == "log_kurtosis" else fourth_power)(x, keep)

        if each.side == "input":
            return module.register_forward_pre_hook(lambda _, args: tail(args))
        return module.register_forward_hook(lambda _, args, output: tail(output))

    def _end(self, model: nn.Module, args: Any, output: Any) -> Any:
        loss = output.get("loss") if isinstance(output, dict) else None
        if isinstance(loss, Tensor) and self._tails and model.training:
            output["loss"] = loss + self._share * self.term()
            self._tails = {name: tail.detach() for name, tail in self._tails.items()}  # a model's copy copies its hooks
        return output


def log_kurtosis(x: Tensor, keep: Tensor | None = None) -> Tensor:
    """log(m₄ / m₂²) about the mean of each sample, averaged over samples: a Gaussian has log 3.

    Exact gradient: ∂/∂x = 4 [(c³ − m₃)/m₄ − c/m₂] / N with c = x − mean. Backward keeps ``x`` and a few numbers per
    sample. Moments are about the mean, in a second pass: sums of plain powers would cancel beside a large outlier.

    Args:
        x: [B, ..., d].
        keep: [B, T] for x [B, T, d]: False leaves a token out (padding).
    """
    return _LogKurtosis.apply(x, keep)  # type: ignore[no-any-return]


def fourth_power(x: Tensor, keep: Tensor | None = None, scale: float = 3.0) -> Tensor:
    """mean((x / scale)⁴): unlike the kurtosis it also minds the size of all values."""
    powers = (x.to(_dtype(x)) / scale) ** 4
    if keep is None:
        return powers.mean()
    mask = _spread(keep, x).to(powers.dtype)
    return (powers * mask).sum() / (mask.sum() * (powers.numel() / mask.numel())).clamp(min=1)


class _LogKurtosis(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor | None) -> Tensor:
        mean, unit, count, m2, m3, m4 = _moments(x.detach(), keep)
        ctx.save_for_backward(x, keep, mean, unit, count, m2, m3, m4)
        return (torch.log(m4) - 2 * torch.log(m2)).mean()

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, keep, mean, unit, count, m2, m3, m4 = ctx.saved_tensors
        each = 4 * grad / (x.shape[0] * count * unit)
        c = _centred(x, keep, mean, unit)
        # in place: two tensors of this size, not six
        out = (c * c).mul_(each / m4).sub_(each / m2).mul_(c).sub_(each * m3 / m4)
        if keep is not None:
            out.mul_(_spread(keep, x))
        return out.to(x.dtype), None


def _moments(x: Tensor, keep: Tensor | None) -> tuple[Tensor, ...]:
    """Mean, unit, the numbers counted, and moments 2, 3 and 4 about the mean in that unit, of each sample: [B, 1, ...].

    The unit is the mean size, since the fourth power of a float32 overflows at 10⁹ and vanishes at 10⁻⁹. The kurtosis
    does not depend on it. A constant sample counts as one of kurtosis 1 without a gradient.
    """
    dims = tuple(range(1, x.dim()))
    x = x.to(_dtype(x))
    if keep is None:
        count = x.new_full((x.shape[0], *[1] * len(dims)), x[0].numel())
    else:
        mask = _spread(keep, x).to(x.dtype)
        count = (mask.sum(dims, keepdim=True) * (x[0].numel() / mask[0].numel())).clamp(min=1)
        x = x * mask
    mean = x.sum(dims, keepdim=True) / count
    unit = torch.linalg.vector_norm(x, 1, dims, keepdim=True) / count
    unit = torch.where(unit > 0, unit, 1)
    c = _centred(x, keep, mean, unit)
    square = c * c
    m2 = square.sum(dims, keepdim=True) / count
    m3 = c.mul_(square).sum(dims, keepdim=True) / count
    m4 = square.mul_(square).sum(dims, keepdim=True) / count
    alive = m4 > 0
    return mean, unit, torch.where(alive, count, torch.inf), torch.where(alive, m2, 1), m3, torch.where(alive, m4, 1)


def _centred(x: Tensor, keep: Tensor | None, mean: Tensor, unit: Tensor) -> Tensor:
    """(x − mean) / unit where it counts, 0 elsewhere; always a tensor of its own."""
    c = (x.to(_dtype(x)) - mean).div_(unit)
    return c if keep is None else c.mul_(_spread(keep, x))


def _dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _spread(keep: Tensor, x: Tensor) -> Tensor:
    return keep.to(torch.bool).reshape(*keep.shape, *[1] * (x.dim() - keep.dim()))
