"""Weights, optimizer state and random number generators as safetensors and JSON.

Nothing here is ever unpickled. Optimizer state is saved whole and by parameter name, whether the weights are on one
device, copied or sharded, so a run may resume with another number of processes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "model_state",
    "load_model_state",
    "optimizer_state",
    "save_optimizer",
    "load_optimizer",
    "save_random_state",
    "load_random_state",
]

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SEPARATOR = "|"  # between the names of a parameter and of its state; neither contains it


def model_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The whole weights of a sharded model, tied ones once; None for a model that is not sharded. Collective."""
    if not isinstance(model, FSDPModule):
        return None
    state: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
    once = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    return {name: value for name, value in state.items() if name not in again}


def load_model_state(model: Any, folder: Path) -> None:
    """Loads what ``save_pretrained`` wrote, through ``from_pretrained``: a file may have other names for weights."""
    found = type(model).from_pretrained(folder, config=model.config, local_files_only=True, use_safetensors=True)
    state = found.state_dict()
    if isinstance(model, FSDPModule):
        whole: Any = model
        set_model_state_dict(whole, state, options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name. Collective for a sharded model."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def save_optimizer(state: dict[str, Any], folder: Path) -> None:
    tensors, numbers = {}, {}
    for parameter, entries in state["state"].items():
        for name, value in entries.items():
            key = f"{parameter}{_SEPARATOR}{name}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach().cpu().contiguous()
            else:
                numbers[key] = value
    save_file(tensors, folder / "optimizer.safetensors")
    groups = [{k: list(v) if isinstance(v, tuple) else v for k, v in g.items()} for g in state["param_groups"]]
    groups = [{k: float(v) if isinstance(v, Tensor) else v for k, v in g.items()} for g in groups]
    (folder / "optimizer.json").write_text(json.dumps({"numbers": numbers, "groups": groups}))


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    kept = json.loads((folder / "optimizer.json").read_text())
    state: dict[str, dict[str, Any]] = {}
    for key, value in [*load_file(folder / "optimizer.safetensors").items(), *kept["numbers"].items()]:
        parameter, name = key.rsplit(_SEPARATOR, 1)
        state.setdefault(parameter, {})[name] = value
    whole: Any = {"state": state, "param_groups": kept["groups"]}
    set_optimizer_state_dict(model, optimizer, whole, options=StateDictOptions(full_state_dict=True))
    for group in optimizer.param_groups:
        group["betas"] = tuple(group["betas"])


def save_random_state(folder: Path, rank: int) -> None:
    """Saves the generators of Python, NumPy, torch on the CPU and torch on this process's GPU."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    save_file(tensors, folder / f"random-{rank}.safetensors")
    numbers = {"python": random.getstate(), "numpy": [position, has_gauss, gauss]}
    (folder / f"random-{rank}.json").write_text(json.dumps(numbers))


def load_random_state(folder: Path, rank: int) -> None:
    """Restores the generators; a process that the run did not have before keeps its own seed."""
    if not (folder / f"random-{rank}.safetensors").is_file():
        return
    tensors = load_file(folder / f"random-{rank}.safetensors")
    numbers = json.loads((folder / f"random-{rank}.json").read_text())
    version, internal, gauss = numbers["python"]
    random.setstate((version, tuple(internal), gauss))
    keys = tensors["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, *numbers["numpy"]))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
