"""Messages between this process and the one that runs OpenVINO: JSON, and arrays as safetensors. Nothing is unpickled.

A message is two parts, each after its length in eight bytes: the value as JSON, in which an array is {"array": name},
and the arrays by name.
"""

from __future__ import annotations

import json
from typing import IO, Any

import numpy as np
from safetensors.numpy import load, save

__all__ = ["read_message", "write_message"]


def write_message(pipe: IO[bytes], value: Any) -> None:
    """Writes plain values, lists, mappings with text as keys, and numpy arrays."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    plain = json.dumps(_without_arrays(value, arrays)).encode()
    for part in (plain, save(arrays)):
        pipe.write(len(part).to_bytes(8, "little"))
        pipe.write(part)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> Any:
    """Reads what ``write_message`` wrote; tuples are lists. Raises EOFError at the end of the pipe."""
    plain, arrays = _part(pipe), _part(pipe)
    return _with_arrays(json.loads(plain), load(arrays))


def _part(pipe: IO[bytes]) -> bytes:
    size = int.from_bytes(_exactly(pipe, 8), "little")
    return _exactly(pipe, size)


def _exactly(pipe: IO[bytes], size: int) -> bytes:
    found = pipe.read(size)
    if len(found) < size:
        raise EOFError("the other process has ended")
    return found


def _without_arrays(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, np.ndarray):
        name = str(len(arrays))
        arrays[name] = np.ascontiguousarray(value)
        return {"array": name}
    if isinstance(value, dict):
        return {"mapping": {key: _without_arrays(each, arrays) for key, each in value.items()}}
    if isinstance(value, list | tuple):
        return [_without_arrays(each, arrays) for each in value]
    return value


def _with_arrays(value: Any, arrays: dict[str, np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, dict):
        if "array" in value:
            return arrays[value["array"]]
        return {key: _with_arrays(each, arrays) for key, each in value["mapping"].items()}
    if isinstance(value, list):
        return [_with_arrays(each, arrays) for each in value]
    return value
