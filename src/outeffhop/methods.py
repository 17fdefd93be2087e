"""The attention method as a value: a normalizer of the scores and, for some, a gate on the output or QK-norm.

A method is written as its name with the parameters that differ from the defaults, such as ``clipped(gamma=-0.03)`` or
``outeffhop(sink=learned)``; ``Method.parse`` is the inverse of ``str``. The value travels from the command line into
model, config and report; nothing else in the package switches on a method's name. This module does not import torch, so
that listing the methods takes no time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from outeffhop._naming import did_you_mean, known

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "METHODS",
    "Method",
    "Entry",
    "Normalizer",
    "GateSpec",
]

Learned = Literal["learned"]


class Normalizer:
    """Scores over the last dimension → weights; −inf marks a key that takes no part.

    A call takes the learned tensor if there is one: the sink [H], or α.
    """

    @property
    def sink(self) -> float | None:
        """log n if fused attention can serve this normalizer, else None."""
        return None

    def clipping(self, keys: int) -> tuple[float, float, float] | None:
        """γ, ζ and log n for that many keys if the weights are a clipped softmax_n, else None."""
        return None

    @property
    def entmax_order(self) -> float | None:
        """α, at its start if it is learned, if the weights are α-entmax, else None."""
        return None

    @property
    def learns(self) -> str | None:
        """The name of what is learned, "sink" or "alpha"; None if nothing is."""
        return None

    @property
    def takes_sinks(self) -> bool:
        """Whether a model's own learned sinks, such as those of gpt-oss, can replace the fixed one."""
        return False

    @property
    def start(self) -> float:
        """The initial value of the learned tensor."""
        raise ValueError(f"{self} learns nothing")

    def __call__(self, scores: Tensor, learned: Tensor | None = None) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class SoftmaxN(Normalizer):
    """exp(x_i) / (n + Σ exp(x_j)): n = 0 is softmax, n = 1 the paper's softmax1."""

    n: float = 1.0
    noop: Literal["fixed", "learned"] = "fixed"

    def __post_init__(self) -> None:
        if not 0.0 <= self.n < math.inf:
            raise ValueError(f"n={self.n}: the number of no-op patterns must be finite and not negative")
        _check_words(self)
        if self.noop == "learned" and self.n == 0:
            raise ValueError("n=0 with a learned sink: it starts from log n, so n must be greater than 0")

    @property
    def sink(self) -> float:
        return math.log(self.n) if self.n > 0 else -math.inf

    @property
    def learns(self) -> str | None:
        return "sink" if self.noop == "learned" else None

    @property
    def takes_sinks(self) -> bool:
        return self.noop == "fixed"

    @property
    def start(self) -> float:
        return self.sink

    def __call__(self, scores: Tensor, learned: Tensor | None = None) -> Tensor:
        from outeffhop.functional import below_sink, softmax_n

        if learned is None:
            return softmax_n(scores, self.n)
        x, n, _ = below_sink(scores, learned.to(scores.dtype)[:, None, None])
        return softmax_n(x, n)


@dataclass(frozen=True)
class Clipped(Normalizer):
    """clip((ζ − γ)·softmax_n(x) + γ, 0, 1), with γ given or γ = −α/T for T keys."""

    gamma: float | None = -0.025
    zeta: float = 1.0
    alpha: float | None = None
    n: float = 0.0

    def __post_init__(self) -> None:
        if (self.gamma is None) == (self.alpha is None):
            raise ValueError(f"gamma={self.gamma}, alpha={self.alpha}: give one of the two (γ = −α/T)")
        if self.gamma is not None and not -math.inf < self.gamma <= 0:
            raise ValueError(f"gamma={self.gamma}: must be finite and at most 0, since clipping stretches outwards")
        if not 1 <= self.zeta < math.inf:
            raise ValueError(f"zeta={self.zeta}: must be finite and at least 1, since clipping stretches outwards")
        if self.alpha is not None and not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha}: must be finite and at least 0 (γ = −α/T)")
        if not 0.0 <= self.n < math.inf:
            raise ValueError(f"n={self.n}: the number of no-op patterns must be finite and not negative")

    @property
    def takes_sinks(self) -> bool:
        return True

    def __call__(self, scores: Tensor, learned: Tensor | None = None) -> Tensor:
        from outeffhop.functional import below_sink, clipped_softmax

        gamma, zeta, _ = self.clipping(scores.shape[-1])
        if learned is None:
            return clipped_softmax(scores, gamma, zeta, self.n)
        x, n, _ = below_sink(scores, learned.to(scores.dtype)[:, None, None])
        return clipped_softmax(x, gamma, zeta, n)

    def clipping(self, keys: int) -> tuple[float, float, float]:
        gamma = self.gamma if self.gamma is not None else -self.alpha / max(keys, 1)  # type: ignore[operator]
        return gamma, self.zeta, math.log(self.n) if self.n > 0 else -math.inf


