"""A finished run's model card: README.md beside the weights, as the Hugging Face hub reads it.

It is made from the run's own files. Only the last part of a folder's path is shown: a card is for others, who need
not know where files were stored.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outeffhop._io import from_plain, write_whole
from outeffhop.lab.training.config import RunConfig
from outeffhop.lab.training.recipes import paper_length
from outeffhop.lab.training.rundir import RunFolder
from outeffhop.lab.training.starting_model import AUTO_CLASSES
from outeffhop.methods import Method
from outeffhop.models import presets
from outeffhop.models.stanhop import StanhopForForecasting

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

    from outeffhop.quantization.quantization_report import QuantizationReport

__all__ = ["CARD", "model_card", "write_card", "save_pretrained"]

CARD = "README.md"
_NAME = {"bert": "BERT", "opt": "OPT", "vit": "ViT", "stanhop": "STanHop-Net"}
_PIPELINE = {
    "mlm": "fill-mask",
    "clm": "text-generation",
    "seq2seq": "text2text-generation",
    "embedding": "feature-extraction",
    "classification": "image-classification",
    "forecasting": "time-series-forecasting",
}


def write_card(run: RunFolder) -> None:
    """Writes the card of a finished run again, with the ``quantization.json`` in its folder, if there is one."""
    from outeffhop.quantization.quantization_report import QuantizationReport

    result = _finished(run)
    report = run.path / "quantization.json"
    quantized = QuantizationReport.load(report) if report.is_file() else None
    write_whole(run.model / CARD, model_card(run, run.config(), result, quantized))


def save_pretrained(run: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Copies the model of a finished run, its tokenizer and its card to a new folder, ready for the hub.

    A loaded model's own ``save_pretrained`` writes no card: the model may have changed by then.
    """
    folder, target = RunFolder(Path(run)), Path(path)
    _finished(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"path={str(target)!r} exists and is never overwritten: choose a new or an empty folder")
    write_card(folder)
    shutil.copytree(folder.model, target, dirs_exist_ok=True)


def model_card(
    run: RunFolder, config: RunConfig, result: dict[str, Any], quantized: QuantizationReport | None = None
) -> str:
    """The card's text; ``config`` is the run's, ``result`` what ``result.json`` holds or will hold."""
    method = Method.parse(config.method)
    env = json.loads((run.path / "env.json").read_text(encoding="utf-8"))
    name = _plain(run.path.resolve().name)
    body = "\n\n".join(
        part
        for part in (
            f"# {_text(name)}",
            _opening(config, method, env, result),
            _loading(config),
            _numbers(config, result),
            _quantized(quantized),
            _making(config, env, result),
        )
        if part
    )
    return f"---\n{_metadata(name, config, method, result).to_yaml()}\n---\n\n{body}\n"


def _finished(run: RunFolder) -> dict[str, Any]:
    if not run.finished:
        raise ValueError(f"{str(run.path)!r} is not a finished run, so it has no card yet")
    found: dict[str, Any] = from_plain(json.loads((run.path / "result.json").read_text(encoding="utf-8")))
    return found


def _metadata(name: str, config: RunConfig, method: Method, result: dict[str, Any]) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    pipeline, source = _PIPELINE[str(config.task)], _source(config.data)
    hub = config.data.removeprefix("hub:").strip("/").split("/")[:2] if config.data.startswith("hub:") else []
    results = [
        EvalResult(
            task_type=pipeline,
            dataset_type=source,
            dataset_name=source,
            dataset_split="validation",
            metric_type=metric,
            metric_value=value,
        )
        for metric, value in result["metrics"].items()
        if math.isfinite(value)
    ]
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=pipeline,
        tags=["outeffhop", _kind(config), method.name],
        datasets="/".join(hub) or None,
        model_name=name,
        eval_results=results or None,
    )


def _opening(config: RunConfig, method: Method, env: dict[str, Any], result: dict[str, Any]) -> str:
    begun = f" Training started from the checkpoint {_code(Path(config.init).name)}." if config.init else ""
    early = ", until the validation metric no longer improved" if result["stopped_early"] else ""
    paper = ""
    if config.model in presets.MODELS:
        millions = presets.MODELS[config.model].paper_parameters[method.gate is not None]
        paper = (
            f" The paper's model of this kind has {millions:g} million parameters and a recipe of up to "
            f"{paper_length(config.model)}; compare the numbers below with that in mind."
        )
    return (
        f"{_NAME.get(_kind(config), _text(_kind(config)))} with the attention method {_code(config.method)}, trained "
        f"on {_code(_source(config.data))} by outeffhop (the Outlier-Efficient Modern Hopfield Model).{begun}\n\n"
        f"**Scale.** {env['parameters']:,} parameters, {result['steps']:,} steps of {config.train.batch_size:,} "
        f"samples{early}.{paper}"
    )


