"""Real int8 beside the simulated schemes: what OpenVINO's own arithmetic costs the outputs, and how fast it is."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

from outeffhop.lab.diagnosis.comparing import Comparison
from outeffhop.lab.diagnosis.diagnosis_report import REAL, SchemeCost, cost_of
from outeffhop.metrics import Batch
from outeffhop.quantization import export_int8, measure_int8
from outeffhop.quantization.int8_process import check_installed

__all__ = ["check_int8", "no_int8", "real_int8"]

_FOLDER = "int8"
_WORDS = "real int8, as OpenVINO runs it"
_SMALL = 150e6  # parameters, up to which it is run unasked


def check_int8(out: Path | None) -> None:
    """Raises a ValueError if an exported model cannot be written to ``out/int8``, or nothing here can export one."""
    if out is None:
        raise ValueError("int8=True writes the exported model: give a folder by out")
    if (out / _FOLDER).exists():
        raise ValueError(f"{str(out / _FOLDER)!r} exists and is not overwritten: remove it, or give another out")
    try:
        check_installed("openvino", "nncf")
    except ImportError as error:
        raise ValueError(str(error)) from error


def no_int8(model: Any, wanted: bool | None) -> str:
    """Why real int8 is not run, in a sentence; "" if it is.

    Args:
        wanted: as in ``DiagnosisConfig``; None runs it where it is installed, and models that are small.
    """
    if wanted is False:
        return "Real int8 was not run."
    if getattr(model.config, "is_encoder_decoder", False):
        return f"{type(model).__name__} has an encoder and a decoder, which export_int8 does not serve."
    try:
        check_installed("openvino", "nncf")
    except ImportError as error:
        return f"{error}."
    if wanted is None and sum(p.numel() for p in model.parameters()) > _SMALL:
        return f"Real int8 was not run: more than {_SMALL / 1e6:.0f} million parameters. --int8 runs it all the same."
    return ""


def real_int8(
    model: Any, compare: Comparison, calibration: list[Batch], measured: list[Batch], out: Path | None
) -> SchemeCost | str:
    """What real execution costs. With ``out``, the model stays in ``out/int8`` and its report in ``out/int8.json``;
    without, it is a trial, and one that fails gives the reason as text."""
    plain = model
    if model.device.type != "cpu" or model.dtype != torch.float32:
        plain = copy.deepcopy(model).float().cpu()
    if out is not None:
        with export_int8(plain, calibration, out / _FOLDER) as exported:
            report = measure_int8(plain, exported, measured, compare, rounds=3)
        report.save(out / f"{_FOLDER}.json")
        return cost_of(REAL, _WORDS, report.metric["openvino int8"])
    with tempfile.TemporaryDirectory() as folder:
        try:
            with export_int8(plain, calibration, Path(folder) / _FOLDER) as exported:
                return cost_of(REAL, _WORDS, compare(exported.as_module("int8"), measured))
        except Exception as error:  # each architecture has its own way not to be exported
            return f"Real int8 was not run: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
