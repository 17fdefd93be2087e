"""The process that runs OpenVINO and NNCF, so that the user's process imports neither.

``python -m outeffhop.quantization.int8_worker`` reads requests from standard input and writes answers to standard
output; ``int8_process.Worker`` is the other end. It ends when standard input does, so it never outlives the process
that started it.

It starts fast because it imports nothing heavy. Only an export needs torch and NNCF; running a model needs only
OpenVINO.
"""

# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import logging
import math
import operator
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from outeffhop.quantization.int8_messages import read_message, write_message

__all__ = ["export", "run", "seconds", "graph", "cpu", "main"]

Inputs = dict[str, Any]  # name → numpy array
Info = dict[str, Any]
Request = list[Any]  # a command and its arguments


def export(program: str, calibration: list[Inputs], output: str, folder: str, smooth_quant: bool) -> Info:
    """Converts a saved torch.export program, quantizes it, and writes ``fp32.xml`` and ``int8.xml`` with their weights.

    Args:
        program: the file.
        calibration: the inputs in the order of the program's.
        output: the name of the program's output.
        folder: where to write.
        smooth_quant: let NNCF move outliers from activations into weights first.

    Returns:
        What ``int8_graph.placement`` puts into words.
    """
    import openvino

    converted = _to_openvino(program, list(calibration[0]), output)
    openvino.save_model(converted, Path(folder, "fp32.xml"), compress_to_fp16=False)
    quantized = _to_int8(converted, calibration, smooth_quant)
    openvino.save_model(quantized, Path(folder, "int8.xml"), compress_to_fp16=False)
    return _quantizers(quantized)


def _to_openvino(program: str, inputs: list[str], output: str) -> Any:
    """The program as an ``openvino.Model`` in fp32.

    Operations keep the name of the module they come from: ``bert.encoder.layer.0.output.dense/linear_5/aten.linear…``.
    """
    import openvino
    import torch
    from openvino.frontend.pytorch.fx_decoder import TorchFXPythonDecoder

    decoder = TorchFXPythonDecoder.from_exported_program(torch.export.load(program))
    converted = openvino.convert_model(decoder, extension=_extensions())
    for port, name in zip(converted.inputs, inputs, strict=True):
        port.get_tensor().set_names({name})
    converted.output(0).get_tensor().set_names({output})
    paths = {}
    for node in decoder.pt_module.graph.nodes:
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        if stack:  # the path of the model itself is "model", of its modules "model.…"
            paths[node.name] = stack[-1][0].removeprefix("model.")
    for op in converted.get_ordered_ops():
        name = op.get_friendly_name()
        node_name = name.partition("/")[0]
        if node_name in paths:
            op.set_friendly_name(f"{paths[node_name]}/{name}")
    return converted


def _extensions() -> list[Any]:
    """γ = −α/T divides by a free length: two operations on sizes that OpenVINO cannot convert by itself."""
    import torch
    from openvino import opset15
    from openvino.frontend.pytorch import ConversionExtension

    def as_float(size: Any) -> Any:
        return opset15.convert(size, "f32")

    return [
        ConversionExtension(str(torch.sym_float), lambda c: as_float(c.get_input(0)).outputs()),
        ConversionExtension(
            str(operator.truediv),
            lambda c: opset15.divide(as_float(c.get_input(0)), as_float(c.get_input(1))).outputs(),
        ),
    ]


def _to_int8(converted: Any, calibration: list[Inputs], smooth_quant: bool) -> Any:
    import nncf

    advanced = nncf.AdvancedQuantizationParameters()
    if not smooth_quant:
        advanced.smooth_quant_alphas = nncf.AdvancedSmoothQuantParameters(matmul=-1, convolution=-1)
    return nncf.quantize(
        converted,
        nncf.Dataset(calibration),
        subset_size=len(calibration),
        model_type=nncf.ModelType.TRANSFORMER,
        advanced_parameters=advanced,
    )


