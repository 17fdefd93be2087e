"""Results as files: JSON that any reader takes, written so that no moment finds it half done."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from typing import Any

__all__ = ["to_plain", "from_plain", "check_folder", "write_whole"]


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
