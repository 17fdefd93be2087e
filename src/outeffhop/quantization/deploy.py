"""A checkpoint to deploy: Linear layers in int8, in the compressed-tensors format that transformers and vLLM load.

    quantized = simulate(model, "W8A8 linear")
    with Calibration(quantized):
        for batch in batches:
            quantized(**batch)
    save_compressed(freeze(quantized), "deployed", tokenizer=tokenizer)

The integers, scales and zero points are those of the simulation; everything else stays in floating point. The format
writes asymmetric integers as −128 … 127, so zero points are 128 lower than in ``Grid``.

``config.json`` asks for float32, whatever dtype the file holds. transformers simulates the integers with scales in the
dtype of the model, and in 16 bits it would round twice: once to 16 bits, then to the grid.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from outeffhop._io import check_folder, read_json, whole_folder, write_json
from outeffhop._naming import check_utf8, require
from outeffhop.methods import METHODS
from outeffhop.models.config_entry import KEY
from outeffhop.models.modules import has_attention, method_in
from outeffhop.quantization.placement import lay_out
from outeffhop.quantization.quantizers import Grid
from outeffhop.quantization.schemes import Scheme
from outeffhop.quantization.simulation import Simulation, simulation_of
from outeffhop.state import MethodState

__all__ = ["save_compressed", "check_model", "check_scheme", "check_target"]

_INT8, _PACKED = "int-quantized", "pack-quantized"
_OFFSET = 128  # of zero points: our integers begin at 0, those of the format at −128
Tensors = dict[str, Tensor]


def save_compressed(
    quantized: PreTrainedModel,
    path: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Writes a simulated model as a compressed-tensors checkpoint, which ``from_pretrained`` loads.

    The checkpoint is loaded once before it gets its name, and every tensor is compared.

    Args:
        quantized: what ``freeze`` returned, with the scheme "linear" or "per-token", weights in 8 or 4 bits and
            activations in 8. Its attention must be plain softmax, because the programs that load the checkpoint know
            no other.
        path: the folder to write; it appears whole or not at all, and must not exist or be empty.
        tokenizer: saved beside the model; anything with ``save_pretrained``.
        dtype: stores tensors that stay in floating point in this dtype where that loses nothing, such as bfloat16
            for a model that was trained in it and simulated in float32.
    """
    simulation = simulation_of(quantized)
    if simulation.state != "frozen":
        raise ValueError(f"quantized is {simulation.state}: calibrate it and call freeze(quantized) first")
    check_scheme(simulation.scheme)
    check_model(quantized)
    check_target(path, "path")
    layers = _layers(quantized, simulation)
    state = _stored(quantized.state_dict(), dtype)
    for name, (weight, received) in layers.items():
        state |= {f"{name}.{key}": value for key, value in _tensors(state.pop(f"{name}.weight"), weight, received)}
    with whole_folder(path) as side:
        try:
            quantized.save_pretrained(side, state_dict=dict(state), **_format(quantized))
        except SafetensorError as error:  # safetensors' own class for errors of the system
            raise OSError(f"{os.fspath(path)!r} could not be written: {error}") from error
        _write_config(side / "config.json", _entry(quantized, simulation.scheme, set(layers)))
        if tokenizer is not None:
            tokenizer.save_pretrained(side)
        _check_loaded(type(quantized), side, state)


# What can be saved


def check_scheme(scheme: Scheme) -> None:
    """Raises an error if the format has no place for what the scheme quantizes, or its package is not installed."""
    require("compressed_tensors", "deploy")
    if scheme.floating:
        raise ValueError(
            f"scheme={str(scheme)!r} is 8-bit floating point, and a checkpoint is saved in integers: "
            "use the scheme linear or per-token (--scheme linear)"
        )
    if scheme.placement != "linear":
        raise ValueError(
            f"scheme={str(scheme)!r} also quantizes sums, norms and attention, which a saved checkpoint cannot hold: "
            "use the scheme linear (--scheme linear)"
        )
    if scheme.alpha is not None:
        raise ValueError(
            f"scheme={str(scheme)!r} divides each Linear's input by factors that a saved checkpoint cannot hold: "
            "use the scheme linear or per-token (--scheme linear)"
        )
    if scheme.weights.bits not in (4, 8) or scheme.activations.bits != 8:
        raise ValueError(f"bits={scheme.bits!r}: a checkpoint is saved as W8A8 or W4A8")
    if not scheme.weights.symmetric or scheme.activations.symmetric:
        raise ValueError(
            f"weights {scheme.weights} and activations {scheme.activations}: a checkpoint is saved with symmetric "
            "weights and asymmetric activations"
        )


