"""What int8 costs: simulated quantization, checkpoints to deploy, and real int8 execution by OpenVINO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.quantization.deploy import save_compressed
    from outeffhop.quantization.evaluation import evaluate
    from outeffhop.quantization.fold import fold_layernorm
    from outeffhop.quantization.int8 import Int8Model, export_int8
    from outeffhop.quantization.int8_report import Int8Report, measure_int8
    from outeffhop.quantization.placement_map import quantization_map
    from outeffhop.quantization.quantization_report import QuantizationReport
    from outeffhop.quantization.schemes import SCHEMES, Scheme
    from outeffhop.quantization.simulation import Calibration, freeze, simulate

__all__ = [
    "simulate",
    "Calibration",
    "freeze",
    "quantization_map",
    "evaluate",
    "QuantizationReport",
    "Scheme",
    "SCHEMES",
    "fold_layernorm",
    "save_compressed",
    "export_int8",
    "Int8Model",
    "measure_int8",
    "Int8Report",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "deploy": ["save_compressed"],
        "evaluation": ["evaluate"],
        "fold": ["fold_layernorm"],
        "int8": ["Int8Model", "export_int8"],
        "int8_report": ["Int8Report", "measure_int8"],
        "placement_map": ["quantization_map"],
        "quantization_report": ["QuantizationReport"],
        "schemes": ["SCHEMES", "Scheme"],
        "simulation": ["Calibration", "freeze", "simulate"],
    },
)