@dataclass(frozen=True)
class Entmax(Normalizer):
    """α-entmax: sparse weights; α = 2 is sparsemax. A learned α starts from 1.5."""

    alpha: float | Learned = "learned"

    def __post_init__(self) -> None:
        if self.alpha != "learned" and (isinstance(self.alpha, str) or not 1.0 <= self.alpha < math.inf):
            raise ValueError(f"alpha={self.alpha}: must be a number of at least 1, or learned")

    @property
    def entmax_order(self) -> float:
        return self.start

    @property
    def learns(self) -> str | None:
        return "alpha" if self.alpha == "learned" else None

    @property
    def start(self) -> float:
        return 1.5 if self.alpha == "learned" else float(self.alpha)

    def __call__(self, scores: Tensor, learned: Tensor | None = None) -> Tensor:
        from outeffhop.functional import entmax

        return entmax(scores, self.start if learned is None else learned)


@dataclass(frozen=True)
class Polynomial(Normalizer):
    """sign(x_i)|x_i|^(order − 1), divided by the sum of magnitudes: the dense associative memory F(z) = zᵒʳᵈᵉʳ."""

    order: int = 10

    def __post_init__(self) -> None:
        if self.order < 2 or self.order % 2:
            raise ValueError(f"order={self.order}: must be even and at least 2")

    def __call__(self, scores: Tensor, learned: Tensor | None = None) -> Tensor:
        import torch

        x = torch.where(torch.isneginf(scores), 0.0, scores)
        # the weights do not depend on the scale of a row, so the largest is brought to 1
        top = x.detach().abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_ones(())
        power = (x / torch.where(top == 0, 1.0, top)) ** (self.order - 1)
        total = power.abs().sum(-1, keepdim=True)
        return power / torch.where(total == 0, 1.0, total)


@dataclass(frozen=True)
class GateSpec:
    """sigmoid(G(x)) on each head's output, x the attention's input.

    Attributes:
        gate: one opening per head and token, per head, token and channel (element), per head (logits averaged
            over tokens), or a constant per head.
        predictor: per-head linear, per-head mlp (d → d/4 → 1), or linear from all features.
        init: the opening before training.
    """

    gate: Literal["token", "element", "head", "constant"] = "token"
    predictor: Literal["linear", "mlp", "features"] = "linear"
    init: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 < self.init < 1.0:
            raise ValueError(f"init={self.init}: the initial opening of the gate must lie strictly between 0 and 1")
        _check_words(self)


@dataclass(frozen=True)
class Method:
    """An attention method.

    Attributes:
        name: one of ``METHODS``.
        normalizer: how scores become weights.
        gate: of each head's output, or None.
        qk_norm: "rms" divides queries and keys by their root mean square, head by head, before the scores.
    """

    name: str
    normalizer: Normalizer
    gate: GateSpec | None = None
    qk_norm: Literal["none", "rms"] = "none"

    def __post_init__(self) -> None:
        _check_words(self)

    @staticmethod
    def parse(text: str | Method) -> Method:
        """``"outeffhop(n=4)"`` → Method; the inverse of ``str``."""
        if isinstance(text, Method):
            return text
        if not isinstance(text, str):
            raise TypeError(f"method={text!r} is a {type(text).__name__}: give a name such as 'outeffhop(n=4)'")
        match = re.fullmatch(r"\s*([^()\s]+)\s*(?:\((.*)\))?\s*", text)
        if match is None:
            raise ValueError(f"method={text!r}: must be of the form name or name(parameter=value, ...)")
        name, inside = match[1], match[2]
        if name not in METHODS:  # a method that a user added may be spelled in any way
            name = name.lower().replace("_", "-")
            name = _ALIASES.get(name, name)
        if name not in METHODS:
            raise ValueError(f"method={match[1]!r} is unknown{_nearest(name, [*METHODS, *_ALIASES])}")
        entry = METHODS[name]
        given: dict[str, str] = {}
        for part in filter(None, (p.strip() for p in (inside or "").split(","))):
            parameter, sign, value = (p.strip() for p in part.partition("="))
            if not sign:
                raise ValueError(f"method={text!r}: {part!r} must be of the form parameter=value")
            if parameter not in entry.parameters:
                raise ValueError(
                    f"method {name!r} has no parameter {parameter!r}{_nearest(parameter, entry.parameters)}"
                )
            if parameter in given:
                raise ValueError(f"method={text!r}: {parameter!r} is given twice")
            given[parameter] = value
        return entry.with_parameters(given)

    def __str__(self) -> str:
        entry = METHODS.get(self.name)
        usual = {} if entry is None else entry.values(entry.method)
        values = {} if entry is None else entry.values(self)
        changed = {p: _format(v) for p, v in values.items() if v != usual[p] and v is not None}
        if entry is None or entry.with_parameters(changed) != self:  # parsed again, it would be another method
            raise ValueError(f"{self!r} cannot be written by its name: add an Entry to METHODS that makes it")
        return self.name + (f"({', '.join(f'{p}={v}' for p, v in changed.items())})" if changed else "")


