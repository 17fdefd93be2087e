"""Text as a stream: documents by split, in pieces small enough to tokenize in parallel and in little memory.

Text from every source is a stream of lines with None after each document. A missing split is taken from the training
text, 5 % each: whole documents if there are at least twenty, else the last lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import TYPE_CHECKING

from outeffhop.lab.data import builtin, hub
from outeffhop.lab.data.files import by_split, digest_of, files_under, lines
from outeffhop.lab.data.samples import SPLITS
from outeffhop.lab.data.specs import Spec, kind_of_file

if TYPE_CHECKING:
    from pathlib import Path

    from datasets import Dataset  # type: ignore[import-untyped]

__all__ = ["SEPARATOR", "Corpus", "load_text", "pieces"]

SEPARATOR = "<|endoftext|>"  # on a line of its own, ends a document
Stream = Iterator[str | None]
_SHARE = 0.05  # of the characters, for each split that is taken from train
_ENOUGH = 20  # documents, to split by document
_PIECE = 1 << 16  # characters
_LINE = 1 << 12  # characters; longer lines may be cut
_BETWEEN_WORDS = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class Corpus:
    """Text by split; each split can be read any number of times.

    Attributes:
        digest: hash of the content, and of how it is split.
    """

    source: str
    digest: str
    splits: dict[str, Callable[[], Stream]]

    def count(self, split: str) -> tuple[int, int]:
        """The number of documents and characters of a split."""
        sizes = _sizes(self.splits[split]())
        return len(sizes), sum(sizes)


def load_text(spec: Spec) -> Corpus:
    """Loads the text of a spec."""
    if spec.where == "builtin":
        documents = builtin.topics()
        given = {"train": lambda: _of_documents(documents)}
        digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    elif spec.where == "hub":
        given, digest = _joined([_of_hub(hub.load(part)) for part in spec.parts])
    else:
        given, digest = _of_path(spec.path)
    if "train" not in given:
        raise ValueError(f"data spec {spec.text!r} has no training text: name one of its files after train")
    tidied = {split: _tidied(stream) for split, stream in given.items()}
    missing = [split for split in SPLITS if split not in tidied]
    return Corpus(spec.text, f"{digest}/{'+'.join(missing)}", _completed(spec, tidied, missing))


def pieces(stream: Stream) -> Iterator[tuple[str, bool]]:
    """Yields documents in pieces of about 65,000 characters, and whether a piece ends its document.

    A document is cut at a line break: before it if the next line begins with a word, after it if the next line begins
    with one space and a word. A long line is also cut inside, before one space and a word. Byte-level BPE and WordPiece
    never merge characters across such a place, so the tokens are those of the uncut document.
    """
    held: list[str] = []
    size = 0
    for line in stream:
        if line is None:
            yield "".join(held).rstrip("\n"), True
            held, size = [], 0
            continue
        if size > _PIECE:
            broken = held[-1].endswith("\n")
            # inside a line only if there is no line break for long
            if line[0] == " " and line[1:2].strip() and (broken or size > 2 * _PIECE):
                yield "".join(held), False
                held, size = [], 0
            elif broken and not line[0].isspace():
                yield "".join(held)[:-1], False
                held, size = ["\n"], 0
        held.append(line)
        size += len(line)


def _of_documents(documents: Iterable[str]) -> Stream:
    for document in documents:
        yield from document.splitlines(keepends=True)
        yield None


def _of_path(path: Path) -> tuple[dict[str, Callable[[], Stream]], str]:
    files = [file for file in files_under(path) if kind_of_file(file) == "text"]
    groups = by_split(files, path) or {"train": files}
    used = sorted(file for group in groups.values() for file in group)
    return {split: _reader(group) for split, group in groups.items()}, digest_of(used, path)


def _reader(files: list[Path]) -> Callable[[], Stream]:
    def read() -> Stream:
        for file in files:
            for line in lines(file):
                yield None if line.strip() == SEPARATOR else line
            yield None

    return read


def _of_hub(found: dict[str, Dataset]) -> tuple[dict[str, Callable[[], Stream]], str]:
    given = {split: _rows_reader(found[split]) for split in SPLITS if split in found}
    prints = [str(rows._fingerprint) for split, rows in sorted(found.items()) if split in given]
    return given, hashlib.sha256("/".join(prints).encode()).hexdigest()


def _joined(
    parts: list[tuple[dict[str, Callable[[], Stream]], str]],
) -> tuple[dict[str, Callable[[], Stream]], str]:
    """The text of several sources: each split has that of all of them which have it."""
    if len(parts) == 1:
        return parts[0]
    readers = {split: [given[split] for given, _ in parts if split in given] for split in SPLITS}
    joined: dict[str, Callable[[], Stream]] = {
        split: partial(_in_turn, some) for split, some in readers.items() if some
    }
    return joined, hashlib.sha256("+".join(digest for _, digest in parts).encode()).hexdigest()


def _in_turn(readers: list[Callable[[], Stream]]) -> Stream:
    for read in readers:
        yield from read()


def _rows_reader(rows: Dataset) -> Callable[[], Stream]:
    """Rows with line breaks are documents; rows of a single line are lines of one text."""
    column = hub.text_column(rows)

    def texts() -> Iterator[str]:
        return (row[column] or "" for row in rows)  # None: a row without text

    whole = any("\n" in text.strip("\n") for text in islice(texts(), 1000))

    def read() -> Stream:
        for text in texts():
            if whole:
                yield from text.splitlines(keepends=True)
                yield None
            else:
                yield text.rstrip("\n") + "\n"
        yield None

    return read


def _tidied(read: Callable[[], Stream]) -> Callable[[], Stream]:
    """Drops empty documents and blank lines at the beginning of a document; lines end with \\n and are short."""

    def tidy() -> Stream:
        inside = False
        for line in read():
            if line is None:
                if inside:
                    yield None
                inside = False
            elif inside or line.strip():
                inside = True
                yield from _short(line.replace("\r\n", "\n"))
        if inside:
            yield None

    return tidy


def _short(line: str) -> Iterator[str]:
    """Yields a line in parts that begin with a space: a whole file may be one line."""
    begin = 0
    while len(line) - begin > _LINE and (space := _BETWEEN_WORDS.search(line, begin + _LINE)):
        yield line[begin : space.start()]
        begin = space.start()
    yield line[begin:]


def _sizes(stream: Stream) -> list[int]:
    """The number of characters of each document."""
    sizes = []
    size = 0
    for line in stream:
        if line is None:
            sizes.append(size)
            size = 0
        else:
            size += len(line)
    return sizes


def _completed(
    spec: Spec, given: dict[str, Callable[[], Stream]], missing: list[str]
) -> dict[str, Callable[[], Stream]]:
    """All three splits; missing ones are taken from train."""
    if not missing:
        return given
    train = given["train"]
    if next(train(), None) is None:
        raise ValueError(f"data spec {spec.text!r} has no text: the files are empty")

    @cache
    def part() -> Callable[[str], Callable[[], Stream]]:  # once a split is read: tokens in the cache need no text
        sizes = _sizes(train())
        return (
            _by_document(train, missing, sizes) if len(sizes) >= _ENOUGH else _by_position(train, missing, sum(sizes))
        )

    def read(split: str) -> Stream:
        yield from part()(split)()

    return {split: given[split] if split in given and split != "train" else partial(read, split) for split in SPLITS}


def _by_document(
    read: Callable[[], Stream], missing: list[str], sizes: list[int]
) -> Callable[[str], Callable[[], Stream]]:
    """Each document goes to a split that is short by at least half of its length, else to train."""
    have = dict.fromkeys(missing, 0)
    homes = []
    total = 0
    for size in sizes:
        total += size
        home = max(missing, key=lambda split: _SHARE * total - have[split])
        if _SHARE * total - have[home] < size / 2:
            home = "train"
        have[home] = have.get(home, 0) + size
        homes.append(home)

    def part(split: str) -> Callable[[], Stream]:
        def select() -> Stream:
            index = 0
            for line in read():
                if homes[index] == split:
                    yield line
                index += line is None

        return select

    return part


def _by_position(
    read: Callable[[], Stream], missing: list[str], characters: int
) -> Callable[[str], Callable[[], Stream]]:
    """The last lines go to the missing splits, the others to train."""
    starts = [(characters * (1 - _SHARE * (len(missing) - i)), split) for i, split in enumerate(missing)]

    def part(split: str) -> Callable[[], Stream]:
        def select() -> Stream:
            at = 0
            for line in read():
                here = next((name for start, name in reversed(starts) if at >= start), "train")
                if here == split:
                    yield line
                at += 0 if line is None else len(line)

        return _tidied(select)

    return part
