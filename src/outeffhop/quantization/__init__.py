"""What int8 costs: simulated quantization of weights and activations, its map and its evaluation."""

from outeffhop.quantization.evaluation import evaluate
from outeffhop.quantization.fold import Folding, fold_layernorm
from outeffhop.quantization.observers import Observer
from outeffhop.quantization.placement_map import QuantizationMap, quantization_map
from outeffhop.quantization.quantization_report import QuantizationReport
from outeffhop.quantization.quantizers import Grid, Uniform
from outeffhop.quantization.schemes import SCHEMES, Scheme
from outeffhop.quantization.simulation import Calibration, freeze, measuring, simulate

__all__ = [
    "simulate",
    "Calibration",
    "freeze",
    "quantization_map",
    "QuantizationMap",
    "evaluate",
    "fold_layernorm",
    "Folding",
    "QuantizationReport",
    "measuring",
    "Scheme",
    "SCHEMES",
    "Uniform",
    "Grid",
    "Observer",
]
