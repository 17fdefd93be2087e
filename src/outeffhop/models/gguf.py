"""Reads GGUF files, the format of llama.cpp, by transformers' own reader (needs the package gguf)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outeffhop._naming import check_utf8, require

__all__ = ["is_gguf", "load_gguf"]


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as a GGUF file does, or is named like one."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def load_gguf(file: Path, dtype: str | None = None) -> PreTrainedModel:
    """The causal language model of a GGUF file, in evaluation mode and in floating point.

    The weights are the numbers that the file's own blocks of 4 to 8 bits stand for.

    Args:
        dtype: float32 by default.
    """
    check_utf8("checkpoint", file)
    require("gguf", "gguf")
    try:
        read: Any = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            local_files_only=True,
            trust_remote_code=False,
            dtype=getattr(torch, dtype or "float32"),
        )
    except Exception as error:  # from a damaged file to an architecture that transformers does not read
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"checkpoint {str(file)!r} cannot be read as GGUF: {said}") from error
    # transformers takes it for a quantized model, which it does not save; it is not one any more
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(read).__name__]
    with torch.device("meta"):
        model: PreTrainedModel = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    for name, buffer in read.named_buffers():  # those that no state dict holds, such as the frequencies of positions
        place, _, own = name.rpartition(".")
        model.get_submodule(place)._buffers[own] = buffer
    model.tie_weights()
    model.generation_config = read.generation_config
    return model.eval()
