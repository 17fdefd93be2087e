"""A checkpoint's folder to a model: local files, safetensors alone, and every fault named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from outeffhop.models.stanhop import StanhopForForecasting

__all__ = ["load_checkpoint"]

_INDEX = "model.safetensors.index.json"


def load_checkpoint(path: str | os.PathLike[str]) -> PreTrainedModel:
    """The model of a folder that ``save_pretrained`` wrote, as its config names it, in evaluation mode.

    Nothing is fetched, no pickle is read, no code of the checkpoint runs. A folder that is not a checkpoint, a
    damaged file, weights that are missing or not finite: a ValueError that says which.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"checkpoint {str(folder)!r} is not a folder: give the one that save_pretrained wrote")
    _check_files(folder)
    kind: Any = _architecture(folder)
    try:
        model, info = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except ValueError:
        raise
    except (OSError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint {str(folder)!r} does not fit {kind.__name__}: {first}") from error
    _check_weights(folder, model, info)
    return model.eval()


def _check_files(folder: Path) -> None:
    if (folder / _INDEX).is_file():
        names = sorted(set(_read_json(folder / _INDEX).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        file = folder / name
        if not file.is_file():
            others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
            remedy = (
                f"; {others[0]} is a pickle, which is not read: save it anew with save_pretrained" if others else ""
            )
            raise ValueError(f"checkpoint {str(folder)!r} has no {name}{remedy}")
        try:
            with safe_open(file, framework="pt") as opened:
                opened.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged or cut short: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _architecture(folder: Path) -> type[PreTrainedModel]:
    if not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint {str(folder)!r} has no config.json: it is not a folder save_pretrained wrote")
    content = _read_json(folder / "config.json")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{folder / 'config.json'}: {(str(error).strip().splitlines() or ['?'])[0]}") from error
    names = content.get("architectures") or []
    if not names:  # as a config saved by itself
        names = [kind.__name__ for kind in _base(config)]
    for name in names:
        if name == StanhopForForecasting.__name__:
            return StanhopForForecasting
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return kind
    raise ValueError(
        f"{folder / 'config.json'}: architecture {', '.join(map(repr, names)) or 'None'} of model_type "
        f"{content.get('model_type')!r} is unknown to transformers {transformers.__version__}"
    )


def _base(config: PreTrainedConfig) -> list[Any]:
    found: Any = transformers.AutoModel._model_mapping.get(type(config), None)
    return [] if found is None else list(found) if isinstance(found, tuple) else [found]


def _check_weights(folder: Path, model: PreTrainedModel, info: dict[str, Any]) -> None:
    # a pooler that was never trained is left out of many checkpoints, and nothing follows it
    missing = sorted(name for name in info.get("missing_keys", ()) if "pooler." not in name)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(
            f"checkpoint {str(folder)!r} lacks weights of {type(model).__name__}: {missing[0]}{more}; "
            "they would be random"
        )
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(
                f"checkpoint {str(folder)!r}: weight {name} has {bad} of {tensor.numel()} values not finite"
            )
