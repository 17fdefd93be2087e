"""Which layers and tensors Figures 2, 3 and 4 show, and their curves.

Figure 2 is of layer 10 (9 in STanHop-Net), Figure 3 of the FFN outputs of layers 3, 6, 9 and 10, Figure 4 of the
components of layer 10. A model with fewer than the paper's 12 layers is shown at the same depth: in the nearest layer,
but not in its last one, because the paper's are not. Layers are counted from 0, as modules are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from statistics import mean

from outeffhop.lab.paper.experiment import Values
from outeffhop.outliers.outlier_report import place_of
from outeffhop.outliers.tensors import PAPER

__all__ = [
    "COMPONENTS",
    "FFN",
    "FFN_1",
    "FFN_2",
    "FIRST_NORM",
    "component",
    "counted",
    "depth_of",
    "ffn_layers",
    "late",
    "layer_curve",
    "shown_layer",
]

_DEPTH = 12  # layers of the paper's models
_SHOWN = {"stanhop": 9}
_OTHERS_SHOWN = 10
_FFN_LAYERS = (3, 6, 9, 10)
FIRST_NORM, FFN_1, FFN_2 = "first LayerNorm", "first FFN layer", "second FFN layer"
# the components of a layer by the names that its modules have; BERT's are those of the paper
COMPONENTS = {
    "bert": {
        "attention output": "attention.output.dense",
        FIRST_NORM: "attention.output.LayerNorm",
        FFN_1: "intermediate.dense",
        FFN_2: "output.dense",
        "second LayerNorm": "output.LayerNorm",
    },
    "opt": {
        "attention output": "self_attn.out_proj",
        FIRST_NORM: "self_attn_layer_norm",
        FFN_2: "fc2",
        "second LayerNorm": "final_layer_norm",
    },
    "vit": {
        "attention output": "attention.o_proj",
        FIRST_NORM: "layernorm_before",
        FFN_1: "mlp.fc1",
        FFN_2: "mlp.fc2",
        "second LayerNorm": "layernorm_after",
    },
    "stanhop": {
        "attention over time": "sthm.time",
        FIRST_NORM: "sthm.norm_time",
        FFN_1: "sthm.time_mlp.0",
        FFN_2: "sthm.time_mlp.2",
        "second LayerNorm": "sthm.norm_time_mlp",
    },
}
FFN = {model: parts[FFN_2] for model, parts in COMPONENTS.items()}

Norms = list[float]  # the inf norm at each step that was measured


def counted(model: str, tensor: str, kurtosis: bool = False) -> bool:
    """Whether a tensor counts in the paper's maximum infinity norm, or in its average kurtosis."""
    name, _, side = tensor.partition(":")
    return any(
        re.fullmatch(rf"(.*\.)?{rule.pattern}", name) is not None
        for rule in PAPER[model]
        if rule.side == (side or "output") and (rule.kurtosis or not kurtosis)
    )


def depth_of(tensors: Iterable[str]) -> int:
    """The number of layers."""
    return 1 + max((layer for name in tensors if (layer := place_of(name)[1]) is not None), default=0)


def _nearest(layer: int, depth: int) -> int:
    if depth >= _DEPTH:
        return layer
    return max(min(round(layer * (depth - 1) / (_DEPTH - 1)), depth - 2), 0)


def shown_layer(model: str, tensors: Iterable[str]) -> int:
    """The layer of Figures 2 and 4, or the nearest."""
    return _nearest(_SHOWN.get(model, _OTHERS_SHOWN), depth_of(tensors))


def ffn_layers(tensors: Iterable[str]) -> list[int]:
    """The layers of Figure 3, or the nearest."""
    depth = depth_of(tensors)
    return sorted({_nearest(layer, depth) for layer in _FFN_LAYERS})


def layer_curve(model: str, curve: Values, layer: int) -> Norms:
    """The largest norm of a layer's tensors, at each step."""
    tensors = [v for t, v in curve["tensors"].items() if place_of(t)[1] == layer and counted(model, t)]
    return [max(map(float, at)) for at in zip(*tensors, strict=True)]


def component(curve: Values, layer: int, name: str) -> Norms | None:
    """The norm of a component of a layer, at each step; None if it was not recorded."""
    found = (v for t, v in curve["tensors"].items() if place_of(t)[1:] == (layer, name))
    norms = next(found, None)
    return None if norms is None else [float(norm) for norm in norms]


def late(norms: Sequence[float]) -> float:
    """The mean over the second half of training, when outliers have had time to grow."""
    return mean(map(float, norms[len(norms) // 2 :]))
