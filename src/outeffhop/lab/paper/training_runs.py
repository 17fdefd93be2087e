"""The training runs of the experiments: how each is configured, where it is kept, and what data it needs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping, Sized
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from outeffhop._io import remove_folder
from outeffhop.lab.paper.experiment import Settings
from outeffhop.lab.paper.running import is_first
from outeffhop.lab.training import DataConfig, RunConfig, RunFolder, TrainConfig, train
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import presets

__all__ = [
    "DATA",
    "SHORT",
    "data_of",
    "finished",
    "folders_of",
    "needs",
    "precision_of",
    "processes",
    "run_config",
    "seeds_measured",
    "steps_of",
    "steps_said",
]

# where the data is: in the package, or in folders of Settings.data
DATA: dict[str, dict[str, str]] = {
    "tiny": {"bert": "builtin:text", "opt": "builtin:text", "vit": "builtin:images", "stanhop": "builtin:series"},
    "small": {"bert": "prose", "opt": "prose", "vit": "cifar10", "stanhop": "ett/ETTh1.csv"},
    "paper": {
        "bert": "bookcorpus+wiki40b",
        "opt": "bookcorpus+wiki40b",
        "vit": "imagenet",
        "stanhop": "ett/ETTh1.csv",
    },
}
# the tokenizers of the paper's models, at its scale; the others train one on the text
TOKENIZERS = {"bert": "hub:bert-base-uncased", "opt": "hub:facebook/opt-125m"}
# samples that a GPU of 80 GB takes at once at the paper's scale; larger batches are computed in parts
_AT_ONCE = {"bert": 256, "opt": 48, "vit": 512, "stanhop": 128}
# processes that prepare masks and images, which takes about as long as a step at small scale
_LOADERS = {"small": {"bert": 1, "vit": 1}, "paper": {"bert": 4, "vit": 12}}
# how runs differ from the recipe, so that two cores can do all of Table 1 at tiny scale, and one GPU at small scale
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


def data_of(settings: Settings, model: str) -> str:
    """A spec, or a path below ``settings.data``: what the model is trained on."""
    if model in ("bert", "opt") and settings.text is not None:
        return settings.text
    return DATA[settings.scale][model]


def needs(settings: Settings, models: Iterable[str]) -> list[str]:
    """The data folders that these models are trained on; a text given apart is not one of them."""
    own = {data_of(settings, model) for model in models} - {settings.text}
    return folders_of(own)


def folders_of(specs: Iterable[str]) -> list[str]:
    return sorted({spec.split("/")[0] for spec in specs if not spec.startswith("builtin:")})


def _tokenizer(settings: Settings, model: str) -> str | None:
    """The tokenizer asked for, for this model if it is a folder of several; None: one is trained on the text."""
    if settings.tokenizer is None:
        return TOKENIZERS[model] if settings.scale == "paper" and not settings.quick else None
    if settings.tokenizer == "trained":
        return None
    own = Path(settings.tokenizer) / model
    return str(own) if own.is_dir() else settings.tokenizer


def steps_of(model: str, settings: Settings) -> int | None:
    """None: the recipe's number."""
    return _QUICK_STEPS if settings.quick else _short(model, settings).get("max_steps")


def precision_of(model: str, settings: Settings) -> str:
    """bf16 on a GPU, except for STanHop-Net: its matrix products are too small to gain from it."""
    return "bf16" if settings.device.startswith("cuda") and model != "stanhop" else "fp32"


def steps_said(steps: Collection[int]) -> str:
    """The number of steps that several runs took, as text."""
    least, most = min(steps), max(steps)
    return f"{least}" if least == most else f"{least} to {most}, ended by patience"


