"""What an int8 model really computes in integers: where NNCF put its quantizers, and what OpenVINO then runs.

Two readings, since they differ: a quantizer before an operation does not yet mean that the CPU has an
integer kernel for it, and fused operations may take some inputs as integers and others not.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

__all__ = ["Operation", "operations", "placement"]

_PRODUCTS = ("FullyConnected", "MatMul", "Convolution", "ScaledDotProductAttention")
_FUSED = "Subgraph"  # OpenVINO compiles several operations as one
# Tensors moved, reshaped or recoded, and nothing computed
_MOVING = (
    "Broadcast",
    "Concatenation",
    "Const",
    "Convert",
    "FakeQuantize",
    "Gather",
    "Input",
    "Output",
    "Pad",
    "Range",
    "Reorder",
    "Reshape",
    "ShapeOf",
    "Split",
    "StridedSlice",
    "Tile",
    "Transpose",
)
_INTEGERS = ("i8", "u8")
_FLOATS = ("f32", "f16", "bf16")
_MODULE = re.compile(r"([^/]+)/[^/]+/aten\.")  # as to_openvino names operations


@dataclass(frozen=True)
class Operation:
    """One operation of a compiled model that computes with activations.

    Attributes:
        kind: OpenVINO's name of it: FullyConnected is a Linear layer, MVN a LayerNorm; "Attention" is
            scaled dot product attention compiled as one.
        module: the module it comes from, or that of an operation fused into it (of OPT's q_proj the scaling,
            which is self_attn's), whichever name OpenVINO kept; "" where it kept none.
        inputs: the precision of each input, constants left out.
        output: the precision of its output.
        arithmetic: "int8"; "mixed" where some inputs are 8-bit integers and others not; or "float".
    """

    kind: str
    module: str
    inputs: tuple[str, ...]
    output: str
    arithmetic: str


def operations(compiled: Any) -> list[Operation]:
    """The operations of a compiled OpenVINO model in order, without those that only move tensors or compute sizes."""
    found = (_operation(node) for node in compiled.get_runtime_model().get_ordered_ops())
    return [operation for operation in found if operation is not None]


def _operation(node: Any) -> Operation | None:
    kind, names = _info(node, "layerType"), _info(node, "originalLayersNames").split(",")
    if kind in _MOVING:
        return None
    sources = [port.get_source_output().get_node() for port in node.inputs()]
    inputs = tuple(_precision(s) for s in sources if _info(s, "layerType") != "Const")
    precision = _info(node, "runtimePrecision")
    if kind == _FUSED and any("ScaledDotProductAttention" in name for name in names):
        kind = "Attention"
    if kind in _PRODUCTS and precision in _INTEGERS:
        arithmetic = "int8"
    elif kind == "Attention" and set(inputs[:2]) <= set(_INTEGERS):
        arithmetic = "mixed"  # query · key in integers, softmax not; further inputs are value and masks
    elif precision in _FLOATS or kind in (*_PRODUCTS, _FUSED):
        arithmetic = "float"
    else:
        return None  # positions and masks
    # a scale or bias that was fused may stand first, but the product gives the name
    ordered = sorted(names, key=lambda name: "MatMul" not in name)
    modules = [match[1] for match in map(_MODULE.match, ordered) if match]
    return Operation(kind, modules[0] if modules else "", inputs, _precision(node), arithmetic)


def _precision(node: Any) -> str:
    return _info(node, "outputPrecisions").split(",")[0]


def _info(node: Any, field: str) -> str:
    return str(node.get_rt_info()[field].astype(str))


def placement(quantized: Any, *, smooth_quant: bool) -> str:
    """Where a model from NNCF has its quantizers, in words."""
    activations: Counter[str] = Counter()
    steps: list[int] = []
    weights: list[int] = []
    for node in quantized.get_ordered_ops():
        kind = node.get_type_name()
        if kind == "FakeQuantize":
            activations[node.input_value(0).get_node().get_type_name()] += 1
            steps.append(_size(node.input_value(1)))
        elif kind == "Constant" and node.get_element_type().get_type_name() in _INTEGERS:
            scale = _scale(node)
            if scale is not None:
                weights.append(_size(scale))
    after = ", ".join(f"{kind} ×{n}" for kind, n in activations.most_common())
    return (
        f"NNCF, SmoothQuant {'on' if smooth_quant else 'off'}: "
        f"8-bit activations {_scales(steps)}, after {after}; 8-bit weights {_scales(weights)}"
    )


def _scales(sizes: list[int]) -> str:
    whole = sum(size == 1 for size in sizes)
    counts = {"per tensor": whole, "per channel": len(sizes) - whole}
    return " and ".join(f"{n} {grain}" for grain, n in counts.items() if n) or "none"


def _scale(constant: Any) -> Any:
    """Of integers → Convert → (Subtract →) Multiply, the second input of the last; None of other constants."""
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
