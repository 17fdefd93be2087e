"""A model whose weights and activations are rounded as integer inference would round them.

    quantized = simulate(model, "W8A8")
    with Calibration(quantized):
        for batch in batches:
            quantized(**batch)
    freeze(quantized)

``simulate`` returns a copy in eval mode and does not change the model itself. Calibration runs in floating point, so
that no range depends on another. No model code is copied: hooks reach modules, a probe reaches the inside of attention,
and a function mode reaches sums and functions outside of modules. A quantizer is named by its module and what it
quantizes there, "bert.encoder.layer.0.output/add.0"; the number counts within one call of the module. Ranges are those
of real tokens: padding, as ``attention_mask`` marks it, is left out.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outeffhop.models.hf_private import refuse_compiled
from outeffhop.models.inspection import through_ours
from outeffhop.models.real_tokens import RealTokens
from outeffhop.ops.probe import probing
from outeffhop.quantization.observers import Seen, check_finite
from outeffhop.quantization.operations import Operations, is_on_grid, is_sum, on_grid
from outeffhop.quantization.placement import Layout, Site, lay_out
from outeffhop.quantization.points import Point, Power
from outeffhop.quantization.schemes import Scheme

__all__ = ["simulate", "Calibration", "freeze", "measuring", "Simulation", "simulation_of"]

_NAME = "_outeffhop_simulation"
_CACHED = ("key", "value")
Model = TypeVar("Model", bound=nn.Module)


def simulate(model: Model, scheme: str | Scheme = "W8A8", *, exclude: Sequence[str] = ()) -> Model:
    """A copy of the model to be calibrated, frozen and then run with simulated quantization.

    Args:
        model: any model; it is not changed.
        scheme: "W8A8", "W4A8 per-token", "smoothquant", … or a ``Scheme``.
        exclude: patterns of modules ("*.layer.0.*") or quantizers ("*/scores") left in floating point; one that
            matches nothing is an error, here or, for quantizers, in ``freeze``. A tensor whose quantizer is left out
            is not rounded by the modules that read it either.
    """
    refuse_compiled(model)
    if hasattr(model, _NAME):
        raise ValueError("model is a simulation already: pass the model it was made from")
    chosen = Scheme.parse(scheme)
    copied = copy.deepcopy(model).eval()
    simulation = Simulation(chosen, lay_out(copied, chosen.placement, exclude), RealTokens(copied))
    if chosen.kv_bits is not None and not simulation.layout.attention:
        raise ValueError(
            f"scheme={str(chosen)!r}: {type(model).__name__} has no attention that transformers can give a KV cache; "
            f"leave KV{chosen.kv_bits} out"
        )
    if simulation.looks_inside and simulation.layout.attention:
        through_ours(copied)  # the same softmax, with a probe inside
    simulation.attach(copied)
    setattr(copied, _NAME, simulation)
    return copied


def simulation_of(model: nn.Module) -> Simulation:
    found = getattr(model, _NAME, None)
    if not isinstance(found, Simulation):
        raise ValueError(
            f"this {type(model).__name__} is not a simulation: create one with quantized = simulate(model)"
        )
    return found


class Calibration:
    """A context in which the model runs in floating point and its quantizers observe ranges.

    Args:
        model: what ``simulate`` returned; it may be calibrated several times before ``freeze``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.simulation = simulation_of(model)

    def __enter__(self) -> Calibration:
        if self.simulation.state == "frozen":
            raise ValueError(
                "the model is frozen, so its ranges are fixed: create another with simulate(...) to calibrate"
            )
        self.simulation.state = "calibrating"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.simulation.rest()
        if self.simulation.state == "calibrating":  # unless freeze was called inside
            self.simulation.state = "calibrated"


def freeze(model: Model) -> Model:
    """Fixes every range and rounds the weights, in place. From now on the model runs quantized."""
    simulation_of(model).freeze(model)
    return model


@contextmanager
def measuring(model: nn.Module) -> Iterator[dict[str, Power]]:
    """A context in which the activation quantizers of a frozen model add up signal and rounding error, by name."""
    simulation = simulation_of(model)
    found: dict[str, Power] = {}
    simulation.powers = found
    try:
        yield found
    finally:
        simulation.powers = None
        simulation.rest()


class _Frame:
    """One call of a module; ``cross``: it was given what an encoder returned."""

    __slots__ = ("counts", "cross", "name", "quiet")

    def __init__(self, name: str, quiet: bool, cross: bool) -> None:
        self.name, self.quiet, self.cross = name, quiet, cross
        self.counts: Counter[str] = Counter()


