"""Files as data comes in: packed or not, named after their split, hashed by content."""

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
    "unmarked_lines",
]

_PACKED = {".gz": gzip.open, ".xz": lzma.open}
# what packed files that are none, or not whole, are read with
DAMAGED = (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error)
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "valid": "validation",
    "validation": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "t10k": "test",  # MNIST's word
}


def bare_name(path: Path) -> str:
    """The file's lower-case name without .gz or .xz."""
    name = path.name.lower()
    return name[: -len(path.suffix)] if path.suffix.lower() in _PACKED else name


def suffix(path: Path) -> str:
    """The ending that says what a file holds: ``.txt`` of ``a.txt.xz``."""
    return Path(bare_name(path)).suffix


def open_packed(path: Path) -> BinaryIO:
    """Opens a file for reading bytes, unpacking .gz and .xz on the way."""
    opener: Any = _PACKED.get(path.suffix.lower(), open)
    return cast(BinaryIO, opener(path, "rb"))


def files_under(path: Path) -> list[Path]:
    """The file itself, or every file in a folder and below it that is not hidden, in the order of their names.

    Links to folders are followed. Of a file that lies there packed and unpacked, the packed one is left out.
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
    """Whether it is a link to one of the folders above it, which would be walked through without end."""
    return folder.is_symlink() and folder.resolve() in {above.resolve() for above in folder.absolute().parents}


def lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 text file with their ends; names file and byte where it is not UTF-8 or is damaged."""
    offset = 0
    try:
        with open_packed(path) as file:
            for line in file:
                text = line.decode("utf-8")
                if "\0" in text:
                    where = offset + line.index(b"\0")
                    raise ValueError(f"{path} is not text: a zero byte at byte {where}; give UTF-8 text files")
                yield text
                offset += len(line)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: byte {offset + error.start} ({error.reason}); "
            f"convert it, for instance with iconv -t utf-8"
        ) from error
    except DAMAGED as error:
        raise ValueError(f"{path} is damaged or cut short after byte {offset} of its content: {error}") from error


def unmarked_lines(path: Path) -> Iterator[str]:
    """The same lines without the byte order mark that Windows puts before the first."""
    for number, line in enumerate(lines(path)):
        yield line if number else line.removeprefix("\ufeff")


def by_split(files: Iterable[Path], root: Path) -> dict[str, list[Path]]:
    """Groups files by the split their names or folders say, if any says one.

    Where none is named train, files without a split's name are the training data; else they are left out, as a
    README beside the data would be. An empty dict: no name says anything.
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
    """The split that a word of the name says, if any."""
    words = re.findall(r"[a-z]+(?:10k)?", name.lower())
    return next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), None)


def digest_of(files: Iterable[Path], root: Path) -> str:
    """SHA-256 over the files' names below ``root`` and their bytes."""
    total = hashlib.sha256()
    for file in files:
        with file.open("rb") as handle:
            content = hashlib.file_digest(handle, "sha256").hexdigest()
        name = file.name if file == root else file.relative_to(root).as_posix()
        # a name of other bytes than UTF-8 is hashed as it lies there
        total.update(f"{name}\0{content}\n".encode(errors="surrogateescape"))
    return total.hexdigest()
