"""Section 4.3: multiple-instance learning, a bag's label from one pooled vector, with the pooling of each model.

An instance passes through a linear layer with ReLU; one learned query pools a bag's instances (OutEffHopPooling); a
linear layer scores the pooled vector. Everything except the pooling's method is the same, including folds and seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

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

METHODS = ("dense", "sparse", "gsh", "outeffhop")
FILES = ("elephant", "fox", "tiger", "ucsb_breast")
MNIST = "mnist bags"
DIGITS = "digit bags"
CLAIM = "Section 4.3: OutEffHop is superior in multiple-instance learning"


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
    seen = {(name, method): _folds(found, name, method) for name in sets for method in METHODS}
    rows = [
        [name, method, *(mean_std(seen[name, method][what]) for what in ("auc", "accuracy"))]
        for name in sets
        for method in METHODS
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
        [Figure("mil", "ROC-AUC with each model's pooling", "Mean over folds and seeds, and its standard error.")],
        [verdict(seen, name) for name in sets],
        {"bags": ", ".join(sets), "seeds": 1 if settings.quick else settings.seeds, **{k: training[k] for k in keys}},
    )


def _folds(found: dict[str, Values], name: str, method: str) -> Values:
    """Every fold of every seed, in the same order for each method."""
    seeds = [v for key, v in found.items() if key.startswith(f"{_slug(name)}-{method}-seed")]
    return {what: [x for seed in seeds for x in seed[what]] for what in ("auc", "accuracy")}


def verdict(seen: dict[tuple[str, str], Values], name: str) -> Verdict:
    """OutEffHop against the best of the others, fold by fold; only differences beyond two standard errors count."""
    aucs = {method: seen[name, method]["auc"] for method in METHODS}
    rival = max((m for m in METHODS if m != "outeffhop"), key=lambda m: mean(aucs[m]))
    differences = [a - b for a, b in zip(aucs["outeffhop"], aucs[rival], strict=True)]
    error = _standard_error(differences)
    by = mean(differences)
    return Verdict(
        f"{CLAIM} ({name})",
        judged(by, 2 * error),
        "ROC-AUC " + ", ".join(f"{m} {mean(v):.3f}" for m, v in aucs.items()) + f"; OutEffHop against {rival}: "
        f"{by:+.4f} ± {error:.4f} (paired over {len(differences)} folds; two standard errors make a difference)",
    )


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def draw(seen: dict[tuple[str, str], Values], sets: Sequence[str], folder: Path) -> None:
    figure, ax = drawing.new(2.5 + 1.6 * len(sets), 3.8)
    for i, method in enumerate(METHODS):
        at = [x + 0.16 * (i - (len(METHODS) - 1) / 2) for x in range(len(sets))]
        values = [seen[name, method]["auc"] for name in sets]
        bars = [_standard_error(v) for v in values]
        style = {"color": drawing.colour(method), "marker": drawing.marker(method)}
        ax.errorbar(at, [mean(v) for v in values], bars, ls="", capsize=3, label=method, **style)
    ax.set_xticks(range(len(sets)), sets)
    ax.set(ylabel="ROC-AUC", xlim=(-0.6, len(sets) - 0.4))
    figure.legend(loc="outside upper center", ncols=len(METHODS), frameon=False)
    drawing.save(figure, folder, "mil")


EXPERIMENT = Experiment(
    "mil",
    "Section 4.3",
    "Multiple-instance learning: bags classified from one vector, pooled by a layer of each Hopfield model.",
    cells,
    measure,
    conclude,
    needs,
)
