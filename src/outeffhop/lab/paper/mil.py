"""Section 4.3: multiple-instance learning, a bag's label from one pooled vector, with the pooling of each model.

An instance passes through a linear layer with ReLU; one learned query pools a bag's instances (OutEffHopPooling); a
linear layer scores the pooled vector. Everything except the pooling's method is the same, including folds and seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop._naming import require
from outeffhop.lab.data import Bags, collate_bags, load_bags
from outeffhop.lab.paper import drawing
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Values, Verdict
from outeffhop.lab.paper.ranking import judged, mean_std
from outeffhop.lab.paper.running import one_thread
from outeffhop.nn import OutEffHopPooling

__all__ = ["EXPERIMENT", "BagClassifier"]

METHODS = ("dense", "sparse", "gsh", "polynomial", "outeffhop")
FILES = ("elephant", "fox", "tiger", "ucsb_breast")
MNIST = "mnist bags"
DIGITS = "digit bags"
CLAIM = "OutEffHop is the best pooling of multiple-instance bags"


class BagClassifier(nn.Module):
    """Bags [B, n, d] and their padding → a logit per bag [B]."""

    def __init__(self, size: int, hidden: int, heads: int, method: str) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(size, hidden), nn.ReLU())
        self.pool = OutEffHopPooling(hidden, heads, method=method, batch_first=True)
        self.score = nn.Linear(hidden, 1)

    def forward(self, instances: Tensor, key_padding_mask: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.embed(instances), key_padding_mask=key_padding_mask)  # [B, 1, hidden]
        logit: Tensor = self.score(pooled[:, 0]).squeeze(-1)
        return logit


def sources(settings: Settings) -> dict[str, str]:
    """Name of a set of bags → its data spec."""
    paths = {}
    if settings.data is not None:
        paths = {name: settings.data / "mil" / f"{name}.npz" for name in FILES} | {MNIST: settings.data / "mnist"}
    return {name: str(path) for name, path in paths.items() if path.exists()} or {DIGITS: "builtin:images"}


def needs(settings: Settings) -> Sequence[str]:
    return () if settings.scale == "tiny" else ("mil", "mnist")


def cells(settings: Settings) -> list[Cell]:
    return [
        Cell(
            f"{_slug(name)}-{method}-seed{seed}",
            {"bags of": name, "method": method, "seed": seed, **_training(settings)},
        )
        for name in sources(settings)
        for method in METHODS
        for seed in range(1 if settings.quick else settings.seeds)
    ]


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _training(settings: Settings) -> Values:
    if settings.quick:
        chosen = {"folds": 2, "epochs": 1, "hidden": 8, "heads": 2, "bags": 12, "batch": 4, "lr": 1e-3}
    elif settings.scale == "tiny":
        chosen = {"folds": 5, "epochs": 10, "hidden": 32, "heads": 4, "bags": 100, "batch": 32, "lr": 3e-3}
    else:
        chosen = {"folds": 10, "epochs": 50, "hidden": 128, "heads": 8, "bags": 200, "batch": 16, "lr": 1e-3}
    return {**chosen, "weight_decay": 1e-3}


@one_thread()
def measure(cell: Cell, settings: Settings) -> Values:
    """ROC-AUC and accuracy on each fold's test bags."""
    roc_auc_score = require("sklearn.metrics").roc_auc_score

    asked = cell.values
    bags = load_bags(sources(settings)[asked["bags of"]], count=asked["bags"], seed=0)
    auc, accuracy = [], []
    for fold, (train, test) in enumerate(bags.folds(asked["folds"], asked["seed"])):
        seen, held = bags.take(train), bags.take(test)
        if asked["bags of"] in FILES:  # features of very different size; pixels are in [0, 1] already
            seen, held = seen.scaled(), held.scaled(seen)
        model = trained(seen, asked, 1000 * asked["seed"] + fold, settings.device)
        logits = scores(model, held, settings.device)
        auc.append(float(roc_auc_score(held.labels, logits)))
        accuracy.append(float(((logits > 0).long() == held.labels).double().mean()))
    return {"auc": auc, "accuracy": accuracy, "bags": len(bags), "size": bags.instances[0].shape[1]}


def trained(bags: Bags, asked: Values, seed: int, device: str) -> BagClassifier:
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # layers draw their weights from the global generator
        model = BagClassifier(bags.instances[0].shape[1], asked["hidden"], asked["heads"], asked["method"])
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), asked["lr"], weight_decay=asked["weight_decay"])
    for _ in range(asked["epochs"]):
        order = torch.randperm(len(bags), generator=rng).tolist()
        for begin, end in pairwise([*range(0, len(order), asked["batch"]), len(order)]):
            batch = {k: v.to(device) for k, v in collate_bags([bags[i] for i in order[begin:end]]).items()}
            logits = model(batch["instances"], batch["key_padding_mask"])
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"].to(logits))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


