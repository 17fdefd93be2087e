"""What an int8 model really computes in integers: where NNCF put its quantizers, and what OpenVINO then runs.

The two differ: a quantizer before an operation does not mean that the CPU has an integer kernel for it, and fused
operations may take some inputs as integers and others not.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

__all__ = ["Operation", "operations", "placement"]

Info = dict[str, Any]

_PRODUCTS = ("FullyConnected", "MatMul", "Convolution", "ScaledDotProductAttention")
_FUSED = "Subgraph"  # OpenVINO compiles several operations as one
# These move, reshape or recode tensors and compute nothing
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
_MODULE = re.compile(r"([^/]+)/[^/]+/aten\.")  # as int8_worker names operations


@dataclass(frozen=True)
class Operation:
    """One operation of a compiled model that computes with activations.

    Attributes:
        kind: OpenVINO's name for it: FullyConnected is a Linear layer, MVN a LayerNorm; "Attention" is
            scaled dot product attention compiled as one operation.
        module: the module it comes from, or that of an operation fused into it (for OPT's q_proj it may be self_attn,
            which scales the queries), whichever name OpenVINO kept; "" if it kept none.
        inputs: the precision of each input except constants.
        output: the precision of its output.
        arithmetic: "int8"; "mixed" if some inputs are 8-bit integers and others not; or "float".
    """

    kind: str
    module: str
    inputs: tuple[str, ...]
    output: str
    arithmetic: str


def operations(graph: list[Info]) -> list[Operation]:
    """The operations of a compiled graph in order, without those that only move tensors or compute sizes.

    Args:
        graph: what ``int8_worker.graph`` returns.
    """
    return [operation for operation in map(_operation, graph) if operation is not None]


def _operation(node: Info) -> Operation | None:
    kind, names, precision = node["layerType"], node["originalLayersNames"].split(","), node["runtimePrecision"]
    if kind in _MOVING:
        return None
    inputs = tuple(_precision(source) for source in node["sources"] if source["layerType"] != "Const")
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
    # a scale or bias that was fused may come first, but the product gives the name
    ordered = sorted(names, key=lambda name: "MatMul" not in name)
    modules = [match[1] for match in map(_MODULE.match, ordered) if match]
    return Operation(kind, modules[0] if modules else "", inputs, _precision(node), arithmetic)


def _precision(node: Info) -> str:
    return str(node["outputPrecisions"].split(",")[0])


def placement(quantizers: Info, *, smooth_quant: bool) -> str:
    """Where NNCF put its quantizers, in words.

    Args:
        quantizers: what ``int8_worker.export`` returns.
    """
    activations, weights = quantizers["activations"], quantizers["weights"]
    after = ", ".join(f"{kind} ×{n}" for kind, n in Counter(kind for kind, _ in activations).most_common())
    return (
        f"NNCF, SmoothQuant {'on' if smooth_quant else 'off'}: "
        f"8-bit activations {_scales([size for _, size in activations])}, after {after}; "
        f"8-bit weights {_scales(weights)}"
    )


def _scales(sizes: list[int]) -> str:
    whole = sum(size == 1 for size in sizes)
    counts = {"per tensor": whole, "per channel": len(sizes) - whole}
    return " and ".join(f"{n} {grain}" for grain, n in counts.items() if n) or "none"
