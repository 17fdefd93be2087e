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
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from os.path import expanduser
from pathlib import Path
from typing import Any

from outeffhop._io import check_manifest, publish, write_manifest

__all__ = ["Store"]

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
        about = _read(entry)
        if about is not None:
            return entry, about
        self._sweep()
        side = self.folder / f".{entry.name}.{secrets.token_hex(4)}.tmp"
        try:
            side.mkdir(parents=True)
        except OSError as error:
            raise ValueError(
                f"cache_dir={str(self.folder)!r} cannot be written ({error.strerror}): "
                "give another with cache_dir or the environment variable OUTEFFHOP_CACHE"
            ) from error
        try:
            about = build(side)
            write_manifest(side, about)
            _put(side, entry)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # an error of what the builder reads
            raise OSError(
                f"{kind} could not be written to cache_dir={str(self.folder)!r} ({error.strerror}): make room, or "
                "give another with cache_dir or the environment variable OUTEFFHOP_CACHE"
            ) from error
        finally:
            shutil.rmtree(side, ignore_errors=True)
        return entry, about

    def _sweep(self) -> None:
        """Removes what processes that were killed left behind, once it is a day old."""
        for left in self.folder.glob(".*.tmp"):
            with suppress(OSError):
                # a build that lasts for days still writes to its files
                last = max(p.stat().st_mtime for p in (left, *left.iterdir()))
                if time.time() - last > _DAY:
                    shutil.rmtree(left)


def _put(side: Path, entry: Path) -> None:
    """Renames the finished folder; an entry that another process finished in the meantime is kept."""
    try:
        publish(side, entry)
    except OSError:
        if not entry.exists():
            raise
        if _read(entry) is None:
            shutil.rmtree(entry)
            publish(side, entry)


def _read(entry: Path) -> dict[str, Any] | None:
    """What the builder returned for a whole entry, else None."""
    try:
        about = check_manifest(entry)
    except ValueError:
        return None
    return about if isinstance(about, dict) else None
