"""A PyTorch model → OpenVINO's form in floating point → the same with 8-bit integers, by NNCF.

The model goes through torch.export, where attention with a sink is scaled_dot_product_attention with
one zero key and value. Batch size stays free, and so does the length of token sequences. Operations keep
the name of the module they come from: ``bert.encoder.layer.0.output.dense/linear_5/aten.linear...``.
"""

from __future__ import annotations

import io
import logging
import operator
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers import PreTrainedModel

from outeffhop.metrics import evaluating
from outeffhop.quantization.signal_stack import kept_signal_stack

__all__ = ["require", "inputs_of", "output_of", "to_openvino", "to_int8"]

_TARGETS = ("labels", "future_values")  # what a batch holds for the loss alone
_TELEMETRY = "openvino_telemetry"


def require() -> tuple[Any, Any]:
    """The modules openvino and nncf, imported so that they report nothing to anybody."""
    # Both send messages from their import on where this package is found, and none where it is missing.
    found = sys.modules.get(_TELEMETRY)
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        import nncf  # type: ignore[import-untyped]
        import openvino  # type: ignore[import-untyped]
        import openvino.frontend.pytorch.fx_decoder  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError(
            f"integer execution needs openvino and nncf ({error}): pip install 'outeffhop[int8]'"
        ) from error
    finally:
        if found is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = found
    return openvino, nncf


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch without its targets; tokens always with a mask, so that what is exported serves padded batches."""
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


class _Inputs(nn.Module):
    """The model as a function of tensors in order, which torch.export can give free sizes one by one."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(names)

    def forward(self, *tensors: Tensor) -> Tensor:
        return _output(self.model, dict(zip(self.names, tensors, strict=True)))


def to_openvino(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> Any:
    """The model as an ``openvino.Model`` in fp32 with the batch's inputs by name and its first output."""
    openvino, _ = require()
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder  # type: ignore[import-untyped]

    _check(model, batch)
    inputs = inputs_of(batch)
    # a size of 1 would be taken for a constant
    example = tuple(torch.cat([tensor, tensor]) for tensor in inputs.values())
    free = tuple({0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if _is_tokens(x) else {0: Dim.DYNAMIC} for x in example)
    with _ready(model), _quiet(), torch.no_grad():
        output = next(iter(model(**inputs).keys()))
        program = torch.export.export(_Inputs(model, list(inputs)), example, dynamic_shapes=(free,), strict=False)
        decoder = TorchFXPythonDecoder.from_exported_program(program)
        converted = openvino.convert_model(decoder, extension=_extensions())
    for port, name in zip(converted.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
    converted.output(0).get_tensor().set_names({output})
    _name_by_module(converted, decoder.pt_module.graph)
    return converted


def to_int8(converted: Any, batches: Sequence[Mapping[str, Tensor]], *, smooth_quant: bool = False) -> Any:
    """NNCF's post-training quantization of a model from ``to_openvino``, calibrated on the batches."""
    _, nncf = require()
    data = [{name: tensor.numpy() for name, tensor in inputs_of(batch).items()} for batch in batches]
    off = None if smooth_quant else nncf.AdvancedSmoothQuantParameters(matmul=-1, convolution=-1)
    advanced = nncf.AdvancedQuantizationParameters(**({} if off is None else {"smooth_quant_alphas": off}))
    with _quiet(), kept_signal_stack():
        return nncf.quantize(
            converted,
            nncf.Dataset(data),
            subset_size=len(data),
            model_type=nncf.ModelType.TRANSFORMER,
            advanced_parameters=advanced,
        )


def _check(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}: a transformers PreTrainedModel is needed")
    for name, p in model.named_parameters():
        if p.device.type != "cpu" or p.dtype != torch.float32:
            raise ValueError(f"model: {name} is {p.dtype} on {p.device}; export model.float().cpu()")
        if not p.isfinite().all():
            raise ValueError(f"model: {name} holds NaN or infinite values; such a model cannot be quantized")
    if model.main_input_name not in batch:
        raise ValueError(
            f"calibration_batches hold {sorted(batch)}, but {type(model).__name__} takes {model.main_input_name!r}: "
            "data of another kind than the model's?"
        )
    ids = batch.get("input_ids")
    if ids is not None and ids.shape[1:] == (1,):
        raise ValueError(
            "calibration_batches begin with sequences of one token, by which torch.export would fix the length to 1: "
            "put longer ones first"
        )


def _is_tokens(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point()


@contextmanager
def _ready(model: PreTrainedModel) -> Iterator[None]:
    """The model in eval mode and without a cache of keys and values, which is no output of the export."""
    caches = getattr(model.config, "use_cache", False)
    if caches:
        model.config.use_cache = False
    try:
        with evaluating(model):
            yield
    finally:
        if caches:
            model.config.use_cache = True


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes and warnings of OpenVINO and NNCF; a progress bar is drawn on a terminal only."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        # OpenVINO logs to the root logger, which would give itself a handler for good where it has none
        silence = logging.NullHandler()
        logging.root.addHandler(silence)
        stack.callback(logging.root.removeHandler, silence)
        if not sys.stdout.isatty():
            stack.enter_context(redirect_stdout(io.StringIO()))
        yield


def _extensions() -> list[Any]:
    """γ = −α/T divides by a free length: two operations on sizes that OpenVINO has no rule for."""
    from openvino import opset15  # type: ignore[import-untyped]
    from openvino.frontend.pytorch import ConversionExtension  # type: ignore[import-untyped]

    def as_float(size: Any) -> Any:
        return opset15.convert(size, "f32")

    return [
        ConversionExtension(str(torch.sym_float), lambda c: as_float(c.get_input(0)).outputs()),
        ConversionExtension(
            str(operator.truediv),
            lambda c: opset15.divide(as_float(c.get_input(0)), as_float(c.get_input(1))).outputs(),
        ),
    ]


def _name_by_module(converted: Any, graph: torch.fx.Graph) -> None:
    paths = {}
    for node in graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:  # the model itself has the path "model", its modules "model.…"
            paths[node.name] = stack[-1][0].removeprefix("model.")
    for op in converted.get_ordered_ops():
        node = op.get_friendly_name().partition("/")[0]
        if node in paths:
            op.set_friendly_name(f"{paths[node]}/{op.get_friendly_name()}")
