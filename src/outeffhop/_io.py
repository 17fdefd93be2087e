"""Files that are whole or absent, and JSON to and from dataclasses.

What is written replaces a file at once or leaves it as it was. What is read may be cut short, edited by hand or
written by something else: whatever is wrong with it is a ValueError that names the file, or the field in it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = [
    "check_folder",
    "from_json_value",
    "from_plain",
    "parse_json",
    "read_as",
    "read_json",
    "to_plain",
    "write_whole",
]

Kind = TypeVar("Kind")

_INFINITE = ("nan", "inf", "-inf")  # how to_plain writes them
_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    type(None): "null",
    list: "a list",
    dict: "a mapping",
}


def to_plain(value: Any) -> Any:
    """The same with "nan", "inf" and "-inf" for the numbers that JSON does not know, and lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


def from_plain(value: Any) -> Any:
    """The inverse, but for tuples, which stay lists."""
    if isinstance(value, dict):
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def check_folder(path: str | os.PathLike[str], name: str = "out") -> None:
    """Raises a ValueError, before hours of measuring, where a folder could not be made or written to in the end."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{name}={str(target)!r} is a file: the name of a folder is needed")
    nearest = next(p for p in (target, *target.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"{name}={str(target)!r} cannot be made: {str(nearest)!r} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={str(target)!r} cannot be written to: {str(nearest)!r} is read-only here")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Replaces a file at once, or leaves it as it is; makes its folder."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # in the same folder, since os.replace is atomic within one file system alone
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "wb") as file:
            # a name of other bytes than UTF-8 is shown by their numbers
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())  # a disk that is full may say so only now
        os.replace(beside, target)
    except OSError as error:  # of a full disk, the system does not say which file
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error
    finally:
        beside.unlink(missing_ok=True)


def read_as(kind: type[Kind], path: str | os.PathLike[str], what: str) -> Kind:
    """The dataclass a JSON file holds; ``what`` says in errors what the file should have been."""
    try:
        found: Kind = from_json_value(kind, read_json(path))
    except ValueError as error:
        raise ValueError(f"{path} is no {what}: {error}") from error
    return found


def read_json(path: str | os.PathLike[str]) -> Any:
    """What a JSON file holds; a ValueError that names the file where it is none."""
    try:
        return parse_json(Path(path).read_bytes().decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {getattr(error, 'strerror', None) or error}") from error


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # nesting without end, and numbers of thousands of digits, too
        raise ValueError(f"no JSON: {' '.join(str(error).split())}") from error


def from_json_value(kind: Any, value: Any, at: str = "") -> Any:
    """The value as a type has it: a dataclass of a mapping, tuples of lists; ``at`` names it in errors."""
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, at)
    if origin in (types.UnionType, typing.Union):
        return _first_that_fits(arguments, value, at)
    if kind is Any or (origin is Literal and value in arguments):
        return value
    if origin in (tuple, Sequence) and isinstance(value, list):
        return tuple(from_json_value(arguments[0], v, f"{at}[{i}]") for i, v in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {k: from_json_value(arguments[1], v, f"{at}.{k}") for k, v in value.items()}
    if kind is float and (value in _INFINITE or _is_number(value)):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{at} is a whole number beyond any float") from None
    if (kind is int and _is_number(value) and isinstance(value, int)) or (kind in _WORDS and type(value) is kind):
        return value
    raise ValueError(f"{at or 'it'} is {_WORDS[type(value)]}, not {_spell(kind, origin, arguments)}")


def _dataclass(kind: Any, value: Any, at: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{at or 'it'} is {_WORDS[type(value)]}, not a mapping of names to values")
    hints = {name: hint for name, hint in typing.get_type_hints(kind).items() if name in kind.__dataclass_fields__}
    required = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
    wrong = sorted((required - value.keys()) | (value.keys() - hints.keys()))
    if wrong:
        names = ", ".join(name if name.isidentifier() else repr(name) for name in wrong)
        raise ValueError(f"fields that are missing or unknown{f' in {at}' if at else ''}: {names[:200]}")
    return kind(**{k: from_json_value(hints[k], v, f"{at}.{k}" if at else k) for k, v in value.items()})


def _first_that_fits(kinds: tuple[Any, ...], value: Any, at: str) -> Any:
    said = None
    for kind in kinds:
        try:
            return from_json_value(kind, value, at)
        except ValueError as error:
            said = said or error
    raise said or ValueError(f"{at}: no type fits")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spell(kind: Any, origin: Any, arguments: tuple[Any, ...]) -> str:
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    return _WORDS.get(kind) or ("a mapping" if origin in (dict, Mapping) else "a list")
