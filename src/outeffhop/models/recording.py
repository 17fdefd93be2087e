"""How an attention module calls transformers' attention interface, found by running it once.

A copy of the module without weights (on the meta device) runs with made-up inputs, and its attention implementation is
a function that only records how it is called. The model's weights, its config and the random number generators do not
change. The answer is kept per kind of module, so it is found once for all layers of all models of an architecture.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from outeffhop.models.hf_private import set_implementation

__all__ = ["RECORDER", "UNSERVED", "Calls", "calls_of", "record"]

RECORDER = "outeffhop-recorder"  # as an attention implementation; only the copies made here run it

# Arguments by which some models change the scores or the keys; ignoring them would give wrong results.
UNSERVED = ("indices", "block_indices", "head_mask", "cache")
_MARK = "attn_gate"  # the keyword that carries a gate's openings
_LENGTH = 4


@dataclass(frozen=True)
class Calls:
    """How a module calls the attention function.

    Attributes:
        hands_on: a keyword given to the module's forward reaches the attention function.
        own_sinks: the module passes its own learned sinks (``s_aux``), as gpt-oss does.
        by_pieces: one forward calls it several times, once for each piece of the input.
        unserved: the arguments it passes that our attention does not take, such as the indices of sparse attention.
    """

    hands_on: bool
    own_sinks: bool
    by_pieces: bool
    unserved: tuple[str, ...] = ()


_Note = Callable[[nn.Module, dict[str, Any]], None]
_NOTE: ContextVar[_Note | None] = ContextVar("note", default=None)
_FOUND: dict[Hashable, Calls | None] = {}


def record(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function of the recorder: records the call and returns an empty tensor of the right shape."""
    note = _NOTE.get()
    if note is None:
        raise ValueError(f"attn_implementation={RECORDER!r} computes no attention: choose another implementation")
    note(module, kwargs)
    return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def calls_of(module: nn.Module) -> Calls | None:
    """How a module calls the attention interface; None if it does not, or if it cannot be run on made-up inputs."""
    if not _may_be_attention(module):
        return None
    kind = _kind(module)
    if kind not in _FOUND:
        _FOUND[kind] = _run(module)
    return _FOUND[kind]


def _may_be_attention(module: nn.Module) -> bool:
    """Whether to try a run: the module has a config that names its implementation, and a class named like attention."""
    if isinstance(module, PreTrainedModel) or not isinstance(getattr(module, "config", None), PreTrainedConfig):
        return False
    return any(word in kind.__name__ for kind in type(module).__mro__ for word in ("Attention", "Attn", "MLA"))


def _kind(module: nn.Module) -> Hashable:
    """Everything the calls may depend on: the class, its switches, what it leaves out, its children and parameters."""
    kind: Any = type(module)  # Any: to a type checker a class of modules cannot be hashed
    switches = sorted((n, v) for n, v in vars(module).items() if isinstance(v, bool) and n != "training")
    children = tuple(name for name, _ in module.named_children())
    parameters = tuple(name for name, _ in module.named_parameters(recurse=False))
    absent = tuple(sorted(name for name, value in vars(module).items() if value is None))
    return kind, tuple(switches), absent, children, parameters


def _run(module: nn.Module) -> Calls | None:
    clone = _without_weights(module)
    for arguments in _inputs(clone):
        calls: list[dict[str, Any]] = []

        def note(caller: nn.Module, kwargs: dict[str, Any], calls: list[dict[str, Any]] = calls) -> None:
            if caller is clone:  # not an attention module inside this one, which is found separately
                calls.append(kwargs)

        # made-up inputs may not suit the module; then the next ones are tried
        with _noting(note), suppress(Exception):
            type(clone).forward(clone, **arguments)  # of the class, since other libraries wrap that of the instance
        if calls:
            return Calls(
                hands_on=all(_MARK in kwargs for kwargs in calls),
                own_sinks=any(kwargs.get("s_aux") is not None for kwargs in calls),
                by_pieces=len(calls) > 1,
                unserved=tuple(name for name in UNSERVED if any(kwargs.get(name) is not None for kwargs in calls)),
            )
    return None


@contextmanager
def _noting(note: _Note) -> Iterator[None]:
    token = _NOTE.set(note)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            yield
    finally:
        _NOTE.reset(token)


def _without_weights(module: Any) -> nn.Module:
    """A copy on the meta device whose config names the recorder and whose projections take inputs of any size."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    config = copy.deepcopy(module.config)
    set_implementation(config, RECORDER)
    memo[id(module.config)] = config
    clone = copy.deepcopy(module, memo).eval()
    for name, child in list(clone.named_modules()):
        taken, given = getattr(child, "in_features", None), getattr(child, "out_features", None)
        if name and isinstance(taken, int) and isinstance(given, int):
            clone.set_submodule(name, _Projection(taken, given))
    return clone


class _Projection(nn.Module):
    """Replaces a linear layer of any kind: adapted, quantized, with hooks."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.out_features)


def _inputs(module: Any) -> Iterator[dict[str, Any]]:
    """Arguments for ``forward`` by the names transformers uses, one guess after another."""
    parameters = dict(list(inspect.signature(type(module).forward).parameters.items())[1:])
    packed = "cu_seqlens" in parameters  # the images of a batch are concatenated, without a batch dimension
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    width = _width(module)

    def tensor(*shape: int) -> Tensor:
        return torch.empty(shape if packed else (1, *shape), dtype=dtype, device="meta")

    known: dict[str, Any] = {
        "cu_seqlens": torch.tensor([0, _LENGTH // 2, _LENGTH], dtype=torch.int32, device="cpu"),
        "max_seqlen": _LENGTH // 2,
        "position_ids": torch.arange(_LENGTH, device="meta")[None],
        "layer_idx": 0,
        "shared_kv_states": {},
    }
    # cosines and sines that fit any layout, and those of whole heads; something that is added to the input; nothing
    rotations = (tensor(1, 1),) * 2, (tensor(_LENGTH, _head_dim(module)),) * 2
    rotated = "position_embeddings" in parameters
    for positions in (*rotations, tensor(_LENGTH, width), None) if rotated else (None,):
        for more in ((), ("encoder_hidden_states", "key_value_states", "cross_attention_states")):
            arguments: dict[str, Any] = {}
            for name, parameter in parameters.items():
                required = parameter.default is parameter.empty
                if parameter.kind is parameter.VAR_KEYWORD:
                    arguments[_MARK] = torch.empty((), device="meta")
                elif parameter.kind is parameter.VAR_POSITIONAL:
                    continue
                elif name == "position_embeddings":
                    arguments[name] = positions
                elif name in known and (required or packed):
                    arguments[name] = known[name]
                elif required and "mask" in name:
                    arguments[name] = None
                elif required or name in ("hidden_states", *more):
                    arguments[name] = tensor(_LENGTH, width)
            yield arguments


def _width(module: Any) -> int:
    projections = (child.in_features for child in module.modules() if isinstance(child, _Projection))
    return next(projections, None) or int(getattr(module.config, "hidden_size", 8))


def _head_dim(module: Any) -> int:
    for name in ("qk_rope_head_dim", "head_dim", "attention_head_size"):
        if isinstance(size := getattr(module, name, None), int):
            return size
    return 2
