"""Reads GGUF files, the format of llama.cpp, by transformers' own reader (needs the package gguf)."""

from __future__ import annotations

import copy
import mmap
import re
import struct
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outeffhop._naming import check_utf8, printable, require
from outeffhop.models.asked_sizes import check_counts, check_size

__all__ = ["is_gguf", "load_gguf"]

# a whole number in the header: its name's end, its type, its value
_LAYERS = re.compile(rb"block_count(\x04\0\0\0.{4}|\x0a\0\0\0.{8})", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Whether a path is a file that begins as a GGUF file does, or is named like one."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def load_gguf(file: Path, dtype: str | None = None) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The causal language model of a GGUF file in floating point, and transformers' loading info.

    The weights are the numbers that the file's own blocks of 4 to 8 bits stand for.

    Args:
        dtype: float32 by default.
    """
    check_utf8("checkpoint", file)
    require("gguf", "gguf")
    _check_layers(file)
    plain: dict[str, Any] = dict(gguf_file=file.name, local_files_only=True, trust_remote_code=False)
    try:
        config = AutoConfig.from_pretrained(file.parent, **plain)
        kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        check_size(file, kind, config, file.stat().st_size)
        plain |= dict(config=config, dtype=getattr(torch, dtype or "float32"), output_loading_info=True)
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, **plain)
    except Exception as error:  # from a damaged file to an architecture that transformers does not read
        said = printable((str(error).strip().splitlines() or [type(error).__name__])[0])
        raise ValueError(f"checkpoint {str(file)!r} cannot be read as GGUF: {said}") from error
    read, info = loaded
    # transformers takes it for a quantized model, which it does not save; it is not one any more
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(read).__name__]
    with torch.device("meta"):
        model: PreTrainedModel = type(read)(config)
    try:
        model.load_state_dict(read.state_dict(), assign=True)
    except RuntimeError as error:  # transformers gives a model the shapes of the file
        said = printable(" ".join(str(error).splitlines()[1].split()))
        raise ValueError(f"checkpoint {str(file)!r} has weights that its header does not describe: {said}") from error
    for name, buffer in read.named_buffers():  # those that no state dict holds, such as the frequencies of positions
        place, _, own = name.rpartition(".")
        model.get_submodule(place)._buffers[own] = buffer
    model.tie_weights()
    model.generation_config = read.generation_config
    return model, info


def _check_layers(file: Path) -> None:
    """Raises a ValueError if a header asks for more layers than it has tensors.

    It looks for the bytes: to read a header with a large vocabulary takes gguf minutes.
    """
    if file.stat().st_size < 24:
        return  # cut short, as reading it says
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        (tensors,) = struct.unpack_from("<Q", content, 8)
        for found in _LAYERS.finditer(content):
            check_counts(file, {"layers": int.from_bytes(found[1][4:], "little")}, tensors)
