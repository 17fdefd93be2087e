"""What a config.json asks for is held against the weights beside it before anything of that size is made.

The weights cannot lie about their size: safetensors refuses a header that does not match the length of its file. A
config can. One line of it may ask for a million layers, or for a vocabulary that fills the memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["check_counts", "check_size"]

# a field that says how many parts to make: transformers makes them, or a list as long, before it looks at the weights
_COUNT = re.compile(r"(layers?|labels|experts|blocks|stages|depths?)$")
_LAYERS = 1 << 10  # however few the tensors are
_PARTS = 1 << 17  # likewise: a label has no tensor of its own
_NUMBERS_PER_BYTE = 8  # weights of one bit
_SMALL = 1 << 26  # numbers that any model may have, such as the causal mask of GPT-2


def check_counts(file: Path, content: Any, tensors: int | None = None) -> None:
    """Raises a ValueError if a config.json, at any depth, asks for more parts than a model has.

    Args:
        tensors: of the weights beside it, if there are any; every layer has some of its own.
    """
    for name, value in _counts(content):
        layers = name.endswith(("layer", "layers"))
        most = max(tensors or 0, _LAYERS if layers else _PARTS)
        if value > most:
            behind = f"at most {most} are made" if tensors is None else f"there are only {tensors} tensors"
            raise ValueError(f"{file}: {name}={value}, but {behind}")
        if name.endswith("layers") and value < 0:
            raise ValueError(f"{file}: {name}={value} is negative")


def check_size(file: Path, kind: type[PreTrainedModel], config: PreTrainedConfig, stored: int) -> None:
    """Raises a ValueError if the model that a config describes is far larger than its stored weights.

    Args:
        stored: bytes of the weights.
    """
    try:
        with torch.device("meta"):  # shapes only
            model: Any = kind(copy.deepcopy(config))
    except Exception:
        return  # loading says what is wrong with the config
    shapes = {name: tensor.shape for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    total = sum(shape.numel() for shape in shapes.values())
    if total > _NUMBERS_PER_BYTE * stored + _SMALL:
        largest = max(shapes, key=lambda name: shapes[name].numel())
        raise ValueError(
            f"{file} asks for a model of {total} numbers, such as {largest} {list(shapes[largest])}, but the weights "
            f"have {stored} bytes"
        )


def _counts(content: Any) -> Iterator[tuple[str, int]]:
    nodes = [content]  # not by recursion: a file may nest deeper than Python does
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        if not isinstance(node, dict):
            continue
        for name, value in node.items():
            nodes.append(value)
            if _COUNT.search(name):
                values = value if isinstance(value, list) else [value]
                yield from ((name, v) for v in values if isinstance(v, int))
