"""A cache of folders on disk, by key: tokens and tokenizers are built once.

An entry is a folder with a manifest of its files. It appears when it is finished, so a process that is killed leaves
at most a temporary folder, which is never read. An entry whose files no longer fit the manifest is built again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from os.path import expanduser
from pathlib import Path
from typing import Any

from outeffhop._io import check_folder, check_manifest, whole_folder, write_manifest

__all__ = ["DiskCache"]

_DAY = 24 * 3600  # seconds
_ELSEWHERE = "give another folder with cache_dir or the environment variable OUTEFFHOP_CACHE"


class DiskCache:
    """A folder of entries.

    Args:
        folder: by default ``$OUTEFFHOP_CACHE``, else ``~/.cache/outeffhop``.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        chosen = folder if folder is not None else os.environ.get("OUTEFFHOP_CACHE") or "~/.cache/outeffhop"
        self.folder = Path(expanduser(chosen))

    def get(
        self, kind: str, key: dict[str, Any], build: Callable[[Path], dict[str, Any]]
    ) -> tuple[Path, dict[str, Any]]:
        """Returns the folder of an entry and what ``build`` returned for it.

        Args:
            kind: first part of the folder's name.
            key: everything the content depends on, as JSON can hold it.
            build: writes files into the folder it is given, if there is no entry yet or its files are damaged. What it
                returns is kept in the manifest.
        """
        text = json.dumps(key, sort_keys=True)
        entry = self.folder / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        about = _read(entry)
        if about is not None:
            return entry, about
        try:
            check_folder(self.folder, "cache_dir")
        except ValueError as error:
            raise ValueError(f"{error}; {_ELSEWHERE}") from error
        self._sweep()
        shutil.rmtree(entry, ignore_errors=True)  # damaged, if it exists
        try:
            with whole_folder(entry) as side:
                about = build(side)
                write_manifest(side, about)
        except OSError as error:
            finished = _read(entry)
            if finished is not None:  # by another process in the meantime
                return entry, finished
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # an error of what the builder reads
            raise OSError(
                f"{kind} could not be written to cache_dir={str(self.folder)!r} ({error.strerror}): "
                f"make room, or {_ELSEWHERE}"
            ) from error
        return entry, about

    def _sweep(self) -> None:
        """Removes what processes that were killed left behind, once it is a day old."""
        for left in self.folder.glob(".*.tmp"):
            with suppress(OSError):
                # a build that lasts for days still writes to its files
                last = max(p.stat().st_mtime for p in (left, *left.iterdir()))
                if time.time() - last > _DAY:
                    shutil.rmtree(left)


def _read(entry: Path) -> dict[str, Any] | None:
    """What the builder returned, if the entry is whole."""
    try:
        about: dict[str, Any] = check_manifest(entry)
    except ValueError:
        return None
    return about
