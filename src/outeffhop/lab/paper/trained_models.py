"""The model of a finished run, measured: its outliers and metrics, and what quantization costs it."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from outeffhop.lab.data import Prepared, batches
from outeffhop.lab.paper.experiment import Settings, Values
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig
from outeffhop.lab.training.run import prepare_data
from outeffhop.metrics import metric_for
from outeffhop.models import model_summary
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.outliers import measure
from outeffhop.quantization import Scheme, evaluate

__all__ = ["CHIEF", "measured", "quantized"]

# the metric that the paper prints for a model: its field, its name, and whether low or high is better
CHIEF = {
    "bert": ("perplexity", "perplexity", "low"),
    "opt": ("perplexity", "perplexity", "low"),
    "vit": ("accuracy", "top-1 accuracy", "high"),
    "stanhop": ("mse", "MSE", "low"),
}
_BATCH = 32  # samples, for every measurement of a trained model
_MEASURED, _WATCHED = 64, 16  # batches of the metric, and of the outliers
_IMAGE_BATCHES = 320  # an accuracy is a count, which needs more samples than a mean
_TOKENS = 128  # tokens of a sample; fewer batches are enough when samples are longer


def measured(config: RunConfig, settings: Settings, split: str = "validation") -> Values:
    """Of a finished run's model: outliers as the paper measures them, metrics, size, and how it was trained."""
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
        "train_samples": len(prepared.train),  # a folder's name does not say how large the corpus is
    }


def quantized(
    config: RunConfig, settings: Settings, bits: str = "W8A8", *, fold: bool = False, split: str = "validation"
) -> dict[str, list[float]]:
    """The metrics of a finished run's model in W8A8 or other bits; what the paper quantizes is quantized.

    Each metric is a list over calibration draws. As in the paper, a draw is 16 batches of training data with running
    ranges; for OPT it is 4 batches with the 99.999th percentile. With ``fold``, LayerNorms are folded into the next
    layers first.
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
    """The data's name, without the folder it is in here."""
    return spec if settings.data is None else spec.removeprefix(f"{settings.data}/")


def _opened(config: RunConfig, settings: Settings) -> tuple[Any, Prepared]:
    model: Any = load_checkpoint(RunFolder(config.out).model)
    return model.to(settings.device), _data(config.model, config.task, config.data, config.samples, config.train.seed)


@lru_cache(maxsize=1)
def _data(model: Any, task: str | None, spec: str, samples: DataConfig, seed: int) -> Prepared:
    """Read once for all measurements of a model: reading a corpus takes seconds."""
    return prepare_data(RunConfig(model=model, task=task, data=spec, samples=samples, train=TrainConfig(seed=seed)))


def _enough(config: RunConfig, settings: Settings) -> int:
    """The number of batches that the metric is measured on."""
    if settings.quick:
        return 1
    if config.model == "vit":
        return _IMAGE_BATCHES
    return _MEASURED * _TOKENS // max(config.samples.length or _TOKENS, _TOKENS)


def _some(prepared: Prepared, split: str, limit: int) -> list[dict[str, Tensor]]:
    """Batches evenly spread over a split: neighbours in a series or in a book are alike."""
    samples: Any = getattr(prepared, split)
    count = min(len(samples), limit * _BATCH)
    chosen = [i * len(samples) // count for i in range(count)]
    return list(batches(Subset(samples, chosen), prepared.eval_collate, _BATCH))


def _drawn(prepared: Prepared, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Batches of training samples, without replacement."""
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(seed)).tolist()
    samples: Any = prepared.train
    return list(batches(Subset(samples, order[: count * _BATCH]), prepared.eval_collate, _BATCH))
