"""From softmax to softmax_n in small steps: a schedule that lets the sink rise while a model is fine-tuned."""

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
    extension_of,
    has_attention,
    has_own_sinks,
    hook_all,
    method_in,
    place,
)
from outeffhop.models.persistence import annealing, describe

__all__ = ["SinkSchedule", "FAR", "movable"]

# A sink at which softmax_n and softmax agree to rounding for scores of any usual size: n = 2e-9.
FAR = -20.0


@dataclass(frozen=True)
class SinkSchedule:
    """The sink (log n) of every attention module over training steps; gates close along with it.

    At step 0 the sink is ``start`` and a gate's logit offset −``start``, so that the model computes
    softmax; from ``steps`` on both are the method's own. Learned sinks are left to the optimiser.

    Attributes:
        steps: how many optimiser steps the way takes.
        start: the first sink, far below the scores.
        end: the last, log n of the method: 0 for softmax1.
        shape: of the way.
    """

    steps: int
    start: float = FAR
    end: float = 0.0
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps}: at least 1 is needed")
        if not math.isfinite(self.start) or not math.isfinite(self.end):
            raise ValueError(
                f"start={self.start}, end={self.end}: finite numbers are needed; {FAR} is softmax to rounding"
            )
        if self.shape not in ("linear", "cosine"):
            raise ValueError(f"shape={self.shape!r} is unknown: linear or cosine")

    @classmethod
    def to(
        cls, method: str | Method, steps: int, start: float = FAR, shape: Literal["linear", "cosine"] = "linear"
    ) -> SinkSchedule:
        """The schedule that ends at a method's own sink."""
        method = Method.parse(method)
        sink = method.normalizer.sink
        # without a fixed sink, gates alone move
        return cls(steps, start, sink if sink is not None and _has_fixed_sink(method) else 0.0, shape)

    def progress(self, step: int) -> float:
        """The part of the way gone, 0 to 1."""
        part = min(max(step / self.steps, 0.0), 1.0)
        return part if self.shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * part)

    def at(self, step: int) -> float:
        """The sink at a step."""
        if step >= self.steps:
            return self.end
        return self.start + self.progress(step) * (self.end - self.start)

    def apply(self, model: PreTrainedModel, step: int) -> None:
        """Brings the model's fixed sinks and gate offsets to where they are at a step.

        On the way they are buffers, saved and loaded with the model, as ``config.outeffhop`` says; at the
        end they are the method's numbers again and nothing of the schedule is left.
        """
        if not has_attention(model):
            raise ValueError(
                f"{type(model).__name__} is none of transformers' attention models, which alone can be moved"
            )
        method = method_in(model)
        if method is None:
            raise ValueError(
                f"attn_implementation={implementation(model.config)!r} has no sink to move: "
                "outeffhop.convert(model, 'outeffhop') first"
            )
        if not movable(method):
            raise ValueError(f"{method} has neither a fixed sink nor a gate that a schedule could move")
        sink = method.normalizer.sink
        if _has_fixed_sink(method) and sink != self.end:
            raise ValueError(f"end={self.end} is not the sink of {method}, which is {sink}: give end={sink}")
        modules = attention_modules(model).values()
        extensions = [(m, e) for m in modules if (e := extension_of(m)) is not None and e.method == method]
        done, moving = step >= self.steps, any(annealing(extension) for _, extension in extensions)
        if done and not moving:
            return
        refuse_own_sinks(model, method)
        if len(extensions) < len(modules):
            raise ValueError(
                f"attn_implementation={method.name!r} was set, but the attention modules were not made for {method}: "
                f"outeffhop.convert(model, {str(method)!r}) first"
            )
        for module, extension in extensions:
            if done:
                extension.release()
            else:
                extension.hold(**place(module))
                extension.move(self.at(step), self.progress(step), self.start)
        if done or not moving:
            hook_all(model)
            describe(model)

    def callback(self) -> TrainerCallback:
        """For ``Trainer(callbacks=[...])``: applies the schedule before every optimiser step, also after a resume."""
        return _Callback(self)


class _Callback(TrainerCallback):
    def __init__(self, schedule: SinkSchedule) -> None:
        self.schedule = schedule

    def _apply(self, state: Any, model: Any) -> None:
        # a compiled or distributed wrapper keeps the model inside
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
    """Whether the method has a gate or a fixed sink, and is softmax without them."""
    return method.normalizer.sink is not None and (method.gate is not None or _has_fixed_sink(method))


def refuse_own_sinks(model: nn.Module, method: Method) -> None:
    """Sinks that a model has learned itself win over the method's, so that there would be none to move."""
    for name, module in attention_modules(model).items():
        if has_own_sinks(module) and _has_fixed_sink(method):
            raise ValueError(
                f"{name} ({type(module).__name__}) has learned sinks of its own, which win over that of {method}: it "
                "cannot be moved; convert without same_function and a schedule, which leaves them as they are, or to "
                "'gated', whose gates alone move"
            )


def _has_fixed_sink(method: Method) -> bool:
    sink = method.normalizer.sink
    return sink is not None and sink > -math.inf and method.normalizer.learns is None
