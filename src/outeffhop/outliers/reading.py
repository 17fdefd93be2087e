"""Results from files: JSON back to the dataclasses it was written from, every field held to its type.

A file may be cut short, edited by hand or of another make: whatever is wrong with it is a ValueError that names
the file, or the field in it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = ["read_as", "read_json", "parse_json", "from_json_value"]

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
