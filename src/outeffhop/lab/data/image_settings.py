"""How a checkpoint wants its images: their size and channels, and the mean and deviation it was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outeffhop._io import read_json

__all__ = ["image_fields"]

_SIDE = 224  # what models without a size of their own, such as ResNet, were mostly trained with


def image_fields(config: Any, checkpoint: str) -> dict[str, Any]:
    """The fields of ``outeffhop.lab.data.prepare`` that follow from the config of a model of images and its folder."""
    file = Path(checkpoint) / "preprocessor_config.json"
    saved = read_json(file) if file.is_file() else {}
    if not isinstance(saved, dict):
        raise ValueError(f"{file} holds a {type(saved).__name__}, not a JSON object")
    config = getattr(config, "vision_config", config)
    side = getattr(config, "image_size", None) or saved.get("crop_size") or saved.get("size") or _SIDE
    fields: dict[str, Any] = {"image_size": _square(side, checkpoint)}
    channels = getattr(config, "num_channels", None)
    if channels is not None:
        fields["num_channels"] = channels
    if saved.get("do_normalize", True):
        fields |= {name: tuple(saved[f"image_{name}"]) for name in ("mean", "std") if saved.get(f"image_{name}")}
    return fields


def _square(side: Any, checkpoint: str) -> int:
    """The side of a square: images are given to every model as squares."""
    if isinstance(side, dict):
        side = list(side.values())
    sides = set(side) if isinstance(side, list | tuple) else {side}
    if len(sides) != 1 or not isinstance(found := sides.pop(), int) or found < 1:
        raise ValueError(f"the model of {checkpoint!r} takes images of size {side}: only square ones are served")
    return found