def check_model(model: nn.Module) -> None:
    """Raises an error if a program that knows only transformers' own models could not load it as a checkpoint."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not type(model).__module__.startswith("transformers."):
        raise ValueError(
            f"{kind} is not one of transformers' models, so nothing else could load it: use export_int8 (--int8)"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"this {kind} is quantized already: give the checkpoint in floating point")
    method = method_in(model) if has_attention(model) else None
    extra = any(isinstance(module, MethodState) and module.extra for module in model.modules())
    if extra or method not in (None, METHODS["vanilla"].method):
        raise ValueError(
            f"this {kind} has the attention method {method}, which only outeffhop knows: a saved checkpoint needs "
            "plain softmax; run this one in integers by export_int8 (--int8)"
        )
    sites = lay_out(model, "linear").sites
    if not sites:
        raise ValueError(f"this {kind} has no Linear layer to quantize outside of its head")
    for name in sites:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear):
            raise ValueError(
                f"{name} of this {kind} is a {type(layer).__name__}, and compressed-tensors quantizes nn.Linear only: "
                "use export_int8 (--int8)"
            )


def check_target(path: str | os.PathLike[str], name: str) -> None:
    """Raises a ValueError unless the folder can be created, or is there and empty."""
    check_utf8(name, path)
    check_folder(path, name)
    if Path(path).exists() and any(Path(path).iterdir()):
        raise ValueError(f"{name}={os.fspath(path)!r} is not empty and is not overwritten: give another folder")


def _layers(model: nn.Module, simulation: Simulation) -> dict[str, tuple[Grid, Grid | None]]:
    """Each quantized layer with the grids of its weight and of its input, which is None if tokens have their own."""
    found: dict[str, tuple[Grid, Grid | None]] = {}
    for name in simulation.layout.sites:
        weight, received = (simulation.points.get(f"{name}/{what}") for what in ("weight", "input"))
        if weight is None and received is None and simulation.layout.excludes(f"{name}/weight"):
            continue
        if weight is None or weight.grid is None or received is None or received.dimensions is None:
            raise ValueError(
                f"{name} has no quantizer of both its weight and its input: calibrate on a batch that runs it, or "
                f"leave it in floating point by simulate(..., exclude=({name!r},))"
            )
        if received.grid is None and received.dimensions != 3:
            raise ValueError(
                f"{name} takes inputs of {received.dimensions} dimensions: transformers would give all tokens one "
                f"range there; use the scheme linear, or simulate(..., exclude=({name!r},))"
            )
        found[name] = weight.grid, received.grid
    return found


# What is written


def _stored(state: Tensors, dtype: torch.dtype | None) -> Tensors:
    """The tensors on CPU, in the dtype where that loses nothing; shared ones stay shared, and are stored once."""
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    found = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen or not tensor.numel():
            small = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            seen[key] = (small if torch.equal(small.to(tensor.dtype), tensor) else tensor).cpu()
        found[name] = seen[key]
    return found


def _tensors(rounded: Tensor, weight: Grid, received: Grid | None) -> list[tuple[str, Tensor]]:
    """What the format stores of a layer, by name: the integers of its rounded weight, and both grids."""
    weight = weight.to(rounded.device)
    integers = weight.quantize(rounded).to(torch.int8)
    scale = weight.scale.reshape(-1, 1) if weight.spec.granularity == "channel" else weight.scale
    found = [("weight_scale", scale)]
    if weight.spec.bits == 8:
        found += [("weight", integers)]
    else:
        pack = require("compressed_tensors.compressors", "deploy").pack_to_int32
        found += [("weight_packed", pack(integers, weight.spec.bits)), ("weight_shape", torch.tensor(integers.shape))]
    if received is not None:
        zero = (received.zero_point - _OFFSET).to(torch.int8)
        found += [("input_scale", received.scale.cpu()), ("input_zero_point", zero.cpu())]
    return found


def _entry(model: nn.Module, scheme: Scheme, layers: set[str]) -> dict[str, Any]:
    """The entry of config.json that tells how the layers are quantized."""
    package, lib = require("compressed_tensors", "deploy"), require("compressed_tensors.quantization", "deploy")
    weights = lib.QuantizationArgs(num_bits=scheme.weights.bits, symmetric=True, strategy=scheme.weights.granularity)
    activations = lib.QuantizationArgs(
        num_bits=8, symmetric=False, strategy=scheme.activations.granularity, dynamic=scheme.dynamic
    )
    form = _INT8 if scheme.weights.bits == 8 else _PACKED
    group = lib.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations, format=form)
    config = lib.QuantizationConfig(
        config_groups={"group_0": group},
        format=form,
        quantization_status=lib.QuantizationStatus.COMPRESSED,
        ignore=[name for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in layers],
    )
    return {**config.model_dump(mode="json"), "version": package.__version__}


def _format(model: nn.Module) -> dict[str, Any]:
    """Checkpoints on the hub have one matrix for each expert, which transformers merges as it loads them. Of quantized
    checkpoints it merges only experts packed in 4 bits, so ours, in floating point, are saved merged."""
    merged = any("experts" in name and p.dim() == 3 for name, p in model.named_parameters())
    return {"save_original_format": False} if merged else {}


def _write_config(file: Path, entry: dict[str, Any]) -> None:
    content = _plain(read_json(file))
    write_json(file, {**content, "dtype": "float32", "quantization_config": entry})


def _plain(config: Any) -> Any:
    """A config, and those inside it, in float32 and with transformers' own attention."""
    if not isinstance(config, dict):
        return config
    kept = {name: _plain(value) for name, value in config.items() if name not in (KEY, "attn_implementation")}
    return {**kept, "dtype": "float32"} if "dtype" in kept else kept


def _check_loaded(kind: type[PreTrainedModel], folder: Path, state: Tensors) -> None:
    """Raises a ValueError unless ``from_pretrained`` gives back every tensor, in full precision."""
    try:
        loaded = kind.from_pretrained(folder, local_files_only=True, use_safetensors=True).state_dict()
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise ValueError(
            f"transformers cannot load a {kind.__name__} in compressed-tensors: use export_int8 (--int8); it says: "
            + str(error).partition("\n")[0]
        ) from error
    for name, tensor in state.items():
        found = loaded.get(name)
        wanted = tensor.float() if tensor.is_floating_point() else tensor
        if found is None or found.dtype != wanted.dtype or not torch.equal(found.cpu(), wanted):
            what = "is missing" if found is None else f"is another tensor ({found.dtype})"
            raise ValueError(f"{name} {what} in the {kind.__name__} that transformers loads: it cannot be saved so")