def _kind(config: RunConfig) -> str:
    """The preset, the type of the checkpoint's model, or the name of the folder it was built from."""
    return _plain(Path(str(config.model)).name)


def _loading(config: RunConfig) -> str:
    kind: Any = StanhopForForecasting if config.task == "forecasting" else AUTO_CLASSES[str(config.task)]
    where = "outeffhop.models.stanhop" if kind is StanhopForForecasting else "transformers"
    return f"""## How to load

```python
import outeffhop  # registers its attention methods with transformers
from {where} import {kind.__name__}
model = {kind.__name__}.from_pretrained(".")  # this folder, or its name on the hub
```"""


def _numbers(config: RunConfig, result: dict[str, Any]) -> str:
    few = config.train.eval_batches
    part = f"at most {_many(few, 'batch', 'batches')}" if few else "all of it"
    rows = [(_text(metric), f"{value:.6g}") for metric, value in result["metrics"].items()]
    outliers = [(n, f"{result[n.replace(' ', '_')]:.6g}") for n in ("max inf norm", "avg kurtosis")]
    return (
        f"## Numbers\n\n{_moment(result)}, on the validation set ({part}).\n\n{_table(('metric', 'value'), rows)}\n\n"
        "Outliers as the paper measures them, on at most "
        f"{_many(config.train.outlier_batches, 'batch', 'batches')} of the validation set. "
        "A Gaussian has kurtosis 3.\n\n"
        f"{_table(('outliers', 'value'), outliers)}"
    )


def _moment(result: dict[str, Any]) -> str:
    best = result.get("best_step")
    return "After the last step" if best is None else f"After step {best:,}, the best evaluation of the run"


def _quantized(report: QuantizationReport | None) -> str:
    if report is None:
        return "## Quantized\n\nNot measured yet: `outeffhop quantize RUN --out RUN` measures it and adds it here."
    rows = [
        (_text(metric), f"{report.full[metric]:.6g}", f"{report.mean(metric):.6g} ± {report.std(metric):.2g}")
        for metric in report.quantized
    ]
    about = (
        f"Simulated {_code(report.scheme)}, measured on {_many(report.evaluation_batches, 'batch', 'batches')}. "
        f"Mean and spread over {_many(len(report.seeds), 'draw')} of "
        f"{_many(report.calibration_batches, 'calibration batch', 'calibration batches')}."
    )
    return f"## Quantized\n\n{about}\n\n{_table(('metric', 'floating point', _text(report.scheme.split()[0])), rows)}"


def _making(config: RunConfig, env: dict[str, Any], result: dict[str, Any]) -> str:
    train, splits = config.train, env["data"].get("splits", {})
    sizes = ", ".join(f"{part} {split['samples']:,}" for part, split in splits.items())
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items())
    rows = [
        ("data", _code(_source(config.data))),
        ("samples", sizes),
        ("steps", f"{result['steps']:,} of {train.max_steps:,}"),
        ("optimizer", f"{train.optimizer}, lr {train.lr:g}, {train.schedule}, {train.precision}"),
        ("seed", str(train.seed)),
        ("device", _code(f"{env['device']} × {env['processes']}")),
        ("started", _text(env["began"])),
        ("versions", _text(f"Python {env['python']}, {packages}")),
    ]
    return f"## How it was made\n\n{_table(('', ''), rows)}\n\nNo licence is stated: add one before you publish it."


def _many(count: int, one: str, more: str | None = None) -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _source(spec: str) -> str:
    """The data by name: only the last part of a path."""
    known = spec.startswith(("builtin:", "hub:"))
    return _plain(spec if known else Path(expanduser(spec)).resolve().name)


def _plain(text: str) -> str:
    """On one line, without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()) or "unnamed"


def _text(text: str) -> str:
    """Escaped, so that Markdown shows the characters as they are."""
    return re.sub(r"([\\`*_{}\[\]()<>#|~!&])", r"\\\1", _plain(text))


def _code(text: str) -> str:
    """A code span for any text."""
    text = _plain(text).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    gap = " " if "`" in text else ""
    return f"{fence}{gap}{text}{gap}{fence}"


def _table(columns: tuple[str, ...], rows: list[Any]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
