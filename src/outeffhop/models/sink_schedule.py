"""Moves a model from softmax to softmax_n in small steps: a schedule for the sink during fine-tuning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel, TrainerCallback

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

__all__ = ["SinkSchedule", "FAR", "movable"]

# With this sink (n = 2e-9), softmax_n equals softmax up to rounding for all usual scores.
FAR = -20.0


@dataclass(frozen=True)
class SinkSchedule:
    """A schedule for the sink (log n) of every attention module; gates move along with it.

    At step 0 the sink is ``start`` and the gates' logit offset is −``start``, so the model computes softmax. From
    ``steps`` on, both have the method's own values. Learned sinks are left to the optimiser.

    Attributes:
        steps: the number of optimiser steps.
        start: the first sink, far below the scores.
        end: the last sink, log n of the method: 0 for softmax1.
        shape: the shape of the curve between them.
    """

    steps: int
    start: float = FAR
    end: float = 0.0
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: must be at least 1")
        if not math.isfinite(self.start) or not math.isfinite(self.end):
            raise ValueError(f"start={self.start}, end={self.end}: must be finite; {FAR} gives softmax up to rounding")
        if self.shape not in ("linear", "cosine"):
            raise ValueError(f"shape={self.shape!r} is unknown: choose linear or cosine")

    @classmethod
    def to(
        cls, method: str | Method, steps: int, start: float = FAR, shape: Literal["linear", "cosine"] = "linear"
    ) -> SinkSchedule:
        """The schedule that ends at a method's own sink."""
        method = Method.parse(method)
        sink = method.normalizer.sink
        # without a fixed sink, only the gates move
        return cls(steps, start, sink if sink is not None and _has_fixed_sink(method) else 0.0, shape)

    def progress(self, step: int) -> float:
        """The fraction of the schedule that is done, 0 to 1."""
        part = min(max(step / self.steps, 0.0), 1.0)
        return part if self.shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * part)

    def at(self, step: int) -> float:
        """The sink at a step."""
        if step >= self.steps:
            return self.end
        return self.start + self.progress(step) * (self.end - self.start)

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
        sink = method.normalizer.sink
        if _has_fixed_sink(method) and sink != self.end:
            raise ValueError(f"end={self.end} is not the sink of {method}, which is {sink}: give end={sink}")
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
                state.move(self.at(step), self.progress(step), self.start)
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
                f"{name} ({type(module).__name__}) has learned sinks of its own, which replace that of {method}, "
                "so there is no sink to move: convert without same_function and without a schedule, or to 'gated', "
                "where only the gates move"
            )


def _has_fixed_sink(method: Method) -> bool:
    sink = method.normalizer.sink
    return sink is not None and sink > -math.inf and method.normalizer.learns is None
