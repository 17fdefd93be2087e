"""Specs, the strings that name data: ``builtin:text``, a path, or ``hub:NAME[/CONFIG]``.

``hub:A+B`` joins datasets of text: each split is the text of all of them that have it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from outeffhop._naming import did_you_mean, known
from outeffhop.lab.data.files import bare_name, files_under, suffix
from outeffhop.metrics import TASKS

__all__ = ["BUILTIN", "KINDS", "Spec", "kind_of_path", "parse", "require_kind", "tasks_of"]

BUILTIN = {
    "text": "Python's own documentation topics, 0.4 MB of English and code",
    "images": "scikit-learn's handwritten digits, 1,797 images of 8×8, ten classes",
    "series": "a synthetic multivariate series, 7 coupled series of 4,000 hours",
}
KINDS = {  # what a path must contain, by kind
    "text": "text files (.txt, .tokens, .text, .raw, .md; also .gz and .xz), UTF-8",
    "pairs": "pairs of texts, one a line: .tsv (source TAB target) or .jsonl (with source and target)",
    "images": "an image folder with a subfolder per class, idx files (.gz too), or npz files with x and y",
    "series": "a csv file with a header; dates, if it has them, in the first column",
    "bags": "an npz file with X, bag and y",
}
_TEXT = (".txt", ".tokens", ".text", ".raw", ".md")
_PAIRS = (".tsv", ".jsonl")
_PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True)
class Spec:
    """A parsed spec: ``where`` is builtin, path or hub, and ``name`` is the rest."""

    text: str
    where: str
    name: str

    @property
    def parts(self) -> list[Spec]:
        """The datasets of the hub that ``+`` joins; the spec itself if there is one."""
        if self.where != "hub" or "+" not in self.name:
            return [self]
        return [Spec(f"hub:{name}", "hub", name) for name in self.name.split("+")]

    @property
    def path(self) -> Path:
        return Path(expanduser(self.name))  # unlike Path.expanduser, keeps ~unknown for the error to name


def parse(spec: str | os.PathLike[str]) -> Spec:
    """Parses a spec; raises a ValueError if a path does not exist or a builtin is unknown."""
    spec = os.fspath(spec) if isinstance(spec, os.PathLike) else spec
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"data spec {spec!r} is empty: give builtin:text, a path, or hub:NAME[/CONFIG]")
    where, colon, name = spec.partition(":")
    if where == "hub" and colon:
        if not all(part.strip("/") for part in name.split("+")):
            raise ValueError(f"data spec {spec!r} does not name a dataset: write hub:NAME or hub:NAME/CONFIG")
        return Spec(spec, "hub", name.strip("/"))
    if where == "builtin" and colon:
        return Spec(spec, "builtin", known("builtin", name, BUILTIN))
    found = Spec(spec, "path", spec)
    if not found.path.exists():
        near = did_you_mean(spec, [f"builtin:{name}" for name in BUILTIN])
        if near == "." and found.path.parent.is_dir():
            near = did_you_mean(found.path.name, [p.name for p in found.path.parent.iterdir()])
        raise ValueError(
            f"data spec {spec!r}: no such path{near} Give builtin:{'|'.join(BUILTIN)}, "
            "an existing path, or hub:NAME[/CONFIG]"
        )
    return found


def kind_of_file(path: Path) -> str | None:
    """text, pairs, images, series or bags, by the name of a file and the keys of an npz; None for other files."""
    ending = suffix(path)
    if ending in _TEXT:
        return "text"
    if ending in _PAIRS:
        return "pairs"
    if ending == ".csv":
        return "series"
    if ending in _PICTURES or is_idx(path):
        return "images"
    if ending == ".npz":
        return "bags" if "bag" in _npz_names(path) else "images"
    return None


def is_idx(path: Path) -> bool:
    """Whether it is an idx file like MNIST's: ``train-images-idx3-ubyte.gz`` or ``images.idx``."""
    name = bare_name(path)
    return name.endswith(("ubyte", ".idx")) and suffix(path) not in _TEXT


def _npz_names(path: Path) -> list[str]:
    from zipfile import BadZipFile, ZipFile

    try:
        with ZipFile(path) as file:
            return [name.removesuffix(".npy") for name in file.namelist()]
    except (BadZipFile, NotImplementedError, ValueError) as error:
        raise ValueError(f"{path} is not an npz file ({error}): write it with numpy.savez") from error


def kind_of_path(path: Path, wanted: Sequence[str] = (), spec: str | None = None) -> str:
    """The kind of data under a path: that with the most bytes, among the ``wanted`` ones if any file is of such a kind.

    ``spec`` is the path as the user gave it, for errors.
    """
    sizes: Counter[str] = Counter()
    for file in files_under(path):
        kind = kind_of_file(file)
        if kind is not None:
            sizes[kind] += file.stat().st_size + 1
    if not sizes:
        usable = "; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
        given = f"data spec {spec!r}: " if spec not in (None, str(path)) else ""
        raise ValueError(f"{given}{path} contains no file that can be read as data. Supported are {usable}")
    fitting = Counter({kind: size for kind, size in sizes.items() if kind in wanted})
    return (fitting or sizes).most_common(1)[0][0]


def require_kind(spec: Spec, kind: str, task: str) -> None:
    """Raises a ValueError if a task needs another kind of data."""
    needed = TASKS[task][0]
    if kind in needed:
        return
    fitting = ", ".join(tasks_of(kind))
    remedy = f"{kind} can be used for {fitting}" if fitting else "bags are read by load_bags"
    raise ValueError(
        f"data spec {spec.text!r} contains {kind}, but task {task!r} needs {' or '.join(needed)}: "
        f"give {'; or '.join(KINDS[name] for name in needed)}, or builtin:{needed[0]} ({remedy})"
    )


def tasks_of(kind: str) -> list[str]:
    """The tasks that a kind of data serves."""
    return [task for task, (kinds, _) in TASKS.items() if kind in kinds]