@torch.no_grad()
def scores(model: BagClassifier, bags: Bags, device: str) -> Tensor:
    batch = collate_bags([bags[i] for i in range(len(bags))])
    logits: Tensor = model.eval()(batch["instances"].to(device), batch["key_padding_mask"].to(device))
    return logits.cpu()


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    sets = [name for name in (*FILES, MNIST, DIGITS) if any(key.startswith(f"{_slug(name)}-") for key in found)]
    seeds = {name: _seeds(found, name) for name in sets}
    everything = {(name, method): _folds(found, name, method, seeds[name]) for name in sets for method in METHODS}
    seen = {key: folds for key, folds in everything.items() if folds["auc"]}
    rows = [
        [name, method, *(mean_std(folds[what]) for what in ("auc", "accuracy"))]
        for (name, method), folds in seen.items()
    ]
    draw(seen, sets, folder)
    training = _training(settings)
    keys = ("folds", "epochs", "hidden", "heads", "batch", "lr", "weight_decay")
    return EXPERIMENT.result(
        [
            Table(
                "Multiple-instance learning with one pooling layer",
                ["bags", "method", "ROC-AUC", "accuracy"],
                rows,
                {"ROC-AUC": "high", "accuracy": "high"},
                "bags",
                "Mean ± standard deviation over folds and seeds. The paper has no numbers for this experiment.",
            )
        ],
        [Figure("mil", "ROC-AUC with each model's pooling", "Means over folds and seeds, with standard errors.")],
        [verdict(seen, name, len(seeds[name])) for name in sets],
        {"bags": ", ".join(sets), "seeds": min(map(len, seeds.values())), **{k: training[k] for k in keys}},
    )


def _seeds(found: dict[str, Values], name: str) -> list[int]:
    """The seeds that every method has that was measured at all."""
    keys = [key.removeprefix(f"{_slug(name)}-") for key in found if key.startswith(f"{_slug(name)}-")]
    by_method: dict[str, set[int]] = {}
    for method, seed in (key.split("-seed") for key in keys):
        by_method.setdefault(method, set()).add(int(seed))
    return sorted(set.intersection(*by_method.values()))


def _folds(found: dict[str, Values], name: str, method: str, seeds: Sequence[int]) -> Values:
    """Every fold of these seeds, in the same order for each method."""
    keys = [f"{_slug(name)}-{method}-seed{seed}" for seed in seeds]
    parts = [found[key] for key in keys if key in found]
    return {what: [x for part in parts for x in part[what]] for what in ("auc", "accuracy")}


def verdict(seen: dict[tuple[str, str], Values], name: str, seeds: int) -> Verdict:
    """OutEffHop against the best of the others, fold by fold; only differences beyond two standard errors count.

    Without all of the others it can be contradicted, but not confirmed.
    """
    aucs = {method: seen[name, method]["auc"] for method in METHODS if (name, method) in seen}
    missing = [method for method in METHODS if method not in aucs]
    rivals = [method for method in aucs if method != "outeffhop"]
    if not rivals or "outeffhop" in missing:
        return Verdict(f"{CLAIM} ({name})", "not measured", f"not measured: {', '.join(missing)}")
    rival = max(rivals, key=lambda m: mean(aucs[m]))
    differences = [a - b for a, b in zip(aucs["outeffhop"], aucs[rival], strict=True)]
    error = _standard_error(differences)
    by = mean(differences)
    word = judged(by, 2 * error, seeds)
    return Verdict(
        f"{CLAIM} ({name})",
        "not measured" if missing and word == "confirmed" else word,
        "ROC-AUC " + ", ".join(f"{m} {mean(v):.3f}" for m, v in aucs.items()) + f"; against {rival} "
        f"{'−' if by < 0 else '+'}{abs(by):.4f} ± {error:.4f} (paired over {len(differences)} folds)"
        + (f"; not measured: {', '.join(missing)}" if missing and word == "confirmed" else ""),
        seeds,
    )


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def draw(seen: dict[tuple[str, str], Values], sets: Sequence[str], folder: Path) -> None:
    figure, ax = drawing.new(min(9.0, 2.5 + 1.6 * len(sets)), 3.8)
    marks: dict[str, Any] = {}
    methods = [method for method in METHODS if any(m == method for _, m in seen)]
    for i, method in enumerate(methods):
        at = [x + 0.16 * (i - (len(methods) - 1) / 2) for x, name in enumerate(sets) if (name, method) in seen]
        values = [seen[name, method]["auc"] for name in sets if (name, method) in seen]
        bars = [_standard_error(v) for v in values]
        style = {"color": drawing.colour(method), "marker": drawing.marker(method)}
        ax.errorbar(at, [mean(v) for v in values], bars, ls="", capsize=3, **style)
        marks[method] = {"ls": "", **style}
    ax.set_xticks(range(len(sets)), sets)
    ax.set(ylabel="ROC-AUC", xlim=(-0.6, len(sets) - 0.4))
    marks["standard error"] = ax.errorbar([], [], [], ls="", color="#888888", capsize=3)
    drawing.legend(figure, marks, len(marks))
    drawing.save(figure, folder, "mil")


EXPERIMENT = Experiment(
    "mil",
    "Section 4.3",
    "Multiple-instance learning: bags classified from one vector, pooled by a layer of each Hopfield model.",
    cells,
    measure,
    conclude,
    needs,
    partial=True,
)
