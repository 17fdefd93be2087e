"""A memory as a safetensors file, written whole or not at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from outeffhop._io import whole_file
from outeffhop._naming import check_utf8
from outeffhop.memory.noop import NoOp

__all__ = ["save", "reading"]

_FORMAT = "outeffhop.memory.1"
_WITH_VALUES = "outeffhop.memory.2"  # a reader of the first alone would drop the values in silence


def save(
    path: str | os.PathLike[str],
    stored: Tensor,
    beta: float,
    method: str,
    no_op: NoOp | None,
    values: Tensor | None,
) -> None:
    target = Path(path)
    check_utf8("path", target)
    if target.is_dir():
        raise ValueError(f"path={str(target)!r} is a folder: give the name of a file")
    if target.exists() and not target.is_file():  # renaming a file would replace the device
        raise ValueError(f"path={str(target)!r} is a device or a pipe: give the name of a file")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"path={str(target)!r}: the folder {str(target.parent)!r} does not exist; create it first"
        )
    tensors = {"patterns": stored.contiguous()}
    metadata = {"format": _FORMAT if values is None else _WITH_VALUES, "beta": repr(beta), "method": method}
    if values is not None:
        tensors["values"] = values.contiguous()
    if no_op is not None:
        tensors["outliers"] = no_op.outliers.contiguous()
        metadata["distinct"] = str(no_op.distinct)
    metadata["sha256"] = _digest(tensors, metadata)
    try:
        with whole_file(target) as side:
            save_file(tensors, side, metadata)
    except SafetensorError as error:  # safetensors' own class for errors of the system
        raise OSError(f"path={str(target)!r} could not be written: {error}") from error


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Reads the arguments of HopfieldMemory; any error in them becomes a ValueError that names the file."""
    source = Path(path)
    check_utf8("path", source)
    if not source.is_file():
        raise FileNotFoundError(f"path={str(source)!r}: no such file")
    try:
        with safe_open(source, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") not in (_FORMAT, _WITH_VALUES):
                raise ValueError(f"its format is {metadata.get('format')!r}, not {_FORMAT!r} or {_WITH_VALUES!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
            if metadata.pop("sha256", None) != _digest(tensors, metadata):
                raise ValueError("its content does not match its checksum")
            no_op = NoOp(tensors["outliers"], metadata["distinct"] == "True") if "outliers" in tensors else None
            yield {
                "patterns": tensors["patterns"],
                "beta": float(metadata["beta"]),
                "method": metadata["method"],
                "no_op": no_op,
                "values": tensors["values"] if metadata["format"] == _WITH_VALUES else None,
            }
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{source} is not a memory saved by HopfieldMemory.save, or is damaged: {error}") from error


def _digest(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """SHA-256 of everything: safetensors has no checksum, and would read a flipped bit as another pattern."""
    total = hashlib.sha256(repr(sorted(metadata.items())).encode())
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
