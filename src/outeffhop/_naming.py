"""Names in messages: unknown ones, paths that are not UTF-8, packages that are not installed, and what may be shown."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from types import ModuleType

__all__ = ["check_utf8", "did_you_mean", "known", "printable", "require"]

# packages that pip knows by another name than the one they are imported by
_PACKAGES = {"PIL": "pillow", "compressed_tensors": "compressed-tensors", "sklearn": "scikit-learn"}


def require(module: str, extra: str = "lab") -> ModuleType:
    """Imports a module of a package that only ``outeffhop[extra]`` installs.

    >>> load_digits = require("sklearn.datasets").load_digits

    Raises:
        ImportError: the package is not installed; the message names it and the pip command that installs it.
    """
    top = module.partition(".")[0]
    try:
        import_module(top)
    except ModuleNotFoundError as error:
        if error.name != top:  # the package is there, but something it imports is not
            raise
        raise ImportError(f"this needs {_PACKAGES.get(top, top)}: pip install 'outeffhop[{extra}]'", name=top) from None
    return import_module(module)


def did_you_mean(word: object, names: Iterable[object], n: int = 1) -> str:
    """The end of a sentence: "; did you mean 'vanilla'?", or a full stop if no name is close."""
    near = get_close_matches(str(word), list(map(str, names)), n=n, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def known(what: str, value: str, names: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``names``; raises a ValueError that suggests the closest and lists all."""
    choices = list(names)
    if value in choices:
        return value
    raise ValueError(f"{what}={value!r} is unknown{did_you_mean(value, choices)} Available: {', '.join(choices)}")


def check_utf8(what: str, path: str | os.PathLike[str]) -> None:
    """Raises a ValueError if a path is not UTF-8: safetensors can neither read nor write it."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what}={os.fspath(path)!r} is not UTF-8, which safetensors needs: rename it") from None


def printable(text: object) -> str:
    r"""The text with a backslash escape for every character that does not show, so that no terminal acts on it.

    >>> printable("a\x1b[31mb\nc")
    'a\\x1b[31mb\\nc'
    """
    text = str(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
