"""Files that are written whole or not at all, manifests that show whether a folder is still intact, and JSON.

A file or folder is written under a temporary name beside its place and then renamed. A process that is killed, or a
disk that is full, leaves the old file or folder unchanged.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = [
    "check_folder",
    "check_manifest",
    "checksum",
    "dump_json",
    "from_plain",
    "parse_json",
    "publish",
    "read_json",
    "remove_folder",
    "to_plain",
    "whole_file",
    "whole_folder",
    "write_json",
    "write_manifest",
    "write_whole",
]

_MANIFEST = "manifest.json"


# Files and folders


def check_folder(path: str | os.PathLike[str], name: str = "out") -> None:
    """Raises a ValueError, before hours of work, if a folder cannot be created or written to."""
    target = Path(path)
    if target.exists() and not target.is_dir():
        raise ValueError(f"{name}={str(target)!r} is a file: give a folder")
    nearest = next(p for p in (target, *target.absolute().parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"{name}={str(target)!r} cannot be created: {str(nearest)!r} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{name}={str(target)!r} cannot be written to: {str(nearest)!r} is read-only")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary path to write to; the file replaces ``path`` at the end, or is removed after an error."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    side = _beside(target)
    try:
        yield side
        _sync(side)
        os.replace(side, target)
    except OSError as error:  # on a full disk, the system does not say which file it was
        raise OSError(error.errno, error.strerror or str(error), str(target)) from error
    finally:
        side.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file whole or not at all; creates its folder."""
    with whole_file(path) as side:
        # a file name that is not UTF-8 may be part of the text: its bytes are written as numbers
        side.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Gives a temporary folder to write to; it becomes ``path`` at the end, or is removed after an error."""
    side = _beside(Path(path))
    side.mkdir(parents=True)
    try:
        yield side
        publish(side, Path(path))
    finally:
        shutil.rmtree(side, ignore_errors=True)


def publish(side: Path, place: Path) -> None:
    """Renames a finished folder, once every byte of it is on disk; ``place`` must not exist, or be empty."""
    for path in (*side.rglob("*"), side):
        _sync(path)
    try:
        os.replace(side, place)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        told = "exists by now, written by another process, and is not overwritten"
        raise FileExistsError(error.errno, told, str(place)) from error
    _sync(place.parent)


def remove_folder(path: Path) -> None:
    """Removes a folder, if it exists and can be removed. A process that is killed leaves no half of it in its place."""
    side = _beside(path)
    with suppress(OSError):
        os.replace(path, side)
        shutil.rmtree(side, ignore_errors=True)


def write_manifest(folder: Path, about: Any = None) -> None:
    """Notes the size and SHA-256 of every file of a folder in its manifest.json, together with ``about``."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / _MANIFEST).write_text(json.dumps({"about": about, "files": files}, indent=1))


def check_manifest(folder: Path) -> Any:
    """Returns the manifest's ``about``; raises a ValueError if a file is missing or has changed since."""
    try:
        manifest = read_json(folder / _MANIFEST)
        about, files = manifest["about"], [(name, f["size"], f["sha256"]) for name, f in manifest["files"].items()]
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"its {_MANIFEST} cannot be read") from None
    for name, size, sha256 in files:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        try:
            if path.stat().st_size != size:
                raise ValueError(f"{name} has {path.stat().st_size} bytes, not {size}")
            if checksum(path) != sha256:
                raise ValueError(f"the content of {name} has changed")
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    return about


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _beside(target: Path) -> Path:
    # in the same folder, because a rename is atomic only within one file system
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# JSON


def to_plain(value: Any) -> Any:
    """The value as JSON can hold it: "nan", "inf" and "-inf" for such numbers, lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


def from_plain(value: Any) -> Any:
    """The inverse of ``to_plain``, except that tuples stay lists."""
    if isinstance(value, dict):
        return {k: from_plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_plain(v) for v in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def dump_json(value: Any) -> str:
    """Strict JSON: numbers that are not finite are written as ``to_plain`` has them."""
    return json.dumps(to_plain(value), indent=1) + "\n"


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    write_whole(path, dump_json(value))


def read_json(path: str | os.PathLike[str]) -> Any:
    try:
        return parse_json(Path(path).read_bytes().decode())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {getattr(error, 'strerror', None) or error}") from error


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"not JSON: {' '.join(str(error).split())}") from error
