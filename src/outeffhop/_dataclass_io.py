"""Dataclasses from JSON or YAML, checked field by field, and reports that are kept as JSON files.

What is read may be cut short, edited by hand or written by something else. Anything wrong with it raises a ValueError
that names the file or the field.
"""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from outeffhop._io import dump_json, parse_json, write_whole
from outeffhop._naming import did_you_mean

__all__ = ["JsonReport", "from_json_value"]

_WORDS: dict[Any, str] = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}


class JsonReport:
    """A dataclass that is kept as a JSON file.

    Attributes:
        FORMAT: kind and version of the file, such as "outeffhop.outliers.1"; None if the file does not say.
        DERIVED: properties that are written for people who read the file, and ignored when it is loaded.
    """

    FORMAT: ClassVar[str | None] = None
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> str:
        """Strict JSON: numbers that are not finite are written as "nan", "inf" and "-inf"."""
        about = {} if self.FORMAT is None else {"format": self.FORMAT}
        derived = {name: getattr(self, name) for name in self.DERIVED}
        return dump_json({**about, **derived, **dataclasses.asdict(self)})  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of ``to_json``."""
        try:
            content = parse_json(text)
            if isinstance(content, dict):
                found = content.pop("format", None) if cls.FORMAT is not None else None
                if found != cls.FORMAT:
                    raise ValueError(f"format={_short(found)}: must be {cls.FORMAT!r}")
                content = {k: v for k, v in content.items() if k not in cls.DERIVED}
            return typing.cast(Self, from_json_value(cls, content))
        except ValueError as error:
            raise ValueError(f"not a valid {cls.__name__}: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON, whole or not at all."""
        write_whole(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file that ``save`` wrote."""
        try:
            return cls.from_json(Path(path).read_bytes().decode())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def from_json_value(kind: Any, value: Any, at: str = "") -> Any:
    """The value as an annotated type: a dataclass from a mapping, a tuple from a list, a float from "1e-4".

    Args:
        kind: dataclass, Literal, union, tuple, Sequence, dict or Mapping of such, int, float, str, bool or Any.
        at: the field's name in errors, such as ``train.lr``.
    """
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if kind is Any or (origin is Literal and value in arguments):
        return value
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _dataclass(kind, value, at)
    if origin in (types.UnionType, typing.Union):
        options = [a for a in arguments if a is not types.NoneType]
        if value is None and len(options) < len(arguments):
            return None
        if len(options) == 1:
            return from_json_value(options[0], value, at)
        for option in options:
            with suppress(ValueError):
                return from_json_value(option, value, at)
    elif origin in (tuple, Sequence) and isinstance(value, list):
        if origin is Sequence or arguments[-1] is ... or len(value) == len(arguments):
            return tuple(from_json_value(arguments[0], v, f"{at}[{i}]") for i, v in enumerate(value))
    elif origin in (dict, Mapping) and isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {k: from_json_value(arguments[1], v, f"{at}.{_name(k)}") for k, v in value.items()}
    elif kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            return float(value)  # a string: to_plain's "nan", and YAML's 4e-4, which has no dot
    elif kind in _WORDS and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{f'{at}=' if at else ''}{_short(value)}: must be {_spell(kind)}")


def _dataclass(kind: Any, value: dict[Any, Any], at: str) -> Any:
    prefix = f"{at}." if at else ""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    hints = typing.get_type_hints(kind)
    for key in value:
        if key not in fields:
            raise ValueError(
                f"{prefix}{_name(key)} is unknown{did_you_mean(key, fields)} Available: {', '.join(fields)}"
            )
    for name, field in fields.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{prefix}{name} is missing")
    return kind(**{k: from_json_value(hints[k], v, f"{prefix}{k}") for k, v in value.items()})


def _name(key: Any) -> str:
    return key if isinstance(key, str) and key.isidentifier() and len(key) < 80 else _short(key)


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _spell(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_spell(a) for a in arguments if a is not types.NoneType)
    if origin is tuple and arguments[-1] is not ...:
        return f"a list of {len(arguments)} numbers"
    return _WORDS.get(kind) or ("a list" if origin in (tuple, Sequence) else "a mapping of names to values")
