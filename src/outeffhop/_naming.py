"""What is said of a name that nobody knows, the nearest there are and all of them; and of one that is not UTF-8."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["check_utf8", "did_you_mean", "known"]


def did_you_mean(word: object, names: Iterable[object], n: int = 1) -> str:
    """The end of a sentence: "; did you mean 'vanilla'?", or a full stop where no name is near."""
    near = get_close_matches(str(word), list(map(str, names)), n=n, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "."


def known(what: str, value: str, names: Iterable[str]) -> str:
    """``value`` if it is one of ``names``, else a ValueError with the nearest and with all of them."""
    choices = list(names)
    if value in choices:
        return value
    raise ValueError(f"{what}={value!r} is unknown{did_you_mean(value, choices)} There are: {', '.join(choices)}")


def check_utf8(what: str, path: str | os.PathLike[str]) -> None:
    """Raises ValueError for a path whose bytes are no UTF-8: safetensors neither reads nor writes there."""
    try:
        os.fspath(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what}={os.fspath(path)!r} is not UTF-8, as safetensors needs it: rename it") from None
