"""Real integer execution on CPU: a model and its int8 form as a folder that OpenVINO runs.

    exported = export_int8(model, calibration_batches, "runs/bert-int8")
    logits = exported.run(batch)

    with Int8Model("runs/bert-int8") as exported:  # another day, without the PyTorch model
        logits = exported.run(batch)

The folder holds ``fp32.xml``, ``int8.xml`` with their weights, and ``about.json``. OpenVINO and NNCF run in their
own process (``int8_process.py``); this one imports neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from outeffhop._io import check_folder, read_json, whole_folder, write_json
from outeffhop._naming import known
from outeffhop.metrics import Batch, task_of
from outeffhop.models.summary import model_summary
from outeffhop.quantization.int8_export import check_model, inputs_of, save_program
from outeffhop.quantization.int8_graph import Operation, operations, placement
from outeffhop.quantization.int8_process import Worker, check_installed

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
    threads: int | None = None,
) -> Int8Model:
    """Exports a model with any method to OpenVINO, in fp32 and quantized by NNCF to int8.

    Batch size stays free, and so does the length of token sequences.

    Args:
        model: a transformers model or STanHop-Net in fp32 on CPU; it is left as it was.
        calibration_batches: inputs as the model takes them; targets are ignored.
        path: the folder to write; it appears whole or not at all, and must not exist.
        smooth_quant: move outliers from activations into weights first. This is NNCF's default for transformers; it is
            off here, because it would hide the effect of the method.
        threads: the CPU threads of the returned ``Int8Model``.
    """
    check_installed("openvino", "nncf")
    target = Path(path)
    if target.exists():
        raise ValueError(f"path={str(target)!r} exists and is not overwritten: remove it or give another path")
    check_folder(target, "path")
    batches = list(calibration_batches)
    if not batches:
        raise ValueError("calibration_batches is empty: ranges need data")
    threads = _checked_threads(threads)
    calibration = _calibration(batches)
    check_model(model, batches[0])
    with whole_folder(target) as side:
        output, where = _convert(model, batches[0], calibration, side, smooth_quant)
        about = {
            "format": _FORMAT,
            "model": type(model).__name__,
            "method": model_summary(model).method,
            "task": task_of(model),
            "inputs": list(calibration[0]),
            "output": output,
            "smooth_quant": smooth_quant,
            "calibration_batches": len(batches),
            "placement": where,
            "versions": {name: version(name) for name in ("torch", "transformers", "openvino", "nncf")},
        }
        write_json(side / _ABOUT, about)
    return Int8Model(target, threads=threads)


def _convert(
    model: PreTrainedModel, batch: Batch, calibration: list[dict[str, Any]], folder: Path, smooth_quant: bool
) -> tuple[str, str]:
    """Writes the model in fp32 and int8; returns the name of its output, and where the quantizers are, in words."""
    program = folder / "program.pt2"
    output = save_program(model, batch, program)
    with closing(Worker()) as worker:
        quantizers = worker.ask(
            "export",
            program=str(program),
            calibration=calibration,
            output=output,
            folder=str(folder),
            smooth_quant=smooth_quant,
        )
    program.unlink()
    return output, placement(quantizers, smooth_quant=smooth_quant)


def _calibration(batches: list[Batch]) -> list[dict[str, Any]]:
    """The batches' inputs as arrays, by name, all in the order of the first batch."""
    names = list(inputs_of(batches[0]))
    found = []
    for i, batch in enumerate(batches):
        inputs = inputs_of(batch)
        if set(inputs) != set(names):
            raise ValueError(
                f"calibration_batches[{i}] has {sorted(inputs)}, the first {sorted(names)}: all need the same inputs"
            )
        found.append(_arrays(inputs, names))
    return found


def _arrays(inputs: Batch, names: list[str]) -> dict[str, Any]:
    return {name: inputs[name].detach().cpu().numpy() for name in names}


class Int8Model:
    """An exported model, run by OpenVINO on this machine's CPU.

    OpenVINO runs in a process that starts when it is first needed. ``close`` ends it, as does the end of a ``with``
    block, of this object or of the program.

    Attributes:
        path: its folder.
        about: what ``about.json`` says: model, method, placement of the quantizers, versions.
        threads: the CPU threads it uses.
    """

    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        """Loads a folder that ``export_int8`` wrote.

        Args:
            threads: by default as many as PyTorch uses.
        """
        self.path = Path(path).absolute()
        self.about = _read_about(self.path)
        self.threads = _checked_threads(threads)
        self._worker: Worker | None = None

    def run(self, batch: Batch, precision: str = "int8") -> Tensor:
        """The model's output (logits, prediction or last hidden state) for a batch; targets are ignored.

        Args:
            precision: "int8", or "fp32" for the export before quantization.
        """
        return torch.from_numpy(self._ask("run", precision, inputs=self._inputs(batch)))

    def seconds(self, batch: Batch, precision: str = "int8") -> float:
        """How long OpenVINO takes for a batch, not counting its transfer between processes."""
        return float(self._ask("seconds", precision, inputs=self._inputs(batch)))

    def as_module(self, precision: str = "int8") -> nn.Module:
        """The export in a PyTorch model's place: ``module(**batch)`` gives the output and, with targets, the loss."""
        return _Module(self, precision)

    def operations(self, precision: str = "int8") -> list[Operation]:
        """What OpenVINO computes and in which arithmetic, read from the graph that runs."""
        return operations(self._ask("graph", precision))

    def size(self, precision: str = "int8") -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path.glob(f"{precision}.*"))

    def cpu(self) -> str:
        """The processor, as OpenVINO names it."""
        return str(self._running().ask("cpu"))

    def close(self) -> None:
        """Ends OpenVINO's process; the next run starts another."""
        if self._worker is not None:
            self._worker.close()

    def __enter__(self) -> Int8Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        given, names = inputs_of(batch), self.about["inputs"]
        if not set(names) <= given.keys():
            raise ValueError(f"batch has {sorted(batch)}, but this export takes {names}")
        return _arrays(given, names)

    def _ask(self, command: str, precision: str, **arguments: Any) -> Any:
        known("precision", precision, PRECISIONS)
        return self._running().ask(
            command, folder=str(self.path), precision=precision, threads=self.threads, **arguments
        )

    def _running(self) -> Worker:
        if self._worker is None or not self._worker.is_open:
            check_installed("openvino")
            self._worker = Worker()
        return self._worker


def _checked_threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: must be at least 1")
    return torch.get_num_threads() if threads is None else threads


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
    """The loss as the models compute it."""
    if task == "forecasting" and "future_values" in batch:
        return mse_loss(output, batch["future_values"])
    if task not in ("mlm", "clm", "classification") or "labels" not in batch:
        return None
    labels = batch["labels"]
    if task == "clm":
        output, labels = output[:, :-1], labels[:, 1:]
    return cross_entropy(output.flatten(0, -2), labels.flatten())


def _read_about(path: Path) -> dict[str, Any]:
    try:
        about = read_json(path / _ABOUT)
        if about["format"] != _FORMAT:
            raise ValueError(f"its format is {about['format']!r}, not {_FORMAT!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"path={str(path)!r} is not an export written by export_int8: {error}") from error
    return about  # type: ignore[no-any-return]
