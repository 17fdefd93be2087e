"""The settings of the paper's experiments, each with its source, and where ours differ at the paper's scale, and why.

A source is a place in the paper, or the authors' scripts (their public code, as it is run by its shell scripts), which
say more than the paper does. Settings that neither gives are not listed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outeffhop.models.presets import MODELS

__all__ = ["DIFFERENCES", "STATED", "Stated", "repeats", "why"]


@dataclass(frozen=True)
class Stated:
    """A setting of the paper, in the form in which ours is read from a run's config."""

    value: Any
    source: str


_SCRIPTS = "the authors' scripts"
_MODELS = "Section 4.1, Models"
_METRICS = "Section 4.1, Metrics"
_TABLE3 = "Appendix D.2, hyperparameters of the convergence task"
_CAPACITY = "Appendix D.2, Memory Capacity"

_Part = dict[str, Stated]


def _scripts(**values: Any) -> _Part:
    return {name.replace("_", " "): Stated(value, _SCRIPTS) for name, value in values.items()}


def _model(source: str, layers: int, width: int, inner: int, heads: int) -> _Part:
    sizes = {"layers": layers, "width": width, "inner width": inner, "heads": heads}
    return {name: Stated(value, source) for name, value in sizes.items()}


_TEXT = {
    "data": Stated(
        "BookCorpus + wiki40b/en; validation: wiki40b/en", "Section 4.1, Datasets, and the authors' scripts"
    ),
    "metric": Stated("perplexity", _METRICS),
    "metric and outliers on": Stated("the whole validation set", "Section 4.1, and the authors' scripts"),
    "repeats": Stated(3, "Section 4.1"),
}
_BERT: _Part = {
    **_model("Section 4.1 (bert-base-uncased)", 12, 768, 3072, 12),
    "parameters, M": Stated((108.9, 109.0), "Table 1"),
    **_TEXT,
    "task": Stated("mlm", _MODELS),
    "tokenizer": Stated("bert-base-uncased", "Section 4.1, Models, and the authors' scripts"),
    "sequence length": Stated(128, _MODELS),
    **_scripts(
        vocabulary=30522,
        dropout=0.1,
        masked_tokens=0.15,
        batch=256,
        length_of_training="200,000 steps",
        optimizer="adamw",
        learning_rate=1e-4,
        schedule="linear",
        lowest_learning_rate=0.0,
        warmup_steps=10_000,
        weight_decay=0.01,
        betas=(0.9, 0.999),
        gradient_clipping=1.0,
        precision="fp16",
        clipped="clipped(gamma=-0.025, zeta=1)",
        clipped_outeffhop="clipped-outeffhop(gamma=-0.025, zeta=1.1)",
        gated="gated(predictor=mlp, init=0.5)",
        gated_outeffhop="gated-outeffhop(predictor=mlp, init=0.5)",
        ranges_of_activations="running",
        calibration_batches=16,
    ),
    "quantization": Stated("W8A8", _METRICS),
}
_OPT: _Part = {
    **_model("Section 4.1 (opt-125m)", 12, 768, 3072, 12),
    "parameters, M": Stated((124.06, 124.07), "Table 1"),
    **_TEXT,
    "task": Stated("clm", _MODELS),
    "tokenizer": Stated("facebook/opt-125m", _MODELS),
    "sequence length": Stated(512, _MODELS),
    **_scripts(
        vocabulary=50272,
        dropout=0.1,
        batch=192,
        length_of_training="125,000 steps",
        optimizer="adamw",
        learning_rate=4e-4,
        schedule="linear",
        lowest_learning_rate=0.0,
        warmup_steps=2000,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        gradient_clipping=1.0,
        precision="fp16",
        clipped="clipped(alpha=12, zeta=1)",
        clipped_outeffhop="clipped(alpha=12, zeta=1)",
        gated="gated(predictor=linear, init=0.25)",
        gated_outeffhop="gated-outeffhop(predictor=linear, init=0.25)",
        ranges_of_activations="percentile",
        calibration_batches=4,
    ),
    "quantization": Stated("W8A8", _METRICS),
}
_VIT: _Part = {
    **_model("Section 4.1 (ViT-S/16)", 12, 384, 1536, 6),
    "parameters, M": Stated((22.03, 22.04), "Table 1"),
    "data": Stated("ImageNet-1k", "Section 4.1, Datasets"),
    "task": Stated("classification", _MODELS),
    "image size": Stated(224, _MODELS),
    "patch size": Stated(16, _MODELS),
    **_scripts(
        mixup_and_cutmix="the second image's share: Beta(0.2, 0.2), which mixes less",
        crops="of the original image",
        warm_up="from 1e-6, changed at every epoch",
        dropout=0.0,
        batch=5120,
        length_of_training="37,500 steps",
        optimizer="adamw",
        learning_rate=1e-3,
        schedule="cosine",
        lowest_learning_rate=1e-5,
        warmup_steps=2500,
        weight_decay=0.03,
        betas=(0.9, 0.999),
        gradient_clipping=0.0,
        label_smoothing=0.1,
        precision="fp16",
        clipped="clipped(gamma=-1e-05, zeta=1)",
        clipped_outeffhop="clipped-outeffhop(gamma=-1e-05, zeta=1)",
        gated="gated(predictor=linear, init=0.25)",
        gated_outeffhop="gated-outeffhop(predictor=linear, init=0.25)",
    ),
    "metric": Stated("top-1 accuracy", _METRICS),
    "metric and outliers on": Stated("the whole validation set", "Section 4.1"),
    "repeats": Stated(3, "Section 4.1"),
    "quantization": Stated("W8A8 fp8", "Section 4.1, Metrics, and the authors' scripts"),
}
_STANHOP: _Part = {
    **_model("the authors' scripts, and 12 decoder layers in Section 4.2", 11, 256, 512, 4),
    "task": Stated("forecasting", _MODELS),
    "splits": Stated("14/5/5 months", "Section 4.2, Data"),
    **_scripts(
        series_stage="the series query learned keys, then associate with themselves; their answer is the residual",
        dropout=0.5,
        length_of_training="100 epochs",
        optimizer="adam",
        schedule="halving",
        warmup_steps=0,
        weight_decay=0.0,
        betas=(0.9, 0.999),
        gradient_clipping=5.0,
        patience=5,
        precision="fp32",
    ),
}
_STANHOP_TABLE1: _Part = {
    **_STANHOP,
    "parameters, M": Stated((35.13, 35.15), "Table 1"),
    "data": Stated("ETTh1", "Section 4.1, Datasets"),
    **_scripts(
        rows_given_and_forecast=(168, 24),
        segment=6,
        batch=128,
        learning_rate=1e-4,
        clipped="clipped(gamma=-0.1, zeta=1.1)",
        clipped_outeffhop="clipped-outeffhop(gamma=-0.1, zeta=1.1)",
        gated="gated(predictor=linear, init=0.25)",
        gated_outeffhop="gated-outeffhop(predictor=linear, init=0.25)",
        ranges_of_activations="running",
        calibration_batches=16,
    ),
    "metric": Stated("MSE", _METRICS),
    "metric and outliers on": Stated("the whole test set", "Table 1's row is Table 2's ETTh1, 24"),
    "repeats": Stated(3, "Section 4.1"),
    "quantization": Stated("W8A8", _METRICS),
}
# data, rows given, rows forecast, rows of a segment, learning rate
_WINDOWS = """
ETTh1 168 24 6 1e-4
ETTh1 168 48 6 1e-4
ETTh1 720 168 24 1e-5
ETTh1 720 336 24 1e-5
ETTh1 720 720 24 1e-5
ETTm1 288 24 12 1e-4
ETTm1 288 48 6 1e-4
ETTm1 672 96 12 1e-4
ETTm1 672 288 24 1e-5
ETTm1 672 672 12 1e-5
WTH 48 24 4 1e-4
WTH 48 48 4 1e-4
WTH 336 168 24 1e-5
WTH 336 336 24 1e-5
WTH 720 720 24 1e-5
"""
_FORECASTS: dict[str, _Part] = {
    f"{data}-{out}": _scripts(
        rows_given_and_forecast=(int(given), int(out)),
        segment=int(segment),
        learning_rate=float(lr),
        batch=128 if data == "ETTh1" else 64,
    )
    for data, given, out, segment, lr in map(str.split, _WINDOWS.strip().splitlines())
}
_IMAGES: _Part = {
    "data": Stated("mnist, cifar10", _CAPACITY),
    "models": Stated("dense, sparse, polynomial, outeffhop", _CAPACITY),
    "β": Stated(1.0, _CAPACITY),
}

