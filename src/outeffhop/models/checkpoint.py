"""Loads a model from a checkpoint: local safetensors or GGUF files only, with an error for every fault."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from outeffhop._io import read_json
from outeffhop._naming import check_utf8, known, printable
from outeffhop.models.asked_sizes import check_counts, check_size
from outeffhop.models.gguf import is_gguf, load_gguf
from outeffhop.models.remote_code import foreign_class, refuse_code
from outeffhop.models.stanhop import StanhopForForecasting

__all__ = ["DTYPES", "load_checkpoint"]

DTYPES = ("float32", "bfloat16", "float16")
"""What a model's weights can be loaded in, instead of what they are stored in."""

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TRUST = ": read it, and pass --trust-remote-code (trust_remote_code=True) if you trust it"


def load_checkpoint(
    path: str | os.PathLike[str], *, dtype: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Loads the model that ``save_pretrained`` wrote to a folder, or that of a GGUF file, in evaluation mode.

    Nothing is downloaded, no pickle is read, and no code of the checkpoint runs. A folder that is not a checkpoint, a
    damaged file, and weights that are missing or not finite raise a ValueError that names the fault.

    Args:
        path: the folder or the GGUF file. The weights of a GGUF file become floating-point numbers again.
        dtype: one of ``DTYPES``; by default what the weights are stored in, and float32 for GGUF.
        trust_remote_code: run the Python files in the folder that its config names; by default they are refused.
    """
    if dtype is not None:
        known("dtype", dtype, DTYPES)
    folder = Path(path)
    if is_gguf(folder):
        with _no_load_report():
            model, info = load_gguf(folder, dtype)
        _check_weights(folder, model, info)
        return model.eval()
    if not folder.is_dir():
        raise ValueError(f"checkpoint {str(folder)!r} is not a folder: give one that save_pretrained wrote")
    check_utf8("checkpoint", folder)
    tensors, stored = _check_files(folder)
    kind, config = _architecture(folder, trust_remote_code, tensors)
    if kind.__module__.startswith(("transformers.", "outeffhop.")):  # others are the checkpoint's own, which may do all
        check_size(folder / "config.json", kind, config, stored)
    wanted = {} if dtype is None else {"dtype": getattr(torch, dtype)}
    try:
        with _no_load_report():
            loaded: Any = kind.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_weights refuses them, by name
                **wanted,
            )
    except Exception as error:  # a config that does not match its weights can fail anywhere in transformers
        raise ValueError(f"checkpoint {str(folder)!r} does not fit {kind.__name__}: {_first_line(error)}") from error
    model, info = loaded
    _check_weights(folder, model, info)
    return model.eval()  # type: ignore[no-any-return]


@contextmanager
def _no_load_report() -> Iterator[None]:
    """Without the table that transformers logs about weights that do not fit: our errors name them, and on one line."""

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    handlers = list(logging.getLogger("transformers").handlers)
    for handler in handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)


def _check_files(folder: Path) -> tuple[int, int]:
    """Checks the weight files; returns the number of tensors they hold, and their bytes."""
    tensors = stored = 0
    if (folder / _INDEX).is_file():
        shards = _read_object(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ValueError(f"{folder / _INDEX} has no weight_map from weights to files")
        whole = (folder / _WEIGHTS).is_file()  # transformers then reads this one and ignores the shards
        names = sorted({*shards.values(), *([_WEIGHTS] if whole else [])})
    else:
        names = [_WEIGHTS]
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{folder / _INDEX} names {name!r}: only files in its own folder are read")
        file = folder / name
        if not file.is_file():
            raise ValueError(f"checkpoint {str(folder)!r} has no {name}{_instead(folder, name)}")
        try:
            with safe_open(file, framework="pt") as opened:
                tensors += len(opened.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged or cut short: {printable(error)}") from error
        stored += file.stat().st_size
    return tensors, stored


def _instead(folder: Path, name: str) -> str:
    """What lies where the weights should be: a folder one level below, a GGUF file, or pickles, which are not read."""
    entries = sorted(folder.iterdir())
    for below in entries:
        if all(os.path.isfile(below / part) for part in (name, "config.json")):  # False where it may not be read
            return f"; {printable(below)} has one: name that folder"
        if below.suffix.lower() == ".gguf":
            return f"; {printable(below)} is a checkpoint of its own: name that file"
    pickled = [p.name for p in entries if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
    if not pickled:
        return ""
    return f"; {printable(pickled[0])} is a pickle, which is not read: save the model again with save_pretrained"


def _read_object(file: Path) -> dict[str, Any]:
    content = read_json(file)
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _architecture(folder: Path, trust: bool, tensors: int) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint {str(folder)!r} has no config.json: save_pretrained did not write it")
    content = _read_object(folder / "config.json")
    refuse_code(folder / "config.json", allow_own=trust, remedy=_TRUST)
    # transformers would read the file named here instead of those checked above, even a pickle
    named = content.get("transformers_weights", _WEIGHTS)
    if named not in (_WEIGHTS, _INDEX):
        raise ValueError(
            f"{folder / 'config.json'}: transformers_weights={named!r}, but only {_WEIGHTS} and its shards are read"
        )
    names = content.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{folder / 'config.json'}: architectures={names!r} is not a list of names")
    check_counts(folder / "config.json", content, tensors)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
    except Exception as error:  # its fields may hold anything
        raise ValueError(f"{folder / 'config.json'}: {_first_line(error)}") from error
    if not names:  # a config that was saved without a model
        names = [kind.__name__ for kind in _base(config)]
    own = foreign_class(folder, names) if trust else None
    if own is not None:
        return own, config
    for name in names:
        if name == StanhopForForecasting.__name__:
            return StanhopForForecasting, config
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind, config
    raise ValueError(
        f"{folder / 'config.json'}: architecture {', '.join(map(repr, names)) or 'None'} of model_type "
        f"{content.get('model_type')!r} is unknown to transformers {transformers.__version__}"
    )


def _first_line(error: Exception) -> str:
    """An error's message on one line; the cause is often in the second line of transformers' messages."""
    lines = str(error).strip().splitlines()
    return printable(" ".join(" ".join(lines[:2]).split())) or type(error).__name__


def _base(config: PreTrainedConfig) -> list[Any]:
    found: Any = transformers.MODEL_MAPPING.get(type(config), None)
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


def _check_weights(folder: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    # many checkpoints leave out an untrained pooler, and nothing depends on it
    missing = sorted(name for name in info.get("missing_keys", ()) if "pooler." not in name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"checkpoint {str(folder)!r} lacks weights of {type(model).__name__}: {printable(missing[0])}{more}; "
            "they would be random"
        )
    for name, stored, wanted in sorted(info.get("mismatched_keys", ())):
        raise ValueError(
            f"checkpoint {str(folder)!r} does not fit {type(model).__name__}: {printable(name)} has shape "
            f"{list(stored)}, but by config.json it has {list(wanted)}"
        )
    extra = [name for name in info.get("unexpected_keys", ()) if _is_of_a_layer(name, model)]
    if extra:
        raise ValueError(
            f"checkpoint {str(folder)!r} has layers that its config.json does not ask for: {printable(min(extra))}; "
            "they would be ignored"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"checkpoint {str(folder)!r}: weight {name} has {bad} of {tensor.numel()} values not finite"
            )


def _is_of_a_layer(weight: str, model: PreTrainedModel) -> bool:
    """Whether a weight belongs to one of the model's lists of layers, named with or without the base prefix."""
    prefix = f"{model.base_model_prefix}."
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    for name in (weight, prefix + weight, weight.removeprefix(prefix)):
        parts = name.split(".")
        if any(part.isdecimal() and ".".join(parts[:i]) in lists for i, part in enumerate(parts)):
            return True
    return False
