"""Results kept on disk by key, whole or not at all.

An entry is a folder. It is built under a temporary name, a manifest with the size and SHA-256 of each file is
written last, and the folder is renamed. A kill at any moment leaves either a temporary folder, which is never
read, or a whole entry; a file cut short or changed later no longer fits the manifest, and the entry is rebuilt.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from os.path import expanduser
from pathlib import Path
from typing import Any

__all__ = ["Store"]

_MANIFEST = "manifest.json"
_DAY = 24 * 3600  # seconds


class Store:
    """A folder of entries: ``$OUTEFFHOP_CACHE``, else ``~/.cache/outeffhop``, if none is given."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        chosen = folder if folder is not None else os.environ.get("OUTEFFHOP_CACHE") or "~/.cache/outeffhop"
        self.folder = Path(expanduser(chosen))

    def get(
        self, kind: str, key: dict[str, Any], build: Callable[[Path], dict[str, Any]]
    ) -> tuple[Path, dict[str, Any]]:
        """The entry of this key and what its builder said of it; ``build`` writes files into the folder it is given.

        Args:
            kind: names the entry's folder beside the key's hash.
            key: everything the content depends on, as JSON could say it.
            build: called where there is no whole entry; what it returns is kept in the manifest.
        """
        text = json.dumps(key, sort_keys=True)
        entry = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        said = _read(entry)
        if said is not None:
            return entry, said
        side = self.folder / f".{entry.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            side.mkdir(parents=True)
        except OSError as error:
            raise ValueError(
                f"cache_dir={str(self.folder)!r} cannot be written ({error.strerror}): "
                "give another with cache_dir or the environment variable OUTEFFHOP_CACHE"
            ) from error
        self._sweep()
        try:
            said = build(side)
            _write_manifest(side, key, said)
            _put(side, entry)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # of what the builder reads
            raise OSError(
                f"{kind} could not be written to cache_dir={str(self.folder)!r} ({error.strerror}): make room, or "
                "give another with cache_dir or the environment variable OUTEFFHOP_CACHE"
            ) from error
        finally:
            shutil.rmtree(side, ignore_errors=True)
        return entry, said

    def _sweep(self) -> None:
        """Removes what processes that were killed left behind, once it is a day old."""
        for left in self.folder.glob(".*-*.*-*"):
            with suppress(OSError):
                # a build that lasts for days still writes to its files
                last = max(p.stat().st_mtime for p in (left, *left.iterdir()))
                if time.time() - last > _DAY:
                    shutil.rmtree(left)


def _put(side: Path, entry: Path) -> None:
    """Renames the finished folder; an entry that another process finished meanwhile serves as well."""
    try:
        side.rename(entry)
    except OSError:
        if _read(entry) is not None:
            return
        shutil.rmtree(entry)
        side.rename(entry)


def _write_manifest(folder: Path, key: dict[str, Any], said: dict[str, Any]) -> None:
    files = {file.name: [file.stat().st_size, _checksum(file)] for file in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"key": key, "said": said, "files": files}, indent=1))


def _read(entry: Path) -> dict[str, Any] | None:
    """What the builder said, if every file is as the manifest says; None else."""
    try:
        manifest = json.loads((entry / _MANIFEST).read_text())
        for name, (size, checksum) in manifest["files"].items():
            file = entry / name
            if file.stat().st_size != size or _checksum(file) != checksum:
                return None
        said: dict[str, Any] = manifest["said"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return said


def _checksum(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