STATED: dict[str, dict[str, _Part]] = {
    "table1": {"bert": _BERT, "opt": _OPT, "vit": _VIT, "stanhop": _STANHOP_TABLE1},
    "table2": {
        "all": {
            **_STANHOP,
            "data": Stated("ETTh1, ETTm1, WTH", "Section 4.2, Data"),
            "layers compared": Stated("vanilla, sparse, gsh, outeffhop", "Table 2"),
            "α of entmax": Stated("starts at random: 1 + 2 sigmoid(2 z), z from N(0, 1)", _SCRIPTS),
            "metric": Stated("MSE, MAE", "Section 4.2, Metrics"),
            "metric and outliers on": Stated("the whole test set", "Section 4.2"),
            "repeats": Stated(10, "Section 4.2, Metrics"),
        },
        **_FORECASTS,
    },
    "training-outliers": {"bert": _BERT, "opt": _OPT, "vit": _VIT, "stanhop": _STANHOP_TABLE1},
    "energy": {},
    "memory-capacity": {
        "all": {
            **_IMAGES,
            **_scripts(
                images_in_memory="10, 20, 30, 50, 100, 200, 500",
                queries="half of the pixels hidden",
                repeats=10,
            ),
        }
    },
    "noise-robustness": {
        "all": {
            **_IMAGES,
            **_scripts(
                images_in_memory="100",
                queries="Gaussian noise, σ = 0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 1, 1.2, 1.4, 2, 3, 4",
                repeats=10,
            ),
        }
    },
    "convergence": {
        "vit": {
            "data": Stated("CIFAR-10, CIFAR-100", "Figure 7"),
            "layers compared": Stated("vanilla, sparse, outeffhop", "Figure 7"),
            "width": Stated(512, _TABLE3),
            "inner width": Stated(1024, _TABLE3),
            "dropout": Stated(0.3, _TABLE3),
            "activation": Stated("gelu", _TABLE3),
            "patch size": Stated(32, _TABLE3),
            "length of training": Stated("9,800 steps", _TABLE3),  # 100 epochs of 50,000 images
            "batch": Stated(512, _TABLE3),
            "optimizer": Stated("adam", _TABLE3),
            "learning rate": Stated(1e-4, _TABLE3),
            **_scripts(layers=3, heads=4, schedule="cosine"),
        }
    },
    "mil": {},
    "cost": {
        model: {
            "parameters, M": Stated(part["parameters, M"].value, "Appendix D.3: as in Section 4.1"),
            "methods": Stated("vanilla, outeffhop", "Table 4"),
            "measured": Stated("main memory of the machine in pre-training", "Appendix D.3"),
            "machine": Stated("two A100 of 80 GB, a Xeon Gold 6338", "Appendix D.3"),
        }
        for model, part in {"bert": _BERT, "opt": _OPT, "vit": _VIT, "stanhop": _STANHOP_TABLE1}.items()
    },
    "theory": {},
    "beyond": {},
}
"""Experiment → part (a model, a forecast, or all) → setting → what the paper or its scripts say."""

