"""What the experiments that train share: a model trained into a folder of its own, and measured there."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sized
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.paper.experiment import Settings, Values
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, train
from outeffhop.lab.training.recipes import resolve
from outeffhop.lab.training.run import prepare_data
from outeffhop.metrics import metric_for
from outeffhop.models import model_summary, presets
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.outliers import measure
from outeffhop.quantization import Scheme, evaluate

__all__ = [
    "CHIEF",
    "DATA",
    "SHORT",
    "finished",
    "folders_of",
    "measured",
    "needs",
    "precision_of",
    "quantized",
    "run_config",
    "seeds_measured",
    "steps_of",
    "steps_said",
]

# what the paper prints of a task, how it is named, and where better lies
CHIEF = {
    "bert": ("perplexity", "perplexity", "low"),
    "opt": ("perplexity", "perplexity", "low"),
    "vit": ("accuracy", "top-1 accuracy", "high"),
    "stanhop": ("mse", "MSE", "low"),
}
# where the data lies: in the package, or in folders of Settings.data
DATA: dict[str, dict[str, str]] = {
    "tiny": {"bert": "builtin:text", "opt": "builtin:text", "vit": "builtin:images", "stanhop": "builtin:series"},
    "small": {"bert": "prose", "opt": "prose", "vit": "cifar10", "stanhop": "ett/ETTh1.csv"},
    "paper": {"bert": "prose", "opt": "prose", "vit": "imagenet", "stanhop": "ett/ETTh1.csv"},
}
# what differs from the recipe, so that two cores can do all of Table 1 at tiny scale, and one GPU at small scale
SHORT: dict[str, dict[str, dict[str, Any]]] = {
    "tiny": {
        "bert": dict(max_steps=500),
        "opt": dict(max_steps=800),
        "vit": dict(max_steps=500),
        "stanhop": dict(max_steps=400),
    },
    "small": {
        "bert": dict(max_steps=10_000, batch_size=128, warmup_steps=1000),
        "opt": dict(max_steps=2400, batch_size=32, warmup_steps=300),
        "vit": dict(max_steps=8000, batch_size=128, warmup_steps=400),
        "stanhop": dict(max_steps=455),
    },
    "paper": {},
}
_QUICK_STEPS = 4
_QUICK = {  # one narrow layer
    "bert": dict(num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2),
    "opt": dict(num_hidden_layers=1, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_attention_heads=2),
    "vit": dict(num_hidden_layers=1, hidden_size=16, intermediate_size=32, num_attention_heads=2),
    "stanhop": dict(e_layers=1, d_model=8, d_ff=16, num_heads=2),
}
_BATCH = 32  # samples, for every measurement of a trained model
_MEASURED, _WATCHED = 64, 16  # batches of the metric, and of the outliers
_PICTURES = 320  # an accuracy is a count: it needs more of them than a mean of numbers
_TOKENS = 128  # a sample of these; of longer ones fewer batches are enough


def needs(settings: Settings, models: Iterable[str]) -> list[str]:
    """The folders of data that these models are trained on."""
    return folders_of(DATA[settings.scale][model] for model in models)


def folders_of(specs: Iterable[str]) -> list[str]:
    return sorted({spec.split("/")[0] for spec in specs if not spec.startswith("builtin:")})


def steps_of(model: str, settings: Settings) -> int | None:
    """None is the recipe's own number."""
    return _QUICK_STEPS if settings.quick else _short(model, settings).get("max_steps")


def precision_of(model: str, settings: Settings) -> str:
    """STanHop-Net's products are too small for bf16 to gain what its conversions cost."""
    return "bf16" if settings.device.startswith("cuda") and model != "stanhop" else "fp32"


def steps_said(steps: Collection[int]) -> str:
    """How many steps several runs took."""
    least, most = min(steps), max(steps)
    return f"{least}" if least == most else f"{least} to {most}, as patience lasted"


