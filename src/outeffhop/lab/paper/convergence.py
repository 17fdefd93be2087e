"""Figure 7: how fast a ViT learns with dense, sparse and outlier-efficient Hopfield layers.

Of CIFAR-10, and of CIFAR-100 too where the folder of data has it.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from outeffhop.lab.paper import drawing, published
from outeffhop.lab.paper import training_runs as trained
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values, Verdict
from outeffhop.lab.paper.ranking import judged, mean_std, surplus
from outeffhop.lab.training import RunConfig

__all__ = ["EXPERIMENT", "config_of", "speed_verdicts"]

METHODS = {"vanilla": "dense", "sparse": "sparse", "outeffhop": "outeffhop"}
_STEPS = {"small": 780, "paper": 9800}  # of 512 images: 20 epochs of 20,000 images, 100 of all 50,000
_SIZE = 32
# a patch of 4 sees what a patch of 32 sees on images enlarged eight times
_CHANGES: dict[str, Any] = dict(
    hidden_size=published.CONVERGENCE["width"],
    intermediate_size=published.CONVERGENCE["inner"],
    hidden_dropout_prob=published.CONVERGENCE["dropout"],
    patch_size=4,
    image_size=_SIZE,
    num_channels=3,
    num_hidden_layers=6,
    num_attention_heads=8,
)
# the paper's patches, and the layers, heads and rate of the authors' scripts
_PAPER = {**_CHANGES, "patch_size": 32, "image_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
_CLASSES = {"cifar100": {"num_labels": 100}}
_MODEL = (
    "the paper's width 512, inner width 1024 and dropout 0.3; 6 layers of 8 heads (the paper does not give them); "
    "patches of 4 on images of 32, which see what its patches of 32 see on images enlarged to 256"
)
_TRAIN = dict(
    lr=published.CONVERGENCE["lr"],
    batch_size=published.CONVERGENCE["batch"],
    optimizer="adam",
    weight_decay=0.0,
    schedule="linear",
    min_lr=0.0,
    warmup_steps=0,
)


def cells(settings: Settings) -> list[Cell]:
    tiny = settings.scale == "tiny" or settings.quick
    steps = trained.steps_of("vit", settings) if tiny else _STEPS[settings.scale]
    return [
        Cell(
            f"{'' if data == 'cifar10' else f'{data}-'}{method}-{seed}",
            {"method": method, "seed": seed, "steps": steps} | ({} if data == "cifar10" else {"data": data}),
        )
        for seed in range(settings.seeds)
        for data in _sets(settings)
        for method in METHODS
    ]


def _sets(settings: Settings) -> list[str]:
    more = settings.scale != "tiny" and settings.data is not None and (settings.data / "cifar100").is_dir()
    return ["cifar10", *(["cifar100"] if more else [])]


def config_of(cell: Cell, settings: Settings) -> RunConfig:
    """The run of a cell."""
    tiny, paper, data = settings.scale == "tiny", settings.scale == "paper", cell.values.get("data", "cifar10")
    changes = {} if tiny else {**(_PAPER if paper else _CHANGES), **_CLASSES.get(data, {})}
    train = {} if tiny else {**_TRAIN, "schedule": "cosine"} if paper else _TRAIN
    return trained.run_config(
        settings,
        "vit",
        cell.values["method"],
        cell.values["seed"],
        group="convergence",
        data="builtin:images" if tiny else data,
        name="" if data == "cifar10" else data,
        train={**train, "max_steps": cell.values["steps"]},
        changes=changes,
        samples={} if tiny else {"image_size": changes["image_size"], "augment": "none", "label_smoothing": 0.0},
    )


def measure(cell: Cell, settings: Settings) -> Values:
    config = config_of(cell, settings)
    lines = trained.finished(config, settings).metrics()
    return {
        "loss": [(line["step"], line["loss"]) for line in lines if "loss" in line],
        "accuracy": [(line["step"], 100 * line["eval_accuracy"]) for line in lines if "eval_accuracy" in line],
        "batch": config.train.batch_size,
        "lr": config.train.lr,
        "precision": config.train.precision,
    }


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    sets = _by_set(found, settings)
    _draw(sets, folder)
    one = next(iter(found.values()))
    rows = []
    for data, methods in sets.items():
        for method, values in methods.items():
            parts = [(_over, "loss"), (_last, "loss"), (_over, "accuracy"), (_last, "accuracy")]
            rows.append([data, METHODS[method], *(mean_std([of(v, name) for v in values]) for of, name in parts)])
    columns = ["data", "layers", "mean loss", "last loss", "mean accuracy", "last accuracy"]
    better = dict(zip(columns[2:], ("low", "low", "high", "high"), strict=True))
    note = (
        "Means are over training: the area under a curve of the figure. Loss on training data, accuracy in % on "
        "validation data."
    )
    accuracies = {
        data: {method: [_over(v, "accuracy") for v in values] for method, values in methods.items()}
        for data, methods in sets.items()
    }
    return EXPERIMENT.result(
        [Table("Speed of learning", columns, rows, better, "data", note)],
        [Figure("curves", "Loss and accuracy over training (Figure 7)", "Each curve is the mean over seeds.")],
        [verdict for data, numbers in accuracies.items() for verdict in speed_verdicts(data, numbers)],
        {"data": ", ".join(sets)}
        | {"seeds": trained.seeds_measured(values for methods in sets.values() for values in methods.values())}
        | {"steps": one["accuracy"][-1][0], "batch": one["batch"], "learning rate": one["lr"]}
        | {"precision": one["precision"]}
        | {"layers": "softmax, sparsemax and softmax1, three different normalizers"}
        | ({"model": _MODEL} if settings.scale == "small" else {}),
    )


def _by_set(found: dict[str, Values], settings: Settings) -> dict[str, dict[str, list[Values]]]:
    """Data → method → a value of each seed; by key, because the folder of data may be gone."""
    sets: dict[str, dict[str, list[Values]]] = {}
    for key, values in found.items():
        data, _, method = f"-{key.rpartition('-')[0]}".rpartition("-")
        data = data.removeprefix("-") or ("digits" if settings.scale == "tiny" else "cifar10")
        sets.setdefault(data, {}).setdefault(method, []).append(values)
    return sets


def _over(values: Values, name: str) -> float:
    return mean(value for _, value in values[name])


def _last(values: Values, name: str) -> float:
    return float(values[name][-1][1])


def speed_verdicts(data: str, accuracies: dict[str, list[float]]) -> list[Verdict]:
    """By accuracy averaged over training, against each rival; a lead within two standard errors does not count."""
    found = []
    for rival in ("vanilla", "sparse"):
        claim = f"Figure 7: {data}: a ViT learns faster with OutEffHop layers than with {METHODS[rival]} ones"
        if not {rival, "outeffhop"} <= accuracies.keys():
            found.append(Verdict(claim, "not measured", f"measured: {', '.join(accuracies) or 'none'}"))
            continue
        own, other = accuracies["outeffhop"], accuracies[rival]
        seeds = min(len(own), len(other))
        numbers = f"accuracy averaged over training, in %: {mean_std(own)} against {mean_std(other)}"
        found.append(Verdict(claim, judged(surplus(own, other), 0.0, seeds), numbers, seeds))
    return found


# OutEffHop lies on the dense model's curve for long
_STYLES: dict[str, Any] = {"dense": {"linewidth": 3.5, "alpha": 0.4}, "outeffhop": {"linestyle": "--", "zorder": 3}}


def _draw(sets: dict[str, dict[str, list[Values]]], folder: Path) -> None:
    """A row for each set: its loss and its accuracy."""
    figure, _ = drawing.new(9, 0.5 + 3.2 * len(sets), columns=2, rows=len(sets))
    marks: dict[str, Any] = {}
    panels = [(data, name) for data in sets for name in ("loss", "accuracy")]
    for axis, (data, name) in zip(figure.axes, panels, strict=True):
        for method, values in sets[data].items():
            steps = [step for step, _ in values[0][name]]
            curve = [mean(points) for points in zip(*([y for _, y in v[name]] for v in values), strict=True)]
            kind = METHODS[method]
            marks[kind] = axis.plot(steps, curve, color=drawing.colour(kind), **_STYLES.get(kind, {}))[0]
        axis.set_ylabel("training loss" if name == "loss" else "validation accuracy, %")
        axis.set_title(data, fontsize=10)
        axis.set_xlabel("training steps")
    drawing.legend(figure, marks)
    drawing.save(figure, folder, "curves")


def needs(settings: Settings) -> list[str]:
    return [] if settings.scale == "tiny" else ["cifar10"]


EXPERIMENT = Experiment(
    "convergence",
    "Figure 7",
    "Loss and accuracy over training of a ViT with dense, sparse and outlier-efficient Hopfield layers.",
    cells,
    measure,
    conclude,
    needs,
    partial=True,
)
