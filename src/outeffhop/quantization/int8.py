"""Real integer execution on CPU: a model and its int8 form as a folder that OpenVINO runs.

    exported = export_int8(model, calibration_batches, "runs/bert-int8")
    logits = exported.run(batch)

    exported = Int8Model("runs/bert-int8")   # another day, without PyTorch's model
    report = measure_int8(model, exported, batches)

The folder holds ``fp32.xml``, ``int8.xml`` with their weights, and ``about.json``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from outeffhop._io import check_folder, read_json, whole_folder, write_json
from outeffhop.metrics import Batch, task_or_embedding
from outeffhop.models.summary import model_summary
from outeffhop.quantization.int8_export import inputs_of, require, to_int8, to_openvino
from outeffhop.quantization.int8_graph import Operation, operations, placement
from outeffhop.quantization.signal_stack import kept_signal_stack

__all__ = ["export_int8", "Int8Model", "PRECISIONS"]

PRECISIONS = ("fp32", "int8")
_ABOUT = "about.json"
_FORMAT = "outeffhop.int8.1"


def export_int8(
    model: PreTrainedModel,
    calibration_batches: Iterable[Batch],
    path: str | os.PathLike[str],
    *,
    smooth_quant: bool = False,
    subset: int | None = None,
    threads: int | None = None,
) -> Int8Model:
    """Exports a model with any method to OpenVINO, in fp32 and quantized by NNCF to int8.

    Batch size stays free, and of token sequences the length.

    Args:
        model: a transformers model or STanHop-Net in fp32 on CPU; it is left as it was.
        calibration_batches: inputs as the model takes them; targets are ignored.
        path: the folder to be written; it appears whole or not at all, and none is overwritten.
        smooth_quant: move outliers from activations into weights first. NNCF's own default for
            transformers; off here, since it would hide what the method is measured for.
        subset: how many of the batches to take; all if None.
        threads: of the model returned, as of ``Int8Model``.
    """
    require()
    target = Path(path)
    if target.exists():
        raise ValueError(f"path={str(target)!r} exists and is not overwritten: remove it or give another")
    check_folder(target, "path")
    if subset is not None and subset < 1:
        raise ValueError(f"subset={subset}: at least one calibration batch is needed")
    batches = list(islice(calibration_batches, subset))
    if not batches:
        raise ValueError("calibration_batches is empty: ranges need data")
    threads = _checked_threads(threads)
    _check_alike(batches)
    converted = to_openvino(model, batches[0])
    quantized = to_int8(converted, batches, smooth_quant=smooth_quant)
    about = {
        "format": _FORMAT,
        "model": type(model).__name__,
        "method": model_summary(model).method,
        "task": task_or_embedding(model),
        "inputs": list(inputs_of(batches[0])),
        "output": converted.output(0).get_any_name(),
        "smooth_quant": smooth_quant,
        "calibration_batches": len(batches),
        "placement": placement(quantized, smooth_quant=smooth_quant),
        "versions": {name: version(name) for name in ("torch", "transformers", "openvino", "nncf")},
    }
    _write(target, {"fp32": converted, "int8": quantized}, about)
    return Int8Model(target, threads=threads)


class Int8Model:
    """An exported model, run by OpenVINO on this machine's CPU.

    Attributes:
        path: its folder.
        about: what ``about.json`` says: model, method, placement of the quantizers, versions.
        threads: the CPU threads it takes.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        """Loads a folder that ``export_int8`` wrote.

        Args:
            threads: by default as many as PyTorch takes.
        """
        self.path = Path(path)
        self.about = _read_about(self.path)
        self.threads = _checked_threads(threads)
        self._compiled: dict[str, Any] = {}

    def run(self, batch: Batch, precision: str = "int8") -> Tensor:
        """The model's output (logits, prediction or last hidden state) for a batch; targets are ignored.

        Args:
            precision: "int8", or "fp32" for the export before quantization.
        """
        given = inputs_of(batch)
        missing = [name for name in self.about["inputs"] if name not in given]
        if missing:
            raise ValueError(f"batch has {sorted(batch)}, but this export takes {self.about['inputs']}")
        inputs = {name: given[name].detach().cpu().numpy() for name in self.about["inputs"]}
        return torch.from_numpy(self.compiled(precision)(inputs)[0])

    def as_module(self, precision: str = "int8") -> nn.Module:
        """The export in a PyTorch model's place: ``module(**batch)`` gives the output and, with targets, the loss."""
        return _Module(self, precision)

    def operations(self, precision: str = "int8") -> list[Operation]:
        """What OpenVINO computes and in which arithmetic, read from the graph that runs."""
        return operations(self.compiled(precision))

    def size(self, precision: str = "int8") -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path.glob(f"{precision}.*"))

    def compiled(self, precision: str = "int8") -> Any:
        """The ``openvino.CompiledModel``."""
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r} is unknown; there are: {', '.join(PRECISIONS)}")
        if precision not in self._compiled:
            openvino, _ = require()
            settings = {
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": self.threads,
                "INFERENCE_PRECISION_HINT": "f32",  # or newer CPUs would take bf16 for what is not int8
            }
            with kept_signal_stack():
                try:
                    self._compiled[precision] = openvino.compile_model(self.path / f"{precision}.xml", "CPU", settings)
                except RuntimeError as error:
                    raise ValueError(
                        f"{precision}.xml and {precision}.bin in {str(self.path)!r} cannot be loaded, being missing, "
                        f"damaged or of another OpenVINO: {str(error).strip().splitlines()[-1]}"
                    ) from error
        return self._compiled[precision]


def _checked_threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: at least 1 is needed")
    return torch.get_num_threads() if threads is None else threads


def _check_alike(batches: list[Batch]) -> None:
    names = set(inputs_of(batches[0]))
    for i, batch in enumerate(batches):
        if set(inputs_of(batch)) != names:
            raise ValueError(
                f"calibration_batches[{i}] has {sorted(inputs_of(batch))}, the first {sorted(names)}: "
                "all need the same inputs"
            )


class _Module(nn.Module):
    def __init__(self, exported: Int8Model, precision: str) -> None:
        super().__init__()
        self.exported = exported
        self.precision = precision

    def forward(self, **batch: Tensor) -> ModelOutput:
        output = self.exported.run(batch, self.precision)
        about = self.exported.about
        return ModelOutput(loss=_loss(about["task"], output, batch), **{about["output"]: output})


def _loss(task: str, output: Tensor, batch: Batch) -> Tensor | None:
    """As the models themselves compute it."""
    if task == "forecasting" and "future_values" in batch:
        return mse_loss(output, batch["future_values"])
    if task not in ("mlm", "clm", "classification") or "labels" not in batch:
        return None
    labels = batch["labels"]
    if task == "clm":
        output, labels = output[:, :-1], labels[:, 1:]
    return cross_entropy(output.flatten(0, -2), labels.flatten())


def _write(target: Path, models: dict[str, Any], about: dict[str, Any]) -> None:
    openvino, _ = require()
    with whole_folder(target) as side:
        for name, converted in models.items():
            openvino.save_model(converted, side / f"{name}.xml", compress_to_fp16=False)
        write_json(side / _ABOUT, about)


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = read_json(path / _ABOUT)
        if about["format"] != _FORMAT:
            raise ValueError(f"its format is {about['format']!r}, not {_FORMAT!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"path={str(path)!r} holds no export of export_int8: {error}") from error
    return about  # type: ignore[no-any-return]