def seeds_measured(seeds: Iterable[Sized]) -> int | str:
    """How many seeds each of several has; of some there may be more than of others."""
    counts = {len(values) for values in seeds}
    return min(counts) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _short(model: str, settings: Settings) -> dict[str, Any]:
    return SHORT[settings.scale].get(model, {})


def run_config(
    settings: Settings,
    model: str,
    method: str,
    seed: int,
    *,
    group: str = "table1",
    data: str | None = None,
    name: str = "",
    train: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    samples: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A run in ``OUT/GROUP/runs``, with no field left open; one name is one run.

    Args:
        group: the experiment whose folder it is kept in; one that asks for the same run finds it there.
        data: a spec, or a path below ``settings.data``; by default the model's of this scale.
        name: what else tells it apart.
        train, changes, samples: fields of RunConfig's parts that differ from the recipe.
    """
    spec = data or DATA[settings.scale][model]
    if not spec.startswith("builtin:"):
        spec = str((settings.data or Path()) / spec)
    options: dict[str, Any] = {**_short(model, settings), "max_steps": steps_of(model, settings), **(train or {})}
    recipe = resolve(RunConfig(model=model, preset=settings.scale, data=spec))  # type: ignore[arg-type]
    options = {**_looks(options["max_steps"] or recipe.train.max_steps or 1, settings), **options}
    fields, cut = {**(changes or {})}, {**(samples or {})}
    if settings.scale == "tiny":
        options["patience"] = 0  # too short to lose it
    if settings.quick:
        fields = {**fields, **_QUICK[model]}
        cut = {**cut, **({"length": 32, "vocab_size": 300} if model in ("bert", "opt") else {})}
        options |= dict(batch_size=8, eval_batches=1, outlier_batches=1, warmup_steps=1)
        options |= dict(eval_steps=2, log_steps=1, save_steps=2, outlier_steps=2)
    on_gpu = settings.device.startswith("cuda")
    options |= dict(seed=seed, device="cuda" if on_gpu else "cpu", precision=precision_of(model, settings))
    # worth its time where a run is minutes long; those of STanHop-Net, which has the most layers, are shorter
    options["compile"] = on_gpu and not settings.quick and model != "stanhop"
    if on_gpu and model in ("bert", "vit"):
        options["workers"] = 1  # masks and pictures take about as long as a step
    config = resolve(
        RunConfig(
            model=model,  # type: ignore[arg-type]
            preset=settings.scale,
            method=str(presets.paper_method(model, method)),
            data=spec,
            out="unnamed",
            changes=fields,
            train=TrainConfig(**options),
            samples=DataConfig(**cut),
        )
    )
    scale = f"{settings.scale}{'-quick' if settings.quick else ''}"
    plain = method.split("(")[0]
    parts = [scale, model, plain, *([name] if name else []), f"{config.train.max_steps}steps", f"seed{seed}"]
    return dataclasses.replace(config, out=str(settings.out / group / "runs" / "-".join(parts)))


def _looks(steps: int, settings: Settings) -> dict[str, Any]:
    """Twenty points for a curve, however long the run, and checkpoints to go on from after a kill."""
    often = max(steps // 20, 1)
    # a GPU is done with a small run before ten checkpoints of it would be written
    save = (10 if settings.scale == "small" else 2) * often
    looks = dict(eval_steps=often, outlier_steps=often, log_steps=max(often // 5, 1), save_steps=save, keep=1)
    # enough for a curve; what is reported is measured at the end
    return {**looks, "eval_batches": 16, "outlier_batches": 1 if settings.scale == "small" else 4}


def finished(config: RunConfig, settings: Settings, quiet: bool = True) -> RunFolder:
    """The run's folder, trained to the end: from its start, from where a kill left it, or long ago."""
    if settings.workers > 1 and not settings.device.startswith("cuda"):
        torch.set_num_threads(max((os.cpu_count() or 1) // settings.workers, 1))
    train(config, resume=True, quiet=quiet)
    folder = RunFolder(config.out)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # of no more use, and as large as three models
    return folder


def measured(config: RunConfig, settings: Settings, split: str = "validation") -> Values:
    """A finished run's model: outliers as the paper measures them, its metrics, its size."""
    model, prepared = _opened(config, settings)
    given = _some(prepared, split, _enough(config, settings))
    watched = _some(prepared, split, 1 if settings.quick else _WATCHED)
    report = measure(model, watched, attention=False)
    return {
        "kurtosis": report.avg_kurtosis,
        "inf_norm": report.max_inf_norm,
        "max_abs": report.max_abs,
        "metrics": metric_for(prepared.task)(model, given),
        "samples": sum(len(next(iter(batch.values()))) for batch in given),
        "parameters": model_summary(model).parameters,
        "steps": json.loads((RunFolder(config.out).path / "result.json").read_text())["steps"],
        "max_steps": config.train.max_steps,
        "lr": config.train.lr,
        "batch": config.train.batch_size,
        "precision": config.train.precision,
        "data": _plain(config.data, settings),
        "train_samples": len(prepared.train),  # a folder's name does not say how much of a corpus is in it
    }


def quantized(
    config: RunConfig, settings: Settings, bits: str = "W8A8", *, fold: bool = False, split: str = "validation"
) -> dict[str, list[float]]:
    """The metrics of a finished run's model in W8A8 (or other bits), everything quantized that the paper quantizes.

    Each is a list over calibration draws: 16 batches of training data and running ranges; OPT's are 4 batches and
    the 99.999th percentile, as in the paper. With ``fold``, LayerNorms are folded into the next layers first.
    """
    model, prepared = _opened(config, settings)
    of_opt = config.model == "opt"
    scheme = Scheme.parse(bits).with_range("percentile" if of_opt else None)
    count = 1 if settings.quick else 4 if of_opt else 16
    given = _some(prepared, split, _enough(config, settings))
    report = evaluate(
        model,
        lambda seed: _drawn(prepared, count, seed),
        given,
        scheme=scheme,
        seeds=1 if settings.quick else 3,
        fold=fold,
    )
    return {name: list(values) for name, values in report.quantized.items()}


def _plain(spec: str, settings: Settings) -> str:
    """Data by its name, wherever it lies here."""
    return spec if settings.data is None else spec.removeprefix(f"{settings.data}/")


def _opened(config: RunConfig, settings: Settings) -> tuple[Any, Prepared]:
    model: Any = load_checkpoint(RunFolder(config.out).model)
    return model.to(settings.device), _data(config.model, config.data, config.samples, config.train.seed)


@lru_cache(maxsize=1)
def _data(model: Any, spec: str, samples: DataConfig, seed: int) -> Prepared:
    """Read once for all that is measured of a model: a corpus takes seconds, and is the same each time."""
    return prepare_data(RunConfig(model=model, data=spec, samples=samples, train=TrainConfig(seed=seed)))


def _enough(config: RunConfig, settings: Settings) -> int:
    """Batches of the metric."""
    if settings.quick:
        return 1
    if config.model == "vit":
        return _PICTURES
    return _MEASURED * _TOKENS // max(config.samples.length or _TOKENS, _TOKENS)


def _some(prepared: Prepared, split: str, limit: int) -> list[dict[str, Tensor]]:
    """Batches of a split, evenly spread over it: neighbours in a series, or in a book, are alike."""
    samples: Any = getattr(prepared, split)
    count = min(len(samples), limit * _BATCH)
    chosen = [i * len(samples) // count for i in range(count)]
    return list(batches(Subset(samples, chosen), prepared.eval_collate, _BATCH))


def _drawn(prepared: Prepared, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Batches of training samples, without replacement."""
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(seed)).tolist()
    samples: Any = prepared.train
    return list(batches(Subset(samples, order[: count * _BATCH]), prepared.eval_collate, _BATCH))
