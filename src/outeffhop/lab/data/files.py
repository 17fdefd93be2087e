"""Data files: compressed or not, grouped by the split in their names, hashed by content."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from outeffhop._io import checksum

__all__ = [
    "DAMAGED",
    "bare_name",
    "by_split",
    "digest_of",
    "files_under",
    "lines",
    "open_packed",
    "split_word",
    "suffix",
]

_PACKED = {".gz": gzip.open, ".xz": lzma.open}
# errors of compressed files that are damaged or cut short
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "t10k": "test",  # MNIST's name
}


def bare_name(path: Path) -> str:
    """The name of a file in lower case, without .gz or .xz."""
    name = path.name.lower()
    return name[: -len(path.suffix)] if path.suffix.lower() in _PACKED else name


def suffix(path: Path) -> str:
    """The suffix that shows the kind of content: ``.txt`` of ``a.txt.xz``."""
    return Path(bare_name(path)).suffix


def open_packed(path: Path) -> BinaryIO:
    """Opens a file for reading bytes; decompresses .gz and .xz."""
    opener: Any = _PACKED.get(path.suffix.lower(), open)
    return cast(BinaryIO, opener(path, "rb"))


def files_under(path: Path) -> list[Path]:
    """The file itself, or all files in a folder and its subfolders that are not hidden, sorted by name.

    Links to folders are followed. If a file exists both compressed and not, the compressed one is left out.
    """
    if path.is_file():
        return [path]
    found: set[Path] = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and not _leads_back(here / name)]
        found.update(here / name for name in names if not name.startswith(".") and (here / name).is_file())
    return sorted(f for f in found if f.suffix.lower() not in _PACKED or f.with_suffix("") not in found)


def _leads_back(folder: Path) -> bool:
    """Whether it is a link to one of its parents, which would be walked forever."""
    return folder.is_symlink() and folder.resolve() in {above.resolve() for above in folder.absolute().parents}


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file with their line ends; errors name the file and the byte.

    The byte order mark that Windows puts first is left out.
    """
    offset = 0
    try:
        with open_packed(path) as file:
            for line in file:
                text = line.decode("utf-8")
                if "\0" in text:
                    where = offset + line.index(b"\0")
                    raise ValueError(f"{path} is not text: a zero byte at byte {where}; give UTF-8 text files")
                yield text if offset else text.removeprefix("\ufeff")
                offset += len(line)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {offset + error.start} ({error.reason}); "
            f"convert it, for instance with iconv -t utf-8"
        ) from error
    except DAMAGED as error:
        raise ValueError(f"{path} is damaged or cut short after byte {offset} of its content: {error}") from error


def by_split(files: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Groups files by the split that their names or folders contain; empty if no name contains one.

    If no file is named after train, files without a split in their name are the training data. Otherwise they are left
    out, like a README beside the data.
    """
    found: dict[str, list[Path]] = {}
    unnamed = []
    for file in files:
        parts = file.relative_to(root).parts if file != root else ()
        split = next((s for part in reversed(parts) if (s := split_word(part))), None)
        if split is None:
            unnamed.append(file)
        else:
            found.setdefault(split, []).append(file)
    if found and "train" not in found and unnamed:
        found["train"] = unnamed
    return found


def split_word(name: str) -> str | None:
    """The split that a word of the name stands for, if any."""
    words = re.findall(r"[a-z]+(?:10k)?", name.lower())
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def digest_of(files: Iterable[Path], root: Path) -> str:
    """SHA-256 of the names of files below ``root`` and of their bytes."""
    total = hashlib.sha256()
    for file in files:
        name = file.name if file == root else file.relative_to(root).as_posix()
        # surrogateescape: a name may not be UTF-8
        total.update(f"{name}\0{checksum(file)}\n".encode(errors="surrogateescape"))
    return total.hexdigest()
