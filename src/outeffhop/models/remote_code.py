"""Finds the code that a checkpoint contains or refers to, which never runs unless the user asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from outeffhop._io import read_json

__all__ = ["foreign_class", "refuse_code"]


def refuse_code(file: Path, *, allow_own: bool = False, remedy: str = "") -> None:
    """Raises a ValueError if a JSON file of a checkpoint names code to run; other files pass.

    Args:
        allow_own: allow code in the checkpoint's own folder; code that would be downloaded is never allowed.
        remedy: what the user can do about code in the folder, for the error message.
    """
    try:
        own, fetched = _named(read_json(file))
    except (ValueError, RecursionError):
        return  # the code that reads the file reports what is wrong
    if fetched:
        raise ValueError(f"{file} asks for code from elsewhere, {fetched[0]!r}, which is never fetched or run")
    if own and not allow_own:
        raise ValueError(f"{file} names code in its own folder, {own[0]!r}, which is not run{remedy}")


def foreign_class(folder: Path, names: list[str]) -> type[PreTrainedModel] | None:
    """Runs the checkpoint's own code and returns the class with one of these names; None if there is none."""
    known = read_json(folder / "config.json").get("auto_map", {})
    for reference in known.values():
        if isinstance(reference, str) and reference.split(".")[-1] in names:
            try:
                found = get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
            except Exception as error:  # the code may raise anything
                raise ValueError(f"code {reference!r} of checkpoint {str(folder)!r} failed: {error!r}") from error
            if not issubclass(found, PreTrainedModel):
                raise ValueError(f"code {reference!r} of checkpoint {str(folder)!r} is not a PreTrainedModel")
            return found
    return None


def _named(content: Any) -> tuple[list[str], list[str]]:
    """References at any depth: to files of the folder itself, and to repositories of the hub."""
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