def _quantizers(quantized: Any) -> Info:
    """For each activation, the operation before its quantizer and the number of scales; for each weight, the number."""
    activations: list[tuple[str, int]] = []
    weights: list[int] = []
    for node in quantized.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "FakeQuantize":
            activations.append((node.input_value(0).get_node().get_type_name(), _size(node.input_value(1))))
        elif kind == "Constant" and node.get_element_type().get_type_name() in ("i8", "u8"):
            scale = _scale(node)
            if scale is not None:
                weights.append(_size(scale))
    return {"activations": activations, "weights": weights}


def _scale(constant: Any) -> Any:
    """The scale in integers → Convert → (Subtract →) Multiply by it; None for other constants."""
    node = constant
    for _ in range(3):
        users = [port.get_node() for port in node.output(0).get_target_inputs()]
        if not users or users[0].get_type_name() not in ("Convert", "Subtract", "Multiply"):
            return None
        node = users[0]
        if node.get_type_name() == "Multiply":
            return node.input_value(1)
    return None


def _size(output: Any) -> int:
    return math.prod(output.get_shape())


def run(folder: str, precision: str, threads: int, inputs: Inputs) -> Any:
    """The output of an exported model, a numpy array."""
    return _compiled(folder, precision, threads)(inputs)[0]


def seconds(folder: str, precision: str, threads: int, inputs: Inputs) -> float:
    """How long one run takes, not counting the transfer of inputs and outputs between processes."""
    model = _compiled(folder, precision, threads)
    start = time.perf_counter()
    model(inputs)
    return time.perf_counter() - start


def graph(folder: str, precision: str, threads: int) -> list[Info]:
    """What OpenVINO reports about each node of the graph that runs, in order, and about the sources of its inputs."""
    nodes = _compiled(folder, precision, threads).get_runtime_model().get_ordered_ops()
    return [
        {**_info(node), "sources": [_info(port.get_source_output().get_node()) for port in node.inputs()]}
        for node in nodes
    ]


def _info(node: Any) -> Info:
    notes = node.get_rt_info()
    fields = ("layerType", "originalLayersNames", "runtimePrecision", "outputPrecisions")
    return {field: str(notes[field].astype(str)) for field in fields}


def cpu() -> str:
    import openvino

    return str(openvino.Core().get_property("CPU", "FULL_DEVICE_NAME"))


@cache
def _compiled(folder: str, precision: str, threads: int) -> Any:
    import openvino

    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",  # newer CPUs would use bf16 for whatever is not int8
    }
    try:
        return openvino.compile_model(Path(folder, f"{precision}.xml"), "CPU", settings)
    except RuntimeError as error:
        raise ValueError(
            f"{precision}.xml and {precision}.bin in {folder!r} cannot be loaded: they are missing, damaged, or "
            f"from another version of OpenVINO ({str(error).strip().splitlines()[-1]})"
        ) from error


_COMMANDS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (export, run, seconds, graph, cpu)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    _quiet()
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        command, arguments = requests.get()
        answer: tuple[str | None, Any]  # the kind of an error, and what it says; or None and what was asked for
        try:
            answer = None, _COMMANDS[command](**arguments)
        except ValueError as error:
            answer = "ValueError", _one_line(error)
        except Exception as error:
            answer = "RuntimeError", f"{type(error).__name__}: {_one_line(error)}"
        with suppress(BrokenPipeError):  # no one reads it: _listen is about to end this process
            write_message(answers, answer)


def _listen(pipe: IO[bytes], requests: SimpleQueue[Request]) -> None:
    """Passes on requests, and ends the process with the pipe, whatever the main thread is doing."""
    try:
        while True:
            requests.put(read_message(pipe))
    finally:
        os._exit(0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _quiet() -> None:
    """Turns off notes, warnings and telemetry. On a terminal, NNCF's progress bars go to stderr."""
    # fd 1 carries answers; what libraries print must not mix with them
    os.dup2(2 if os.isatty(2) else os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    # OpenVINO and NNCF report their use over the network if they can import this package
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]


if __name__ == "__main__":
    main()
