"""Moves a model from softmax to softmax_n in small steps: a schedule for the sink during fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from outeffhop._naming import known
from outeffhop.methods import Method
from outeffhop.models.hf_private import implementation, inside
from outeffhop.models.modules import (
    attention_modules,
    has_attention,
    has_own_sinks,
    hook_all,
    method_in,
    place,
    state_of,
)
from outeffhop.models.persistence import annealing, describe

__all__ = ["SinkSchedule", "movable"]


@dataclass(frozen=True)
class SinkSchedule:
    """Moves the fixed sinks and the gates of a converted model to the method's own values, over optimizer steps.

    At step 0 they are where ``convert`` put them: at the same function, or where calibration found a small share. From
    ``steps`` on, they have the method's own values. Learned sinks are left to the optimizer.

    Attributes:
        steps: the number of optimizer steps.
        shape: the shape of the curve between them.
    """

    steps: int
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")
        known("shape", self.shape, ("linear", "cosine"))

    def progress(self, step: int) -> float:
        """The fraction of the schedule that is done, 0 to 1."""
        part = min(max(step / self.steps, 0.0), 1.0)
        return part if self.shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * part)

    def apply(self, model: PreTrainedModel, step: int) -> None:
        """Sets the model's fixed sinks and gate offsets to their values at a step.

        Before the last step they are buffers, saved and loaded with the model. At the end they are the method's own
        numbers again, and nothing of the schedule remains.
        """
        if not has_attention(model):
            raise ValueError(
                f"{type(model).__name__} does not use transformers' attention interface: it has no sinks to move"
            )
        method = method_in(model)
        if method is None:
            raise ValueError(
                f"attn_implementation={implementation(model.config)!r} has no sink to move: "
                "outeffhop.convert(model, 'outeffhop') first"
            )
        if not movable(method):
            raise ValueError(f"{method} has neither a fixed sink nor a gate that a schedule can move")
        modules = attention_modules(model).values()
        states = [(m, e) for m in modules if (e := state_of(m)) is not None and e.method == method]
        done, moving = step >= self.steps, any(annealing(state) for _, state in states)
        if done and not moving:
            return
        refuse_own_sinks(model, method)
        if len(states) < len(modules):
            raise ValueError(
                f"attn_implementation={method.name!r} was set, but the attention modules have no tensors to move: "
                f"outeffhop.convert(model, {str(method)!r}) first"
            )
        for module, state in states:
            if done:
                state.release()
            else:
                state.hold(**place(module))
                state.move(self.progress(step))
        if done or not moving:
            hook_all(model)
            describe(model)

    def callback(self) -> TrainerCallback:
        """A callback for ``Trainer``: applies the schedule before every optimiser step, also after a resume."""
        return _Callback(self)


class _Callback(TrainerCallback):
    def __init__(self, schedule: SinkSchedule) -> None:
        self.schedule = schedule

    def _apply(self, state: Any, model: Any) -> None:
        # the model may be inside a compiled or distributed wrapper
        while not isinstance(model, PreTrainedModel) and (inner := inside(model)) is not None:
            model = inner
        self.schedule.apply(model, state.global_step)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._apply(state, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._apply(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._apply(state, model)


def movable(method: Method) -> bool:
    """Whether a schedule can move the method: softmax_n with a gate or a fixed sink."""
    return method.normalizer.sink is not None and (method.gate is not None or _has_fixed_sink(method))


def refuse_own_sinks(model: nn.Module, method: Method) -> None:
    """Refuses models with learned sinks of their own: those replace the method's, which would not move."""
    for name, module in attention_modules(model).items():
        if has_own_sinks(module) and _has_fixed_sink(method):
            raise ValueError(
                f"{name} ({type(module).__name__}) has its own learned sinks, which replace that of {method}, "
                "so there is no sink to move: convert without same_function and without a schedule, or to 'gated', "
                "where only the gates move"
            )


def _has_fixed_sink(method: Method) -> bool:
    sink = method.normalizer.sink
    return sink is not None and sink > -math.inf and method.normalizer.learns is None