class Simulation:
    """The quantizers of one model, and the hooks that bring its tensors to them.

    Attributes:
        state: "new", "calibrating", "calibrated" or "frozen".
        points: the quantizers by name.
        powers: signal and error by name, within ``measuring``.
    """

    def __init__(self, scheme: Scheme, layout: Layout, real: RealTokens) -> None:
        self.scheme, self.layout, self._real = scheme, layout, real
        self.state = "new"
        self.points: dict[str, Point] = {}
        self.powers: dict[str, Power] | None = None
        self._frames: list[_Frame] = []
        self._running: ExitStack | None = None
        self._in_attention = self._at_work = False
        self._left_out: set[str] = set()
        self._batches = 0  # how many the model has begun
        self._seen: list[tuple[str, Seen]] = []  # by the batch that is running, in order
        self._masks: dict[Any, Tensor] = {}  # of its real tokens, for the parts of attention
        self._rows: dict[Any, tuple[Tensor, Tensor]] = {}  # these masks, and where they are true
        self.passing: Collection[str] = ()  # quantizers that let their tensors pass for now, see ``leaving``

    def attach(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            # bound methods, not closures: a deepcopy of the model gets hooks to its own simulation
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            # always_call: also after a forward that raises
            module.register_forward_hook(partial(self._leave, name), always_call=True)

    def freeze(self, model: nn.Module) -> None:
        if self.state == "frozen":
            raise ValueError("the model is frozen already")
        if not self.scheme.dynamic and not self.points:
            raise ValueError(
                "calibration saw no batch, or nothing to quantize: run quantized(**batch) in a block "
                "`with Calibration(quantized):` before freeze(quantized)"
            )
        weights: dict[str, Point] = {}
        seen: list[tuple[str, Seen]] = []
        for point in self.points.values():
            point.check()
        for name, site in self.layout.sites.items():
            weight = getattr(model.get_submodule(name), "weight", None)
            if site.weight and weight is not None and not self._excludes(f"{name}/weight"):
                weights[name] = self._weight_point(name, site, weight.detach(), seen)
        self._check_excluded(model)
        check_finite(seen)  # all at once: each look would make a GPU wait
        for name, found in seen:
            weights[name.removesuffix("/weight")].take(found)
        for point in weights.values():
            point.freeze()
        for point in self.points.values():
            point.freeze()
        for name, point in weights.items():  # last, so that an error leaves the weights unchanged
            module: Any = model.get_submodule(name)
            self.points[point.name] = point
            # a new parameter: a head that shares the embedding's weight keeps the old one
            module.weight = nn.Parameter(point(module.weight.detach()), requires_grad=False)
        self.state = "frozen"

    def _weight_point(self, name: str, site: Site, weight: Tensor, seen: list[tuple[str, Seen]]) -> Point:
        spec = self.scheme.weights
        spec = replace(spec, granularity="tensor") if weight.dim() == 1 else replace(spec, axis=site.axis)
        point = Point(f"{name}/weight", "weight", spec, self.scheme, self.scheme.weight_range)
        received = self.points.get(f"{name}/input")
        if self.scheme.alpha is not None and received is not None:
            received.smooth(point, weight, self.scheme.alpha, 1 - site.axis)
        if (found := point.look(weight)) is not None:
            seen.append((point.name, found))
        return point

    def _excludes(self, name: str) -> bool:
        found = self.layout.excludes(name)
        if found:
            self._left_out.add(name)
        return found

    def _check_excluded(self, model: nn.Module) -> None:
        """A pattern that excluded no quantizer is an error, unless activations have not been seen yet."""
        if self.scheme.dynamic and not self.points:
            return
        for pattern in self.layout.exclude:
            if "/" in pattern and not any(fnmatchcase(name, pattern) for name in self._left_out):
                raise ValueError(
                    f"exclude={pattern!r} matches no quantizer of {type(model).__name__}; some of them: "
                    + ", ".join(get_close_matches(pattern, self.points, n=3, cutoff=0.0))
                )

    @property
    def looks_inside(self) -> bool:
        """Whether something inside attention is quantized."""
        return self.layout.operations or self.scheme.kv_bits is not None

    @property
    def is_quiet(self) -> bool:
        return self._at_work or self._in_attention or not self._frames or self._frames[-1].quiet

    def operation(self, kind: str, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """The output of an addition or an activation function, as ``Operations`` shows it."""
        frame = self._frames[-1]
        if kind == "add" and not is_sum(args):
            return out
        number = frame.counts[kind]
        frame.counts[kind] += 1
        return self._quantize(frame.name, f"{kind}.{number}", out, self._real.of(out, frame.name))

    def _part(self, part: str, tensor: Tensor) -> Tensor:
        """The parts of attention; other operations between scores and context are not quantized."""
        cached = part in _CACHED
        self._in_attention = not cached and part != "context"
        frame = self._frames[-1]
        chosen = self.scheme.kv_bits is not None if cached else self.layout.operations
        if not chosen or frame.quiet:
            return tensor
        return self._quantize(frame.name, part, tensor, self._real_parts(part, tensor, frame))

    def _real_parts(self, part: str, x: Tensor, frame: _Frame) -> Tensor | None:
        """Which entries of a part of attention [B, H, L, …] are of real tokens: of queries, keys, or both."""
        queries, keys = self._real.at(frame.name), self._real.keys(frame.cross, frame.name)
        if part in _CACHED:
            queries, keys = keys, None
        elif part != "scores":
            keys = None  # the weight of padding is 0
        if x.dim() != 4 or (queries is None and keys is None):
            return None
        shape = x.shape[:3] if keys is None else x.shape
        this = (None if queries is None else id(queries), None if keys is None else id(keys), shape, x.device)
        if this in self._masks:  # another layer's parts were shaped alike
            return self._masks[this]
        found = torch.ones(shape, dtype=torch.bool, device=x.device)
        for real, at in ((queries, 2), (keys, 3)):
            if real is not None and real.shape == (x.shape[0], x.shape[at]):
                found &= real.to(x.device).view(len(real), *(-1 if i == at else 1 for i in range(1, found.dim())))
        self._masks[this] = found
        return found

    def _real_rows(self, x: Tensor, real: Tensor | None) -> Tensor:
        """The tensor without padding, [n, …]."""
        if real is None:
            return x
        this = (real.data_ptr(), real.shape, real.stride())
        if this not in self._rows:  # a GPU has to wait for their number: once a batch, not once a tensor
            self._rows[this] = real, real.flatten().nonzero()[:, 0]
        return x.flatten(0, real.dim() - 1).index_select(0, self._rows[this][1].to(x.device))

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._frames or not name:  # the model does not call itself: any frames are left over
            self._begin(kwargs)
        site = self.layout.sites.get(name)
        outer = bool(self._frames) and self._frames[-1].quiet
        given = (*args, *kwargs.values())
        quiet = outer or site is not None or name in self.layout.floating
        self._frames.append(_Frame(name, quiet, any(map(self._real.is_encoded, given))))
        if outer or site is None or site.input is None:
            return None
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor) or (site.input != "always" and is_on_grid(x)):
            return None
        rounded = self._quantize(name, "input", x, self._real.of(x, name, x))
        return ((rounded, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): rounded})

    def _leave(self, name: str, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not self._frames:
            return None
        self._frames.pop()
        if name == self._real.encoder:
            self._real.encoder_returned(out)
        try:
            site = self.layout.sites.get(name)
            if site is None or not isinstance(out, Tensor) or (self._frames and self._frames[-1].quiet):
                return None
            if site.kind == "embedding":
                return on_grid(out)  # rows of a rounded table
            given = args[0] if args else None
            return self._quantize(name, "output", out, self._real.of(out, name, given)) if site.output else None
        finally:
            if not self._frames:
                seen = self._seen
                self._end()
                self._take(seen)

    def rest(self) -> None:
        """Cleans up after a forward that was interrupted: PyTorch calls no hooks after Ctrl-C."""
        self._frames.clear()
        self._end()

    def _begin(self, inputs: dict[str, Any]) -> None:
        self.rest()
        if self.state == "calibrating":  # nothing else asks which tokens are real
            self._real.begin(inputs)
        if self.state in ("new", "calibrated"):
            raise ValueError(
                "the model is not quantized yet: run it in `with Calibration(quantized):`, then call freeze(quantized)"
            )
        self._in_attention = self._at_work = False
        self._batches += 1
        if self.looks_inside:
            self._running = ExitStack()
            self._running.enter_context(probing(self._part))
            if self.layout.operations:
                self._running.enter_context(Operations(self))

    def _take(self, seen: list[tuple[str, Seen]]) -> None:
        """Updates the ranges with what a batch showed. It is read once: each look would make a GPU wait."""
        check_finite(seen)
        for name, found in seen:
            self.points[name].take(found, self._batches)

    def _end(self) -> None:
        self._real.begin({})
        self._seen, self._masks, self._rows = [], {}, {}
        running, self._running = self._running, None
        if running is not None:
            # a notebook runs each cell in its own context, and that of the previous cell is gone
            with suppress(ValueError):
                running.close()

    def _quantize(self, module: str, what: str, x: Tensor, real: Tensor | None = None) -> Tensor:
        name = f"{module}/{what}"
        if self._excludes(name) or (self.state == "frozen" and name in self.passing):
            return on_grid(x.view_as(x))  # nor may the module that reads it round it
        self._at_work = True
        try:
            point = self.points.get(name)
            if self.state == "calibrating":
                if point is None:
                    point = self.points[name] = self._point(name)
                point.dimensions = x.dim()
                if (found := point.look(self._real_rows(x, real))) is not None:
                    self._seen.append((name, found))
                return on_grid(x.view_as(x))  # a view: the caller's own tensor must not be marked
            if point is None and not self.scheme.dynamic:
                raise ValueError(
                    f"{name} was not seen in calibration: calibrate on batches that run the same parts of the model"
                )
            if point is None:
                point = self.points[name] = self._point(name)
            rounded = point(x)
            if self.powers is not None:
                self.powers[name] = self.powers.get(name, Power()).add(x, rounded)
            return on_grid(rounded)
        finally:
            self._at_work = False

    def _point(self, name: str) -> Point:
        spec, how = self.scheme.activations, self.scheme.activation_range
        if name.rpartition("/")[2] in _CACHED and self.scheme.kv_bits is not None:
            spec = replace(spec, bits=self.scheme.kv_bits)
        elif self.scheme.alpha is not None:
            # the range of each channel: it determines both the factors and the range of the smoothed tensor
            spec = replace(spec, granularity="channel", axis=-1)
        return Point(name, "activation", spec, self.scheme, how)