def seeds_measured(seeds: Iterable[Sized]) -> int | str:
    """The number of seeds that were measured, or its range."""
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
    """The config of a run in ``OUT/GROUP/runs``, with every field filled in.

    Args:
        group: the experiment whose folder keeps the run; other experiments that need the same run find it there.
        data: a spec, or a path below ``settings.data``; by default the model's data at this scale.
        name: added to the folder's name, to distinguish the run from others.
        train, changes, samples: fields of RunConfig's parts that differ from the recipe.
    """
    spec = data or data_of(settings, model)
    if not spec.startswith("builtin:") and spec != settings.text:
        spec = str((settings.data or Path()) / spec)
    options: dict[str, Any] = {**_short(model, settings), "max_steps": steps_of(model, settings), **(train or {})}
    recipe = resolve(RunConfig(model=model, preset=settings.scale, data=spec))  # type: ignore[arg-type]
    options = {**_looks(model, options["max_steps"] or recipe.train.max_steps or 1, settings), **options}
    fields, cut = {**(changes or {})}, {**(samples or {})}
    if settings.scale == "tiny":
        options["patience"] = 0  # too short to run out of it
    if settings.quick:
        fields = {**fields, **_QUICK[model]}
        cut = {**cut, **({"length": 32, "vocab_size": 300} if model in ("bert", "opt") else {})}
        options |= dict(batch_size=8, eval_batches=1, outlier_batches=1, warmup_steps=1)
        options |= dict(eval_steps=2, log_steps=1, save_steps=2, outlier_steps=2)
    on_gpu = settings.device.startswith("cuda")
    options |= dict(seed=seed, device="cuda" if on_gpu else "cpu", precision=precision_of(model, settings))
    # compiling pays off when a run takes minutes; those of STanHop-Net, which has the most layers, are shorter
    options["compile"] = on_gpu and not settings.quick and model != "stanhop"
    if on_gpu:
        options["workers"] = _LOADERS.get(settings.scale, _LOADERS["small"]).get(model, 0)
    if model in ("bert", "opt"):
        cut.setdefault("tokenizer", _tokenizer(settings, model))
        if cut["tokenizer"] == TOKENIZERS[model]:  # the paper's OPT has more rows than its tokenizer has tokens
            fields.setdefault("vocab_size", presets.MODELS[model].sizes["paper"]["vocab_size"])
    config = resolve(
        RunConfig(
            model=model,  # type: ignore[arg-type]
            preset=settings.scale,
            method=str(presets.paper_method(model, method, settings.scale)),
            data=spec,
            out="unnamed",
            changes=fields,
            train=TrainConfig(**options),
            samples=DataConfig(**cut),
        )
    )
    if settings.scale == "paper" and on_gpu and not settings.quick:
        parts = _parts(config.train.batch_size or 1, _AT_ONCE[model])
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=parts))
    scale = f"{settings.scale}{'-quick' if settings.quick else ''}"
    plain = method.split("(")[0]
    words = [scale, model, plain, *([name] if name else []), _length(config.train), f"seed{seed}"]
    return dataclasses.replace(config, out=str(settings.out / group / "runs" / "-".join(words)))


def _parts(batch: int, most: int) -> int:
    """In how many equal parts each process of torchrun computes its share of a batch, each of at most ``most``."""
    own = batch // processes()
    return next(n for n in range(1, own + 1) if own % n == 0 and own // n <= most) if own else 1


def processes() -> int:
    """The number of processes that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _length(train: TrainConfig) -> str:
    return f"{train.max_steps}steps" if train.epochs is None else f"{train.epochs}epochs"


def _looks(model: str, steps: int, settings: Settings) -> dict[str, Any]:
    """Twenty points for a curve, for any number of steps, and checkpoints to resume from."""
    if model == "stanhop":  # every epoch on the whole validation set, as in its recipe: that decides which step is best
        return dict(keep=1)
    often = max(steps // 20, 1)
    # a GPU finishes a small run in the time that ten checkpoints take
    save = (10 if settings.scale == "small" else 2) * often
    looks = dict(eval_steps=often, outlier_steps=often, log_steps=max(often // 5, 1), save_steps=save, keep=1)
    # enough for a curve; the reported numbers are measured at the end
    return {**looks, "eval_batches": 16, "outlier_batches": 1 if settings.scale == "small" else 4}


def finished(config: RunConfig, settings: Settings, quiet: bool = True) -> RunFolder:
    """The folder of the finished run: trained now, resumed, or found as it is if it has finished before."""
    if settings.workers > 1 and not settings.device.startswith("cuda"):
        torch.set_num_threads(max((os.cpu_count() or 1) // settings.workers, 1))
    train(config, resume=True, quiet=quiet)
    folder = RunFolder(config.out)
    if dist.is_initialized():  # the model is written by the first process
        dist.barrier()
    if is_first():
        folder.clean()
        remove_folder(folder.checkpoints)  # no longer needed, and as large as three models
    return folder
