"""What an experiment would run, setting by setting, beside what the paper says; nothing is measured or read.

Ours are read from the config of each cell's run, or from what the cells and the experiment's module hold.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outeffhop.lab.data import prepare
from outeffhop.lab.paper import (
    beyond,
    convergence,
    cost,
    energy_landscape,
    image_retrieval,
    memory_capacity,
    mil,
    noise_robustness,
    paper_settings,
    table1,
    table2,
    theory_bounds,
)
from outeffhop.lab.paper.experiment import Cell, Experiment, Settings, Values, chosen
from outeffhop.lab.paper.trained_models import CHIEF, calibration_of, measured_on
from outeffhop.lab.training import RunConfig
from outeffhop.lab.training.recipes import new_config, resolve
from outeffhop.methods import Clipped, Method
from outeffhop.models import presets

__all__ = ["Row", "rows"]

Parts = dict[str, Values]  # part of an experiment → setting → value

_NAMES = {  # a data folder → its name in the paper
    "bookcorpus+wiki40b": "BookCorpus + wiki40b/en; validation: wiki40b/en",
    "imagenet": "ImageNet-1k",
    "ett/ETTh1.csv": "ETTh1",
    "ett/ETTm1.csv": "ETTm1",
    "wth/WTH.csv": "WTH",
    "cifar10": "CIFAR-10",
}
_BUILT_IN: Mapping[str, Values] = {  # what no config has a field for
    "vit": {
        "mixup and cutmix": "the second image's share: uniform in (0, 1)",
        "crops": "of the resized image, resized again",
        "warm up": "from 0, changed at every step",
    },
    "stanhop": {
        "series stage": "learned patterns query the series and pool them, the series query what was pooled; the "
        "residual is the series",
        "splits": "ETTh1 and ETTm1 12/4/4 months, WTH 28/10/10, as in the authors' scripts",
    },
}


@dataclass(frozen=True)
class Row:
    """A setting of an experiment.

    Attributes:
        part: the model or forecast it belongs to, or "all".
        paper: what the paper or its scripts say; None if neither does.
        source: where.
        note: "same", "differs" with the reason if one is known, or "not stated".
    """

    experiment: str
    part: str
    setting: str
    ours: Any
    paper: Any
    source: str
    note: str


def rows(experiment: Experiment, settings: Settings) -> list[Row]:
    """Every setting of the cells that would be measured, beside the paper's."""
    stated = paper_settings.STATED[experiment.name]
    found = []
    for part, values in _OURS[experiment.name](experiment, settings).items():
        theirs = stated.get(part, {})
        for name, ours in values.items():
            said = theirs.get(name)
            if said is None:
                found.append(Row(experiment.name, part, name, ours, None, "", "not stated"))
                continue
            note = "same"
            if not _same(name, ours, said.value):
                reason = paper_settings.why(experiment.name, part, name) if settings.scale == "paper" else None
                note = f"differs: {reason}" if reason else "differs"
            found.append(Row(experiment.name, part, name, ours, said.value, said.source, note))
    return found


def _same(setting: str, ours: Any, theirs: Any) -> bool:
    if setting == "parameters, M":  # the paper prints two digits, some rounded and some cut
        return all(abs(a - b) < 0.01 for a, b in zip(ours, theirs, strict=True))
    return bool(ours == theirs)


def _runs(experiment: Experiment, settings: Settings) -> Parts:
    """The four models of Table 1: the run of each one's first cell, and its methods."""
    parts: Parts = {}
    for cell in chosen(experiment.cells(settings), settings):
        model, method = cell.values["model"], cell.values["method"]
        config = table1.config_of(cell, settings)
        if model not in parts:
            parts[model] = {**_of_run(config, settings), **_measured(config, settings), **_BUILT_IN.get(model, {})}
            parts[model]["parameters, M"] = _millions(model, settings)
        if method not in ("vanilla", "outeffhop"):
            parts[model][method.replace("-", " ")] = _spelled(config.method)
    return parts


