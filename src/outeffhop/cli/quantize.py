"""``outeffhop quantize``: what quantization costs a checkpoint, and which tensors are to blame."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from torch import Tensor

from outeffhop.cli.console import print_json, print_table, progress, say
from outeffhop.cli.options import Quantize
from outeffhop.lab.data import batches
from outeffhop.lab.data.samples import random_batches
from outeffhop.lab.diagnosis.opening import open_checkpoint
from outeffhop.lab.training import RunFolder
from outeffhop.lab.training.card import write_card
from outeffhop.metrics import metric_for
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.quantization import QuantizationReport, Scheme, evaluate, export_int8, fold_layernorm, measure_int8
from outeffhop.quantization.deploy import check_model, check_scheme, check_target, save_compressed
from outeffhop.quantization.evaluation import calibrated
from outeffhop.quantization.fold import Folding
from outeffhop.quantization.int8_process import check_installed
from outeffhop.quantization.int8_report import Int8Report
from outeffhop.quantization.placement import lay_out
from outeffhop.quantization.quantization_report import Saved

__all__ = ["run"]

Batch = dict[str, Tensor]
_FILE = "quantization.json"
_INT8 = "int8"
_SHOWN = 10


def run(options: Quantize) -> None:
    """Loads, evaluates, and writes ``quantization.json`` once everything is done.

    With ``fold_layernorm``, LayerNorms are folded into the next layers first. With ``save``, the quantized checkpoint
    is written before anything is measured; it is loaded again and measured last. With ``int8``, the model is also
    exported into ``out/int8`` and measured there; that report is ``out/int8.json``.
    """
    scheme = Scheme.parse(f"{options.bits} {options.scheme}").with_range(options.range)
    if options.int8:
        _check_int8(options.out, scheme)
    if options.save is not None:
        _check_save(options.save, scheme, options.fold_layernorm)
    counts = {"calibration_batches": options.calibration_batches, "seeds": options.seeds}
    model, source, prepared = open_checkpoint(options, counts, out=options.out)
    if options.int8 and getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"int8: {type(model).__name__} has an encoder and a decoder, which export_int8 does not serve")
    lay_out(model, scheme.placement, options.exclude)  # names a pattern that matches nothing
    stored = model.dtype
    if options.save is not None:
        check_model(model)
        model = model.float()  # as the saved checkpoint is loaded
    size, seeds, fold = options.batch_size, options.seeds, options.fold_layernorm

    def draw(seed: int) -> list[Batch]:
        return random_batches(prepared.train, prepared.eval_collate, size, options.calibration_batches, seed)

    measured = list(batches(prepared.validation, prepared.eval_collate, size, limit=options.batches))
    if options.save is not None:
        quantized: Any = calibrated(model, draw(0), scheme, options.exclude)  # as the first seed below
        save_compressed(quantized, options.save, tokenizer=prepared.tokenizer, dtype=stored)
    done = count()
    with progress(1 + 2 * seeds) as tell:
        report = evaluate(
            model,
            draw,
            measured,
            prepared.task,
            scheme=scheme,
            seeds=seeds,
            fold=fold,
            exclude=options.exclude,
            progress=lambda text: tell(text, next(done)),
        )
    real = None
    if options.save is not None:
        loaded: Any = load_checkpoint(options.save)
        found = metric_for(report.task, model)(loaded.to(model.device), measured)
        report = replace(report, saved=Saved(str(options.save), found, _size(source.checkpoint), _size(options.save)))
    if options.out is not None:
        report.save(options.out / _FILE)
        _tell_card(options.checkpoint, options.out)
        if options.int8:
            model = model.float().cpu()
            if fold:
                model, _ = fold_layernorm(model, measured[0])
            with export_int8(model, draw(0), options.out / _INT8) as exported:
                real = measure_int8(model, exported, measured, metric_for(prepared.task, model))
            real.save(options.out / f"{_INT8}.json")
    if options.json:
        print_json({**json.loads(report.to_json()), **({} if real is None else {"int8": json.loads(real.to_json())})})
        return
    _show(report, options.out)
    if real is not None:
        _show_int8(real)


def _size(checkpoint: str | Path) -> int:
    return sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))


def _tell_card(checkpoint: str, out: Path) -> None:
    """The model card of a finished run shows what lies in the run's folder."""
    run = RunFolder(checkpoint)
    if run.exists and run.finished and out.resolve() == run.path.resolve():
        write_card(run)


