"""Code that a checkpoint brings along or sends for: found by name, and never run unless that was asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

__all__ = ["foreign_class", "refuse_code"]


def refuse_code(file: Path, *, allow_own: bool = False, remedy: str = "") -> None:
    """Raises ValueError where a JSON file of a checkpoint names code to be run; a file of another kind passes.

    Args:
        allow_own: let code pass that lies in the checkpoint's own folder; what would be fetched never does.
        remedy: what a reader can do about code of the folder's own.
    """
    try:
        own, fetched = _named(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return  # whoever reads it says what is wrong
    if fetched:
        raise ValueError(f"{file} asks for code from elsewhere, {fetched[0]!r}, which is never fetched nor run")
    if own and not allow_own:
        raise ValueError(f"{file} brings code of its own, {own[0]!r}, which is not run{remedy}")


def foreign_class(folder: Path, names: list[str]) -> type[PreTrainedModel] | None:
    """Runs the checkpoint's own code for the class of one of these names; None where it has none."""
    known = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})
    for reference in known.values():
        if isinstance(reference, str) and reference.split(".")[-1] in names:
            try:
                found = get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
            except Exception as error:  # whatever that code does
                raise ValueError(f"code {reference!r} of checkpoint {str(folder)!r} failed: {error!r}") from error
            if not issubclass(found, PreTrainedModel):
                raise ValueError(f"code {reference!r} of checkpoint {str(folder)!r} is no PreTrainedModel")
            return found
    return None


def _named(content: Any) -> tuple[list[str], list[str]]:
    """What is named at any depth: files of the folder itself, and repositories of the hub."""
    own: list[str] = []
    fetched: list[str] = []
    inner = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inner:
        if key == "auto_map":  # "module.Class", or "repository--module.Class"
            for reference in _texts(value):
                (fetched if "--" in reference else own).append(reference)
        elif str(key).endswith(("attn_implementation", "experts_implementation")):  # "owner/kernel"
            fetched += [name for name in _texts(value) if "/" in name]
        else:
            more, others = _named(value)
            own, fetched = own + more, fetched + others
    return own, fetched


def _texts(value: Any) -> list[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for part in inner for text in _texts(part)]
