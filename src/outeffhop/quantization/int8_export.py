"""A PyTorch model as a program that OpenVINO can convert: torch.export with named inputs and free sizes.

Attention with a sink becomes scaled_dot_product_attention with one zero key and value. Batch size stays free, and so
does the length of token sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from outeffhop.metrics import evaluating

__all__ = ["check_model", "inputs_of", "output_of", "save_program"]

_TARGETS = ("labels", "future_values")  # only the loss needs them


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch without its targets. Tokens always get a mask, so that the export can take padded batches."""
    inputs = {name: tensor for name, tensor in batch.items() if name not in _TARGETS}
    if "input_ids" in inputs and "attention_mask" not in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    shapes = [tuple(inputs[name].shape) for name in ("input_ids", "attention_mask") if name in inputs]
    if len(set(shapes)) > 1:  # OpenVINO would broadcast one to the other
        raise ValueError(f"input_ids has shape {shapes[0]} and attention_mask {shapes[1]}: they must be equal")
    return inputs


def output_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's first output for a batch without targets: logits, prediction or last hidden states."""
    with torch.no_grad():
        return _output(model, inputs_of(batch))


def _output(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    return model(**inputs).to_tuple()[0]


def check_model(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    """Raises an error if the model cannot be exported, or not with such a batch."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}: must be a transformers PreTrainedModel")
    for name, p in model.named_parameters():
        if p.device.type != "cpu" or p.dtype != torch.float32:
            raise ValueError(f"model: {name} is {p.dtype} on {p.device}; export model.float().cpu()")
        if not p.isfinite().all():
            raise ValueError(f"model: {name} holds NaN or infinite values; such a model cannot be quantized")
    if model.main_input_name not in batch:
        raise ValueError(
            f"calibration_batches hold {sorted(batch)}, but {type(model).__name__} takes {model.main_input_name!r}: "
            "is this data for another kind of model?"
        )
    ids = batch.get("input_ids")
    if ids is not None and ids.shape[1:] == (1,):
        raise ValueError(
            "calibration_batches begin with sequences of one token, and torch.export would fix the length to 1: "
            "put longer ones first"
        )


class _Inputs(nn.Module):
    """The model as a function of tensors in order, so that torch.export can give each its free sizes."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        return _output(self.model, dict(zip(self.names, tensors, strict=True)))


def save_program(model: PreTrainedModel, batch: Mapping[str, Tensor], path: Path) -> str:
    """Writes the model's program, a function of the batch's inputs in order, and returns the name of its output."""
    inputs = inputs_of(batch)
    # torch.export would take a size of 1 for a constant
    example = tuple(torch.cat([tensor, tensor]) for tensor in inputs.values())
    free = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if _is_tokens(x) else {0: Dim.DYNAMIC} for x in example)
    with _ready(model), torch.no_grad():
        output: str = next(iter(model(**inputs).keys()))
        program = torch.export.export(_Inputs(model, list(inputs)), example, dynamic_shapes=(free,), strict=False)
    torch.export.save(program, path)
    return output


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


@contextmanager
def _ready(model: PreTrainedModel) -> Iterator[None]:
    """The model in eval mode and without a cache of keys and values, which the export does not return."""
    caches = getattr(model.config, "use_cache", False)
    if caches:
        model.config.use_cache = False
    try:
        with evaluating(model):
            yield
    finally:
        if caches:
            model.config.use_cache = True
