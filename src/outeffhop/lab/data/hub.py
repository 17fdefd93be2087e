"""Datasets and tokenizers of the Hugging Face hub; code from the hub is never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from outeffhop._naming import require
from outeffhop.lab.data.specs import Spec

if TYPE_CHECKING:
    from datasets import Dataset  # type: ignore[import-untyped]

__all__ = ["kind_of_rows", "load", "text_column", "tokenizer_files"]

_TOKENIZER = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "config.json")


def load(spec: Spec) -> dict[str, Dataset]:
    """Loads the splits of a dataset. ``hub:a/b`` is tried as owner/name first, then as name/config."""
    datasets = require("datasets")
    parts = spec.name.split("/")
    if len(parts) > 3:
        raise ValueError(f"data spec {spec.text!r} has too many parts: write hub:NAME, or hub:OWNER/NAME/CONFIG")
    tries: list[tuple[str, str | None]] = [("/".join(parts[:2]), parts[2] if len(parts) == 3 else None)]
    if len(parts) == 2:
        tries.append((parts[0], parts[1]))
    # load_dataset would also take a local folder, or the name of a loader for local files
    local = {"", ".", "..", *getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())}
    tries = [(name, config) for name, config in tries if name not in local and not Path(name).exists()]
    if not tries:
        raise ValueError(f"data spec {spec.text!r} does not name a dataset of the hub: give local files by their path")
    failures = []
    for name, config in tries:
        try:
            found = datasets.load_dataset(name, config)
        except Exception as error:  # datasets raises many kinds, from no network to an unknown name
            failures.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            continue
        if not isinstance(found, datasets.DatasetDict):
            raise ValueError(f"data spec {spec.text!r} loaded as {type(found).__name__}")
        return dict(found)  # type: ignore[arg-type]
    raise ValueError(
        f"data spec {spec.text!r} could not be loaded from the hub ({'; '.join(failures)}): check the name; without "
        "a network, download the data elsewhere and give its path"
    )


def tokenizer_files(spec: str) -> str:
    """The local folder with the tokenizer of a model, ``hub:NAME``; downloaded unless it was before. No weights are."""
    try:
        return str(require("huggingface_hub").snapshot_download(spec.removeprefix("hub:"), allow_patterns=_TOKENIZER))
    except Exception as error:  # from no network to an unknown name
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"tokenizer={spec!r} could not be loaded from the hub ({said}): check the name; without a network, "
            "download its files elsewhere and give their folder"
        ) from error


def kind_of_rows(spec: Spec, rows: Dataset) -> str:
    """text, images or series, according to the columns."""
    datasets = require("datasets")
    features = rows.features
    if any(isinstance(f, datasets.Image) for f in features.values()):
        if any(isinstance(f, datasets.ClassLabel) for f in features.values()):
            return "images"
        raise ValueError(f"data spec {spec.text!r} has images but no column of class labels")
    numbers = [n for n, f in features.items() if isinstance(f, datasets.Value) and f.dtype.startswith(("float", "int"))]
    if next(iter(features), "").lower() in ("date", "timestamp", "datetime") and numbers:
        return "series"
    if text_column(rows) is not None:
        return "text"
    raise ValueError(
        f"data spec {spec.text!r} has columns {', '.join(features)}: it needs a text column, an image and a label "
        "column, or a date column followed by numbers"
    )


def text_column(rows: Dataset) -> str | None:
    """The column ``text`` or ``content``, else the only column of strings; None if there are several."""
    value = require("datasets").Value
    strings = [n for n, f in rows.features.items() if isinstance(f, value) and f.dtype in ("string", "large_string")]
    for name in ("text", "content"):
        if name in strings:
            return name
    return strings[0] if len(strings) == 1 else None
