"""Where a checkpoint lies that a user names: a folder, a GGUF file, a folder that holds one, or a name on the hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from outeffhop._io import read_json
from outeffhop.models.gguf import is_gguf

__all__ = ["find_checkpoint"]

_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_PREFIX = "hub:"
# in the repository's main folder; a pickle is not read, so it is not downloaded either
_WANTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
_UNWANTED = ("*/*", "flax_model*", "consolidated*")


def find_checkpoint(checkpoint: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Path:
    """The local folder or GGUF file that a checkpoint is read from, as ``load_checkpoint`` takes it.

    Args:
        checkpoint: a folder that ``save_pretrained`` wrote or a sentence encoder's; a GGUF file, or a folder whose only
            model is one; or the name of a model on the Hugging Face hub, with or without ``hub:`` before it. What
            the hub's cache holds is not downloaded again.
        trust_remote_code: also download Python files.
    """
    text = os.fspath(checkpoint)
    path = Path(text).expanduser()
    if text.startswith(_PREFIX):
        return _of_folder(_from_hub(text.removeprefix(_PREFIX), text, trust_remote_code))
    if path.is_dir():
        return _of_folder(path)
    if is_gguf(path):
        return path
    if path.exists():
        raise ValueError(f"checkpoint {text!r} is neither a folder nor a GGUF file")
    if _NAME.fullmatch(text):
        return _of_folder(_from_hub(text, text, trust_remote_code))
    raise ValueError(f"checkpoint {text!r} is not a folder: give that of a run or of a saved model, or a GGUF file")


def _of_folder(folder: Path) -> Path:
    """The folder itself, that of a sentence encoder's transformer, or the GGUF file in it."""
    if (folder / "config.json").is_file():
        return folder
    if (folder / "modules.json").is_file():
        parts = read_json(folder / "modules.json")
        first = parts[0].get("path") if isinstance(parts, list) and parts and isinstance(parts[0], dict) else None
        if isinstance(first, str) and (folder / first / "config.json").is_file():
            return folder / first
    found = sorted(folder.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"checkpoint {str(folder)!r} holds several GGUF files: give the path of one of {names}")
    return found[0] if found else folder


def _from_hub(name: str, given: str, trust_remote_code: bool) -> Path:
    wanted = (*_WANTED, *(["*.py"] if trust_remote_code else []))
    try:
        return Path(snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(_UNWANTED)))
    except Exception as error:  # from no network to an unknown name
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"checkpoint {given!r} is not a folder here, and the hub did not give a model of this name ({said}): check "
            "the name; without a network, download its files elsewhere and give their folder"
        ) from error
