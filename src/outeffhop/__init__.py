"""Transformers free of activation outliers: the Outlier-Efficient Modern Hopfield Model.

Importing this package costs next to nothing: each name is loaded when it is first used. As soon as transformers is
imported, before or after this package, its models accept the methods as attention implementations::

    AutoModelForMaskedLM.from_config(config, attn_implementation="outeffhop")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lazy_loader
import wrapt

if TYPE_CHECKING:
    from outeffhop import functional, lab, memory, methods, metrics, models, nn, ops, outliers, quantization
    from outeffhop.functional import softmax1, softmax_n
    from outeffhop.lab.diagnosis import diagnose
    from outeffhop.lab.mending import mend
    from outeffhop.memory import HopfieldMemory
    from outeffhop.methods import Method
    from outeffhop.models import SinkSchedule, convert, from_config, model_summary
    from outeffhop.nn import OutEffHop, OutEffHopLayer, OutEffHopPooling
    from outeffhop.ops import attention, attention_varlen, explain

__version__ = "0.2.0"

__all__ = [
    "attention",
    "attention_varlen",
    "explain",
    "softmax_n",
    "softmax1",
    "Method",
    "convert",
    "from_config",
    "SinkSchedule",
    "diagnose",
    "mend",
    "model_summary",
    "HopfieldMemory",
    "OutEffHop",
    "OutEffHopPooling",
    "OutEffHopLayer",
    "functional",
    "methods",
    "ops",
    "memory",
    "nn",
    "models",
    "metrics",
    "outliers",
    "quantization",
    "lab",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    ["functional", "methods", "ops", "memory", "nn", "models", "metrics", "outliers", "quantization", "lab"],
    {
        "functional": ["softmax_n", "softmax1"],
        "methods": ["Method"],
        "ops": ["attention", "attention_varlen", "explain"],
        "memory": ["HopfieldMemory"],
        "nn": ["OutEffHop", "OutEffHopPooling", "OutEffHopLayer"],
        "lab.diagnosis": ["diagnose"],
        "lab.mending": ["mend"],
        "models": ["convert", "from_config", "SinkSchedule", "model_summary"],
    },
)


@wrapt.when_imported("transformers.modeling_utils")
def _register(_: Any) -> None:
    """Makes the methods known to transformers, immediately if it is already loaded."""
    from outeffhop.models.registration import register

    register()


@wrapt.when_imported("transformers.models.auto.modeling_auto")
def _register_stanhop(_: Any) -> None:
    """Makes STanHop-Net known to transformers' auto classes."""
    import outeffhop.models.stanhop  # noqa: F401