_FP16 = "bf16 has the range of fp32, so that no loss scaling decides what a large activation does to a step"
_ZETA = "the script asks for ζ = 1, and the table of methods in its code has 1.1 under that label; ours is as asked for"
_RUNS = ("table1", "training-outliers")
_IN_VIT = {
    "mixup and cutmix": "the library that mixes draws uniformly; all methods have the same",
    "crops": "images are prepared once, for all epochs",
    "warm up": "one schedule for all models",
}
_IN_STANHOP = {
    "series stage": "ours is the pooling that the architecture is described with, and keeps the series in the residual "
    "stream",
    "splits": "14/5/5 is WTH's; the benchmark's splits of the ETT series are the usual ones",
}

DIFFERENCES: dict[tuple[str, str, str], str] = {
    **{(name, model, "precision"): _FP16 for name in _RUNS for model in ("bert", "opt", "vit")},
    **{(name, "bert", "clipped outeffhop"): _ZETA for name in _RUNS},
    **{(name, "vit", setting): why for name in _RUNS for setting, why in _IN_VIT.items()},
    **{
        (name, part, setting): why
        for name, part in (*((name, "stanhop") for name in _RUNS), ("table2", "all"))
        for setting, why in _IN_STANHOP.items()
    },
    ("table2", "all", "α of entmax"): "no layer starts at the edge of what α can be, and seeds differ by data and "
    "weights alone",
    **{
        (name, "opt", "clipped outeffhop"): "the script's option never reaches the layer, so that the authors' row is "
        "clipped softmax a second time; ours is Clipped OutEffHop"
        for name in _RUNS
    },
    **{
        (name, model, "parameters, M"): MODELS[model].difference
        for name in (*_RUNS, "cost")
        for model in ("bert", "stanhop")
    },
    **{
        (
            name,
            "vit",
            "metric and outliers on",
        ): "the same images: a folder's validation set is its test set too if it "
        "has no other, and ImageNet's test labels are not public"
        for name in _RUNS
    },
    **{
        (name, "vit", "quantization"): "Table 1 compares four models in one format, and shows ViT in the other one "
        "beside it. The authors' scripts quantize ViT by quanto to 8-bit floats, and BERT and OPT to integers"
        for name in _RUNS
    },
    **{
        (name, "all", "models"): "generalized sparse Hopfield is shown as well"
        for name in ("memory-capacity", "noise-robustness")
    },
    ("convergence", "vit", "data"): "CIFAR-10 only",
    **{
        (
            "cost",
            model,
            "measured",
        ): "time of a step, and memory of the training process alone, on made-up batches: the "
        "data loaders of a whole machine say nothing about a method"
        for model in ("bert", "opt", "vit", "stanhop")
    },
    **{
        ("cost", model, "machine"): "the machine it is run on, which the result names"
        for model in ("bert", "opt", "vit", "stanhop")
    },
}
"""(experiment, part, setting) → why ours is another one at the paper's scale."""


def repeats(experiment: str) -> int | None:
    """How often the paper repeats an experiment, where it says so."""
    found = [part["repeats"].value for part in STATED[experiment].values() if "repeats" in part]
    return max(found, default=None)


def why(experiment: str, part: str, setting: str) -> str | None:
    """The reason for a difference at the paper's scale, if there is one."""
    return DIFFERENCES.get((experiment, part, setting))
