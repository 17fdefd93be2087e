"""Operations outside of modules (residual sums, functional activations), intercepted as PyTorch calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["MOVES", "Operations", "Watcher", "on_grid", "is_on_grid", "is_sum"]

_MARK = "_outeffhop_on_grid"


def on_grid(x: Tensor) -> Tensor:
    """The tensor, marked as lying on a quantizer's grid."""
    setattr(x, _MARK, True)
    return x


def is_on_grid(x: Tensor) -> bool:
    return getattr(x, _MARK, False)


_ADDS = (torch.add, Tensor.add, Tensor.add_)  # a + b arrives as Tensor.add, a += b as Tensor.add_
_ACTIVATIONS = {
    "gelu": (F.gelu,),
    "relu": (F.relu, torch.relu, Tensor.relu),
    "silu": (F.silu,),
    "tanh": (F.tanh, torch.tanh, Tensor.tanh),
    "elu": (F.elu,),
    "leaky_relu": (F.leaky_relu,),
    "mish": (F.mish,),
    "hardswish": (F.hardswish,),
    "softplus": (F.softplus,),
}
_KINDS: dict[Callable[..., Any], str] = dict.fromkeys(_ADDS, "add")
_KINDS |= {function: kind for kind, functions in _ACTIVATIONS.items() for function in functions}

# These move values and do not change them.
MOVES = frozenset(
    getattr(home, name)
    for name in (
        *("view", "reshape", "transpose", "permute", "movedim", "contiguous", "flatten", "unflatten", "expand"),
        *("unsqueeze", "squeeze", "split", "chunk", "unbind", "select", "narrow", "clone", "detach", "to", "float"),
        *("view_as", "reshape_as", "expand_as", "__getitem__", "repeat_interleave", "dropout"),
    )
    for home in (torch, Tensor, F)
    if callable(getattr(home, name, None))
)


class Watcher(Protocol):
    @property
    def is_quiet(self) -> bool:
        """Whether to ignore what runs now."""
        ...

    def operation(self, kind: str, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """The tensor that replaces an operation's output."""
        ...


class Operations(TorchFunctionMode):
    """Shows sums and activation functions to a watcher, and propagates the marks of ``on_grid``."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher = watcher

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        kind = _KINDS.get(func)
        if kind is not None:
            args = (*args, kwargs["other"]) if "other" in kwargs else args
            if isinstance(out, Tensor) and not self.watcher.is_quiet:
                rounded = self.watcher.operation(kind, args, out)
                # in place: others hold this tensor too
                return rounded if func is not Tensor.add_ or rounded is out else on_grid(out.copy_(rounded))
        elif func in MOVES and args and isinstance(args[0], Tensor) and is_on_grid(args[0]):
            for moved in (out,) if isinstance(out, Tensor) else out:
                on_grid(moved)
        return out


def is_sum(args: tuple[Any, ...]) -> bool:
    """Whether an addition joins two activations, not an activation and a bias, number, position or mask."""
    if len(args) < 2 or not (isinstance(args[0], Tensor) and isinstance(args[1], Tensor)):
        return False
    a, b = args[:2]
    if not (a.is_floating_point() and b.is_floating_point()):
        return False
    if min(a.dim(), b.dim()) < 2 or a.shape[-1] != b.shape[-1] or a.shape[-1] == 1:
        return False
    # [B, H, L, L] and [B, 1, L, L]: scores, or their bias, and a mask
    return a.shape == b.shape or a.dim() != b.dim() or a.dim() < 4