@dataclass(frozen=True)
class Entry:
    """A named method with its defaults, the parameters a user may set, and one line about it."""

    method: Method
    parameters: tuple[str, ...]
    about: str

    def values(self, method: Method) -> dict[str, Any]:
        fields = {**_fields(method.normalizer), **({} if method.gate is None else _fields(method.gate))}
        fields["qk_norm"] = method.qk_norm
        return {p: fields.get(_FIELD.get(p, p)) for p in self.parameters}

    def with_parameters(self, given: dict[str, str]) -> Method:
        typed = {_FIELD.get(p, p): _convert(p, value, self._part(p), _FIELD.get(p, p)) for p, value in given.items()}
        if "alpha" in given and "gamma" in self.parameters:
            typed.setdefault("gamma", None)
        normalizer = self.method.normalizer
        gate = self.method.gate
        return dataclasses.replace(
            self.method,
            normalizer=dataclasses.replace(normalizer, **_only(typed, normalizer)),  # type: ignore[type-var]
            gate=gate and dataclasses.replace(gate, **_only(typed, gate)),
            qk_norm=typed.get("qk_norm", self.method.qk_norm),
        )

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        """Parameter → the words it accepts, for parameters that accept words."""
        words = {p: _WORDS.get((self._part(p), _FIELD.get(p, p)), ()) for p in self.parameters}
        return {p: known for p, known in words.items() if known}

    def _part(self, parameter: str) -> type:
        """The class that has the parameter as a field: the normalizer, the gate or the method."""
        field = _FIELD.get(parameter, parameter)
        parts = (self.method.normalizer, self.method.gate)
        return next((type(part) for part in parts if part is not None and field in _fields(part)), Method)


_WORDS: dict[tuple[type, str], tuple[str, ...]] = {
    (SoftmaxN, "noop"): ("fixed", "learned"),
    (Entmax, "alpha"): get_args(Learned),
    (GateSpec, "gate"): ("token", "element", "head", "constant"),
    (GateSpec, "predictor"): ("linear", "mlp", "features"),
    (Method, "qk_norm"): ("none", "rms"),
}


def _check_words(part: SoftmaxN | GateSpec | Method) -> None:
    for (kind, field), words in _WORDS.items():
        if isinstance(part, kind):
            known(field, getattr(part, field), words)


# Parameters that users know by another name than the field's.
_FIELD = {"sink": "noop"}
_ALIASES = {"dense": "vanilla", "softmax": "vanilla", "softmax1": "outeffhop"}
_SINK, _CLIP = ("n", "sink"), ("gamma", "zeta", "alpha")
_GATE, _EVERY = ("gate", "predictor", "init"), ("qk_norm",)

METHODS: dict[str, Entry] = {
    entry.method.name: entry
    for entry in (
        Entry(Method("vanilla", SoftmaxN(0.0)), _EVERY, "softmax; the Dense modern Hopfield model (also: dense)"),
        Entry(
            Method("outeffhop", SoftmaxN(1.0)),
            (*_SINK, *_EVERY),
            "softmax1: one no-op pattern, n of them, or a learned sink",
        ),
        Entry(
            Method("clipped", Clipped()), (*_CLIP, *_EVERY), "softmax stretched and clipped, so that weights reach 0"
        ),
        Entry(Method("clipped-outeffhop", Clipped(n=1.0)), (*_CLIP, "n", *_EVERY), "softmax1 stretched and clipped"),
        Entry(Method("gated", SoftmaxN(0.0), GateSpec()), (*_GATE, *_EVERY), "softmax, each head's output gated"),
        Entry(
            Method("gated-outeffhop", SoftmaxN(1.0), GateSpec()),
            (*_SINK, *_GATE, *_EVERY),
            "softmax1, each head's output gated",
        ),
        Entry(Method("sparse", Entmax(2.0)), _EVERY, "sparsemax; the Sparse modern Hopfield model"),
        Entry(
            Method("gsh", Entmax()),
            ("alpha", *_EVERY),
            "entmax, α learned or given; the Generalized Sparse Hopfield model",
        ),
        Entry(
            Method("polynomial", Polynomial()),
            ("order", *_EVERY),
            "the dense associative memory with F(z) = z^order",
        ),
    )
}
"""The methods by name: the paper's six, then the Hopfield baselines. Add an ``Entry`` to add a method."""


def _fields(part: Any) -> dict[str, Any]:
    return {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}


def _only(values: dict[str, Any], part: Any) -> dict[str, Any]:
    return {k: v for k, v in values.items() if k in _fields(part)}


def _convert(parameter: str, value: str, part: type, field: str) -> Any:
    words = _WORDS.get((part, field), ())
    if value in words:
        return value
    if words and (part, field) != (Entmax, "alpha"):
        raise ValueError(f"{parameter}={value!r} is unknown{_nearest(value, words)}")
    try:
        return int(value) if field == "order" else float(value)
    except ValueError:
        kind = "an integer" if field == "order" else "a number"
        also = f" or {' or '.join(words)}" if words else ""
        raise ValueError(f"{parameter}={value!r}: must be {kind}{also}") from None


def _format(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _nearest(word: str, names: list[str] | tuple[str, ...]) -> str:
    if not names:
        return "; it has no parameters"
    return f"{did_you_mean(word, names, n=3)} Available: {', '.join(names)}"