def _of_run(config: RunConfig, settings: Settings) -> Values:
    """A run's model, data and training."""
    train, samples, model = config.train, config.samples, str(config.model)
    sizes: Any = new_config(config, config.changes)
    values: Values = {
        "layers": sizes.num_hidden_layers,
        "width": sizes.hidden_size,
        "inner width": getattr(sizes, _INNER[model]),
        "heads": sizes.num_attention_heads,
        "dropout": getattr(sizes, "hidden_dropout_prob", None) if model in ("bert", "vit") else sizes.dropout,
        "data": _data(config.data, settings),
        "task": config.task,
    }
    if samples.length is not None:
        values["vocabulary"] = sizes.vocab_size
        values["tokenizer"] = (samples.tokenizer or "trained on the text").removeprefix("hub:")
        values["sequence length"] = samples.length
    if config.task == "mlm":
        values["masked tokens"] = inspect.signature(prepare).parameters["mask_probability"].default
    if config.task == "classification":
        values |= {"image size": samples.image_size, "patch size": sizes.patch_size, "activation": sizes.hidden_act}
        values |= {"augmentation": samples.augment, "label smoothing": samples.label_smoothing}
    if config.task == "forecasting":
        values |= {"rows given and forecast": (samples.in_len, samples.out_len), "segment": sizes.seg_len}
        values["patience"] = train.patience
    return values | {
        "batch": train.batch_size,
        "computed in parts": train.accumulate,
        "length of training": _length(config),
        "optimizer": train.optimizer,
        "learning rate": train.lr,
        "schedule": train.schedule,
        "lowest learning rate": train.min_lr,
        "warmup steps": train.warmup_steps,
        "weight decay": train.weight_decay,
        "betas": train.betas,
        "gradient clipping": train.clip_norm,
        "precision": train.precision,
        "loading processes": train.workers,
    }


_INNER = {"bert": "intermediate_size", "vit": "intermediate_size", "opt": "ffn_dim", "stanhop": "d_ff"}