def _check_int8(out: Path | None, scheme: Scheme) -> None:
    """What would fail at the end is said first."""
    if scheme.bits != "W8A8":
        raise ValueError(f"bits={scheme.bits!r} with int8: the exported model has 8 bits; leave out one of the two")
    if scheme.floating:
        raise ValueError(
            f"scheme={str(scheme)!r} with int8: the exported model computes in integers; leave out one of the two"
        )
    if out is None:
        raise ValueError("--int8 writes the exported model: give a folder by --out")
    if (out / _INT8).exists():
        raise ValueError(f"{str(out / _INT8)!r} exists and is not overwritten: remove it, or give another --out")
    try:
        check_installed("openvino", "nncf")
    except ImportError as error:
        raise ValueError(str(error)) from error


def _check_save(folder: Path, scheme: Scheme, fold: bool) -> None:
    """What would fail at the end is said first."""
    if fold:
        raise ValueError(
            "--save with --fold-layernorm: a checkpoint has no place for the biases of folding; leave one out"
        )
    check_scheme(scheme)
    check_target(folder, "save")


def _show(report: QuantizationReport, out: Path | None) -> None:
    about = f"{report.model} ({report.method}), {report.scheme}, placement {report.placement}"
    rows = [
        (name, f"{report.full[name]:.4g}", f"{report.mean(name):.4g} ± {report.std(name):.2g}")
        for name in report.quantized
    ]
    seeds = (
        f"{_counted(len(report.seeds), 'calibration seed')} of {_counted(report.calibration_batches, 'batch', 'es')}"
    )
    print_table(f"{about}; {seeds}", ("metric", "floating point", report.scheme.split()[0]), rows)
    worst = [
        (
            row.name,
            f"{row.typical_db:.1f}",
            f"{row.sqnr_db:.1f}",
            "each token's own" if row.low is None else f"[{row.low:.4g}, {row.high:.4g}]",
            f"{row.std:.3g}",
            f"{row.largest / row.std:.0f}" if row.std else "",
        )
        for row in report.worst[:_SHOWN]
    ]
    columns = ("tensor", "typical dB", "SQNR dB", "range", "std", "max |x| / std")
    print_table("Worst rounded (dB of the median channel or token first)", columns, worst)
    if report.folding is not None:
        _show_folding(report.folding)
    if report.saved is not None:
        _show_saved(report, report.saved)
    if out is not None:
        say(f"written to {out / _FILE}")


def _show_saved(report: QuantizationReport, saved: Saved) -> None:
    rows = [(name, f"{report.quantized[name][0]:.6g}", f"{value:.6g}") for name, value in saved.metric.items()]
    sizes = f"{saved.bytes_before / 2**20:.1f} → {saved.bytes_after / 2**20:.1f} MiB"
    title = f"Saved to {saved.path}, {sizes}; calibration seed {report.seeds[0]}"
    print_table(title, ("metric", "simulated", "loaded again"), rows)


def _show_folding(folding: Folding) -> None:
    rows = [(name, f"into {', '.join(layers)}") for name, layers in folding.folded.items()]
    rows += [(name, f"kept: {why}") for name, why in folding.kept.items()]
    count = f"{len(folding.folded)} of {_counted(len(rows), 'norm')}"
    title = f"LayerNorm's scale and shift, folded in {count}; outputs differ by {folding.difference:.1g}"
    print_table(title, ("norm", ""), rows)


def _counted(count: int, name: str, plural: str = "s") -> str:
    return f"{count} {name}{'' if count == 1 else plural}"


def _show_int8(report: Int8Report) -> None:
    rows = [
        (
            run,
            ", ".join(f"{name} {value:.4g}" for name, value in values.items()),
            f"{report.sqnr_db[run]:.1f}" if run in report.sqnr_db else "",
            f"{report.latency_ms[run]:.1f}",
            f"{report.size_bytes[run.split()[1]] / 2**20:.1f}" if run in report.sqnr_db else "",
        )
        for run, values in report.metric.items()
    ]
    title = f"Real int8 on {report.cpu}, {report.threads} threads. {report.placement}"
    print_table(title, ("run", "metric", "SQNR dB", "ms", "MiB"), rows)
    kinds = [(a, ", ".join(f"{kind} ×{n}" for kind, n in report.counts(a).items())) for a in ("int8", "mixed", "float")]
    print_table("What OpenVINO computes", ("arithmetic", "operations"), kinds)
