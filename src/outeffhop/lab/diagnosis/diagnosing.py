"""The diagnosis of a checkpoint: its outliers, what 8 bits cost it by every scheme, who is to blame, what can be done.

report = outeffhop.diagnose("checkpoint", out="diagnosis")      # the page is diagnosis/diagnosis.html
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from outeffhop._io import check_folder, write_whole
from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.data.samples import random_batches
from outeffhop.lab.data.tokenizer import marking_ids
from outeffhop.lab.diagnosis.advice import advise
from outeffhop.lab.diagnosis.blaming import blame
from outeffhop.lab.diagnosis.comparing import Comparison
from outeffhop.lab.diagnosis.diagnosis_config import DiagnosisConfig
from outeffhop.lab.diagnosis.diagnosis_page import diagnosis_page
from outeffhop.lab.diagnosis.diagnosis_report import Culprits, DiagnosisReport, SchemeCost, cost_of
from outeffhop.lab.diagnosis.fitting import check_runs, prepared_for
from outeffhop.lab.diagnosis.model_inputs import has_two_inputs
from outeffhop.lab.diagnosis.opening import Source, name_of, open_checkpoint, placed
from outeffhop.lab.diagnosis.real_int8 import check_int8, no_int8, real_int8
from outeffhop.metrics import Batch
from outeffhop.models.summary import running_method
from outeffhop.outliers import OutlierReport, measure
from outeffhop.quantization import SCHEMES, Scheme
from outeffhop.quantization.deploy import check_model
from outeffhop.quantization.evaluation import calibrated

__all__ = ["FILE", "OTHER", "PAGE", "diagnose", "run_diagnosis"]

FILE, OTHER, PAGE = "diagnosis.json", "compared.json", "diagnosis.html"
_BLAMED = ("paper", "per-channel")  # whose tensors, or layers, are looked at one by one
_UNCHANGED = "as good as unchanged"
_SHOWN = 20  # worst tensors whose tokens are looked up
Tell = Callable[[str], None]


def diagnose(
    checkpoint: str | os.PathLike[str] | PreTrainedModel,
    data: str | os.PathLike[str] | None = None,
    *,
    compare: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
    progress: Tell | None = None,
    **settings: Any,
) -> DiagnosisReport:
    """Diagnoses a checkpoint: its outliers, what 8 bits cost it by every scheme, who is to blame, what can be done.

    Args:
        checkpoint: a folder, a GGUF file, a model's name on the Hugging Face hub, or a model, which is left as it is.
        data: a folder or file with text or images, ``builtin:text``, or ``hub:NAME``; by default built-in data.
        compare: another checkpoint, or the folder of its diagnosis, for the page to show beside this one.
        out: the folder for ``diagnosis.json`` and ``diagnosis.html``; by default nothing is written.
        tokenizer: of a text model; by default that in the checkpoint's folder. A tokenizer or the folder of one.
        progress: called with a few words at the start of each step.
        settings: the fields of ``DiagnosisConfig``, such as ``task``, ``dtype``, ``batches``, ``length``, ``int8``.
    """
    model = checkpoint if isinstance(checkpoint, PreTrainedModel) else None
    named = tokenizer is None or isinstance(tokenizer, str | os.PathLike)
    config = DiagnosisConfig(
        checkpoint="" if model is not None else os.fspath(checkpoint),  # type: ignore[arg-type]
        data=None if data is None else os.fspath(data),
        tokenizer=os.fspath(tokenizer) if named and tokenizer is not None else None,
        **settings,
    )
    other = None if compare is None else os.fspath(compare)
    given = (model, None if named else tokenizer)
    return run_diagnosis(config, other, out, given=given, progress=progress)[0]


def run_diagnosis(
    config: DiagnosisConfig,
    compare: str | None = None,
    out: str | os.PathLike[str] | None = None,
    *,
    given: tuple[PreTrainedModel | None, Any] = (None, None),
    progress: Tell | None = None,
) -> tuple[DiagnosisReport, DiagnosisReport | None]:
    """Diagnoses as the config says, and the other checkpoint likewise; writes both and their page if ``out`` is given.

    Args:
        given: a model in memory and its tokenizer, instead of the config's checkpoint.
    """
    tell = progress or (lambda _: None)
    folder = None if out is None else Path(out)
    _check(config, folder)
    earlier = None if compare is None else _earlier(compare)
    report = _diagnosed(config, folder, given, tell)
    other = earlier
    if compare is not None and earlier is None:
        again = replace(config, checkpoint=compare, int8=False)
        other = _diagnosed(again, None, (None, None), lambda text: tell(f"{name_of(compare)}: {text}"))
    if folder is not None:
        report.save(folder / FILE)
        if other is not None:
            other.save(folder / OTHER)
        write_whole(folder / PAGE, diagnosis_page(report, other))
    return report, other


def _check(config: DiagnosisConfig, out: Path | None) -> None:
    """What would fail at the end is said first."""
    config.check()
    if out is not None:
        check_folder(out)
    if config.int8:
        check_int8(out)


def _earlier(compare: str) -> DiagnosisReport | None:
    """The diagnosis that lies in a folder or file; None if it is a checkpoint."""
    path = Path(compare)
    file = path / FILE if path.is_dir() else path
    return DiagnosisReport.load(file) if file.suffix == ".json" and file.is_file() else None


def _diagnosed(
    config: DiagnosisConfig, out: Path | None, given: tuple[PreTrainedModel | None, Any], tell: Tell
) -> DiagnosisReport:
    tell("reading the checkpoint and the data")
    model, source, prepared = _opened(config, given)
    unserved = no_int8(model, config.int8)
    if config.int8 and unserved:
        raise ValueError(f"int8: {unserved}")
    begin = time.perf_counter()
    measured: list[Batch] = list(
        batches(prepared.validation, prepared.eval_collate, config.batch_size, limit=config.batches)
    )
    calibration: list[Batch] = list(
        random_batches(prepared.train, prepared.eval_collate, config.batch_size, config.calibration_batches, 0)
    )
    tell("outliers")
    outliers = measure(model, measured, special_ids=marking_ids(prepared.tokenizer))
    tell("floating point")
    compare = Comparison(model, measured, prepared.task)
    costs, culprits = _costs(model, compare, calibration, measured, prepared.task, tell)
    if not unserved:
        tell("real int8 by OpenVINO")
        real = real_int8(model, compare, calibration, measured, out if config.int8 else None)
        costs, unserved = ([*costs, real], "") if isinstance(real, SchemeCost) else (costs, real)
    first = measured[0][model.main_input_name]
    full = {name: value for name, value in compare.full.items() if name not in ("sqnr_db", "loss", "agreement")}
    chosen = replace(config, data=source.data)
    return DiagnosisReport(
        checkpoint=config.checkpoint or type(model).__name__,
        model=type(model).__name__,
        method=running_method(model) or "unknown",
        parameters=sum(p.numel() for p in model.parameters()),
        task=prepared.task,
        data=source.data or str(prepared.about["source"]),
        builtin=source.data is None,
        samples=outliers.samples,
        length=first.shape[1] if first.dim() == 2 else None,
        calibration_samples=sum(len(next(iter(batch.values()))) for batch in calibration),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        seconds=time.perf_counter() - begin,
        full=full,
        outliers=outliers,
        tokens=_tokens(model, outliers, measured, prepared),
        costs=tuple(costs),
        no_int8=unserved,
        culprits=tuple(culprits),
        advice=advise(chosen, costs, culprits, saves=_saves(model), mends=_mends(model)),
    )


def _opened(
    config: DiagnosisConfig, given: tuple[PreTrainedModel | None, Any]
) -> tuple[PreTrainedModel, Source, Prepared]:
    model, tokenizer = given
    if model is None:
        return open_checkpoint(config, builtin=True)
    model = placed(model, config.device or model.device.type)
    if config.dtype is not None:
        raise ValueError(f"dtype={config.dtype!r}: a model in memory has its own; convert it before")
    source = Source("", config.data, {} if config.length is None else {"length": config.length})
    prepared = prepared_for(
        model, "", config.data, source.samples, config.tokenizer if tokenizer is None else tokenizer, config.task
    )
    check_runs(model, "", prepared)
    return model, source, prepared


def _costs(
    model: Any, compare: Comparison, calibration: list[Batch], measured: list[Batch], task: str, tell: Tell
) -> tuple[list[SchemeCost], list[Culprits]]:
    """What each scheme costs, and who is to blame for those that the outputs do not survive unchanged."""
    costs, culprits = [], []
    for name in SCHEMES:
        scheme = Scheme.parse(f"W8A8 {name}")
        tell(f"8 bits: {scheme.what}")
        quantized = calibrated(model, calibration, scheme)
        cost = cost_of(name, scheme.what, compare(quantized, measured))
        costs.append(cost)
        if name in _BLAMED and cost.verdict != _UNCHANGED:
            tell(f"what is to blame: {scheme.what}")
            culprits.append(blame(model, quantized, measured[0]))
    return costs, culprits


def _tokens(model: Any, report: OutlierReport, measured: list[Batch], prepared: Prepared) -> dict[str, str]:
    """The tokens at which the worst tensors have their largest values."""
    tokenizer = prepared.tokenizer
    if tokenizer is None or has_two_inputs(model) or getattr(model.config, "is_encoder_decoder", False):
        return {}  # the tokens of an image, or of a decoder, are others
    rows = [row for batch in measured for row in batch["input_ids"].tolist()]
    found = {}
    for tensor in report.worst(_SHOWN):
        if tensor.positions and tensor.tokens == sum(map(len, rows)):
            at = tensor.positions[0]
            found[tensor.name] = f"{tokenizer.decode([rows[at.sample][at.token]])!r}, place {at.token}"
    return found


def _saves(model: Any) -> bool:
    try:
        check_model(model)
    except (ValueError, ImportError):
        return False
    return True


def _mends(model: Any) -> bool:
    """Whether there is data to fine-tune it on: not for two inputs at once, nor for a decoder without a head."""
    bare = getattr(model.config, "is_encoder_decoder", False) and model.base_model is model
    return not has_two_inputs(model) and not bare