def _length(config: RunConfig) -> str:
    """Steps; for series epochs, which the paper counts in."""
    train = config.train
    epochs = getattr(train, "epochs", None)
    if epochs is None and config.task == "forecasting" and "ETTh1" in config.data:
        rows = 12 * 30 * 24
        windows = rows - (config.samples.in_len or 0) - (config.samples.out_len or 0) + 1
        whole, rest = divmod(train.max_steps or 0, windows // (train.batch_size or 1))
        epochs = whole if not rest else None
    return f"{epochs} epochs" if epochs else f"{train.max_steps:,} steps"


def _measured(config: RunConfig, settings: Settings) -> Values:
    """How a trained model is measured and quantized."""
    model = str(config.model)
    scheme, batches, draws = calibration_of(model, settings)
    limit = measured_on(config, settings)
    split = table1.split_of(model)
    return {
        "metric": CHIEF[model][1],
        "metric and outliers on": f"the whole {split} set" if limit is None else f"{limit} batches of the {split} set",
        "repeats": settings.seeds,
        "quantization": f"{scheme.bits}, {scheme.bits} fp8" if model in table1.FLOAT8 else scheme.bits,
        "ranges of activations": scheme.activation_range,
        "calibration batches": batches,
        "calibration draws": draws,
    }


def _millions(model: str, settings: Settings) -> tuple[float, float]:
    """Parameters without and with gates."""
    gated = presets.paper_method(model, "gated-outeffhop", settings.scale)
    plain, extra = (presets.count(model, settings.scale, method) / 1e6 for method in ("vanilla", gated))
    return round(plain, 3), round(extra, 3)


def _spelled(method: str) -> str:
    """A method with the parameters that the scripts name, also where they are defaults."""
    parsed = Method.parse(method)
    said: dict[str, str] = {}
    if isinstance(parsed.normalizer, Clipped):
        clip = parsed.normalizer
        name, value = ("gamma", clip.gamma) if clip.alpha is None else ("alpha", clip.alpha)
        said |= {name: f"{value:g}", "zeta": f"{clip.zeta:g}"}
    if parsed.gate is not None:
        said |= {"predictor": parsed.gate.predictor, "init": f"{parsed.gate.init:g}"}
    return f"{parsed.name}({', '.join(f'{k}={v}' for k, v in said.items())})"


def _data(spec: str, settings: Settings) -> str:
    plain = spec if settings.data is None else spec.removeprefix(f"{settings.data}/")
    return _NAMES.get(plain, plain)


def _forecasts(experiment: Experiment, settings: Settings) -> Parts:
    cells = chosen(experiment.cells(settings), settings)
    first: dict[str, Cell] = {}
    for cell in cells:
        first.setdefault(f"{cell.values['data']}-{cell.values['out_len']}", cell)
    whole: Values = {}
    parts: Parts = {}
    own = ("rows given and forecast", "segment", "learning rate", "batch")
    for name, cell in first.items():
        config = table2.config_of(cell, settings)
        values = _of_run(config, settings)
        parts[name] = {setting: values[setting] for setting in own}
        if not whole:
            kept = {"metric and outliers on", "repeats"}
            said = {k: v for k, v in _measured(config, settings).items() if k in kept}
            whole = {k: v for k, v in values.items() if k not in (*own, "data")} | said
    whole |= _BUILT_IN["stanhop"] | {
        "α of entmax": "learned in each layer, starts from 1.5",
        "data": ", ".join(dict.fromkeys(_data(table2.FILES[c.values["data"]], settings) for c in cells)),
        "layers compared": ", ".join(dict.fromkeys(c.values["method"] for c in cells)),
        "metric": ", ".join(table2.FIELDS[name] for name in ("mse", "mae")),
    }
    return {"all": whole, **parts}


def _convergence(experiment: Experiment, settings: Settings) -> Parts:
    cells = chosen(experiment.cells(settings), settings)
    values = _of_run(convergence.config_of(cells[0], settings), settings)
    values["layers compared"] = ", ".join(dict.fromkeys(c.values["method"] for c in cells))
    return {"vit": {**values, "repeats": settings.seeds}}


def _beyond(experiment: Experiment, settings: Settings) -> Parts:
    cells = chosen(experiment.cells(settings), settings)
    config = beyond.config_of(cells[0], settings)
    said = {"methods": ", ".join(dict.fromkeys(c.values["method"] for c in cells))}
    return {"opt": {**_of_run(config, settings), **_measured(config, settings), **said}}


def _costs(experiment: Experiment, settings: Settings) -> Parts:
    parts = {}
    for cell in chosen(experiment.cells(settings), settings):
        model = cell.values["model"]
        config = resolve(RunConfig(model=model, preset=settings.scale, data="made up"))
        parts[model] = {
            "parameters, M": _millions(model, settings),
            "methods": ", ".join(cost.METHODS),
            "measured": "time and memory of a training step; main memory of the training process",
            "machine": "this one",
            "rounds": cell.values["rounds"],
            "largest batch": config.train.batch_size,
        }
    return parts


def _images(experiment: Experiment, settings: Settings) -> Parts:
    cells = experiment.cells(settings)
    axis = cells[0].values["axis"]
    noise = experiment.name == noise_robustness.EXPERIMENT.name
    said = ", ".join(f"{value:g}" for value in axis)
    seeds = {cell.values["seed"] for cell in cells}
    return {
        "all": {
            "data": ", ".join(image_retrieval.SETS if settings.scale != "tiny" else image_retrieval.sources(settings)),
            "models": ", ".join(image_retrieval.MODELS),
            "β": image_retrieval.BETA,
            "images in memory": str(noise_robustness.STORED) if noise else said,
            "queries": f"Gaussian noise, σ = {said}" if noise else _HIDDEN,
            "repeats": len(seeds),
        }
    }


_HIDDEN = "half of the pixels hidden"  # memory_capacity.half_hidden


def _cells(experiment: Experiment, settings: Settings) -> Parts:
    """What is asked of the cells of an experiment whose settings the paper does not give."""
    values: dict[str, list[str]] = {}
    for cell in experiment.cells(settings):
        for name, value in cell.values.items():
            if str(value) not in values.setdefault(name, []):
                values[name].append(str(value))
    return {"all": {name: ", ".join(some) for name, some in values.items()}}


_OURS: Mapping[str, Callable[[Experiment, Settings], Parts]] = {
    table1.EXPERIMENT.name: _runs,
    "training-outliers": _runs,
    table2.EXPERIMENT.name: _forecasts,
    convergence.EXPERIMENT.name: _convergence,
    beyond.EXPERIMENT.name: _beyond,
    cost.EXPERIMENT.name: _costs,
    memory_capacity.EXPERIMENT.name: _images,
    noise_robustness.EXPERIMENT.name: _images,
    energy_landscape.EXPERIMENT.name: _cells,
    mil.EXPERIMENT.name: _cells,
    theory_bounds.EXPERIMENT.name: _cells,
}
