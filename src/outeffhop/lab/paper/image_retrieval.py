"""What the experiments on memory retrieval share: images, six Hopfield models, three memories, one error.

Two of the models are polynomial of order 10. The authors' code takes Σ ⟨ξ, x⟩¹⁰ ξ without dividing by anything, which
is what the paper's figures compare with; ours divides the weights by their sum, as all other models do.

The models retrieve images from a memory of M images. A memory is

    clean                only the images;
    polluted             with one outlier for every ten images: Gaussian vectors whose coordinates are as large as
                         an image's norm, so that they score higher than the image a query was made from;
    polluted, with Λ     the same, with outliers classified by the paper's three steps and kept out of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outeffhop.lab.data.image_files import load_images
from outeffhop.lab.data.specs import parse
from outeffhop.lab.paper import drawing
from outeffhop.lab.paper.experiment import Cell, Figure, Settings, Table, Values, Verdict, chosen
from outeffhop.lab.paper.ranking import judged, mean_std
from outeffhop.lab.paper.running import one_thread
from outeffhop.memory import HopfieldMemory, NoOp

__all__ = [
    "AUTHORS",
    "MEMORIES",
    "MODELS",
    "RIVALS",
    "TIE",
    "sources",
    "needs",
    "cells",
    "errors",
    "squared_error",
    "by_images",
    "error_tables",
    "draw_errors",
    "figure_of",
    "compared",
    "classified",
    "conditions",
    "missing_rivals",
    "models_of",
]

SETS = ("mnist", "cifar10")
AUTHORS = "polynomial, unnormalized"
MODELS = ("dense", "sparse", "gsh", "polynomial", AUTHORS, "outeffhop")
RIVALS = ("dense", "sparse", AUTHORS)  # the baselines of the paper's figures
ORDER = 10
MEMORIES = ("clean", "polluted", "polluted, with Λ")
BETA = 1.0
# Λ: two patterns are dissimilar below this part of the median cosine; outliers are dissimilar to this share of the
# others. Neither uses the knowledge of which patterns are outliers.
PART, SHARE = 0.5, 0.5
# smaller differences of mean errors do not count: seeds differ by more
TIE = 0.01

Errors = dict[str, dict[str, float]]  # memory → model → error


def sources(settings: Settings) -> dict[str, str]:
    """The available image sets, as name → data spec; scikit-learn's digits if there are no others."""
    folders = () if settings.data is None else SETS
    found = {name: str(settings.data / name) for name in folders if settings.data and (settings.data / name).is_dir()}
    return found or {"digits": "builtin:images"}


def needs(settings: Settings) -> Sequence[str]:
    """The image sets of the selected cells."""
    return () if settings.scale == "tiny" else [name for name in SETS if chosen(_cells(name, settings, ()), settings)]


def cells(settings: Settings, axis: Sequence[float]) -> list[Cell]:
    """One for each image set and seed; ten seeds as in the paper, except at tiny scale."""
    return [cell for name in sources(settings) for cell in _cells(name, settings, axis)]


def _cells(name: str, settings: Settings, axis: Sequence[float]) -> list[Cell]:
    seeds = 1 if settings.quick else settings.seeds if settings.scale == "tiny" else 10
    # by name: the folder may move
    return [Cell(f"{name}-seed{seed}", {"images": name, "seed": seed, "axis": list(axis)}) for seed in range(seeds)]


@one_thread()
def errors(
    cell: Cell,
    settings: Settings,
    size: Callable[[float], int],
    query: Callable[[Tensor, float, torch.Generator], Tensor],
) -> Values:
    """Errors at every point of the axis. ``size`` is the number of stored images, ``query`` makes queries from them."""
    seed = cell.values["seed"]
    images = _images(sources(settings)[cell.values["images"]]).to(settings.device)
    points = []
    for value in cell.values["axis"]:
        count = size(value)
        if count > len(images):
            continue
        # all points share their images: a larger memory contains the smaller one
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        stored = images[order[:count].to(images.device)]
        rng = torch.Generator().manual_seed(seed)
        queries = query(stored, value, rng)
        points.append({"at": value, "images": count, **_point(stored, queries, rng)})
    return {"points": points, "size": images.shape[1]}


def _point(images: Tensor, queries: Tensor, rng: torch.Generator) -> Values:
    count, size = images.shape
    outliers = torch.randn(max(1, count // 10), size, generator=rng).to(images) * images.norm(dim=1).mean()
    polluted = torch.cat([images, outliers])
    directions = torch.nn.functional.normalize(polluted, dim=1)
    no_op = NoOp.by_similarity(polluted, PART * float((directions @ directions.T).median()), share=SHARE)
    memories = {"clean": (images, None), "polluted": (polluted, None), "polluted, with Λ": (polluted, no_op)}
    found: Errors = {name: {} for name in memories}
    for name, (patterns, classified) in memories.items():
        for model in MODELS:
            found[name][model] = squared_error(_answer(model, patterns, classified, queries), images)
    return {
        "errors": found,
        "outliers": len(outliers),
        "found": int(no_op.outliers[count:].sum()),
        "mistaken": int(no_op.outliers[:count].sum()),
    }


def _answer(model: str, patterns: Tensor, classified: NoOp | None, queries: Tensor) -> Tensor:
    if model != AUTHORS:
        return HopfieldMemory(patterns, BETA, model, classified).retrieve(queries).state
    # a float32 could not hold the powers of an outlier's score
    stored = HopfieldMemory(patterns, BETA, "dense", classified).patterns.double()
    return (queries.double() @ stored.T) ** ORDER @ stored


def squared_error(answer: Tensor, images: Tensor) -> float:
    """Squared difference summed over pixels, both sides in [0, 1], averaged over images."""
    return float((answer.clamp(0, 1) - images.clamp(0, 1)).square().sum(1).mean())


def _images(spec: str) -> Tensor:
    """The training images, flattened to [N, d], in [0, 1]."""
    pictures = load_images(parse(spec)).splits["train"]
    pixels = np.stack([np.asarray(image) for image in pictures.images])
    return torch.from_numpy(pixels.reshape(len(pixels), -1)).float() / 255


def by_images(found: Mapping[str, Values]) -> dict[str, list[Values]]:
    """The cells of each image set, one per seed."""
    groups: dict[str, list[Values]] = {}
    for key, values in found.items():
        groups.setdefault(key.rsplit("-seed", 1)[0], []).append(values)
    return groups


def _over_seeds(seeds: Sequence[Values], point: int, memory: str, model: str) -> list[float]:
    return [seed["points"][point]["errors"][memory][model] for seed in seeds]


def models_of(seeds: Sequence[Values]) -> list[str]:
    """The models that every seed has an error of."""
    recorded = [seed["points"][0]["errors"]["clean"] for seed in seeds]
    return [model for model in MODELS if all(model in errors for errors in recorded)]


def missing_rivals(seeds: Sequence[Values]) -> str:
    """Which of the paper's baselines was not recorded, in words; empty if none is missing."""
    missing = [model for model in RIVALS if model not in models_of(seeds)]
    return f"not recorded: {'; '.join(missing)}, the authors' form of that model. " if missing else ""


def error_tables(found: Mapping[str, Values], axis: str, note: str) -> list[Table]:
    """A table for each image set: a column for each point of the axis, models as rows in each memory."""
    tables = []
    for name, seeds in by_images(found).items():
        points = [f"{axis} = {p['at']:g}" for p in seeds[0]["points"]]
        rows = [
            [memory, model, *(mean_std(_over_seeds(seeds, i, memory, model)) for i in range(len(points)))]
            for memory in MEMORIES
            for model in models_of(seeds)
        ]
        title = f"{name}: squared error of a retrieved image, {len(seeds)} seeds"
        columns = ["memory", "model", *points]
        tables.append(Table(title, columns, rows, dict.fromkeys(points, "low"), "memory", note))
    return tables


def draw_errors(found: Mapping[str, Values], folder: Path, name: str, label: str, log: bool) -> None:
    """Error over the axis: a row for each image set, a column for each memory."""
    groups = by_images(found)
    from matplotlib.patches import Patch

    figure, axes = drawing.new(9.0, 2.9 * len(groups) + 0.8, len(MEMORIES), len(groups))
    marks: dict[str, Any] = {}
    for row, (images, seeds) in enumerate(groups.items()):
        at = [p["at"] for p in seeds[0]["points"]]
        for column, memory in enumerate(MEMORIES):
            ax = np.atleast_2d(axes)[row, column]
            for model in models_of(seeds):
                values = np.array([_over_seeds(seeds, i, memory, model) for i in range(len(at))])
                style = _style(model)
                marks[model] = ax.plot(at, values.mean(1), **style)[0]
                ax.fill_between(at, values.min(1), values.max(1), color=style["color"], alpha=0.06, lw=0)
            ax.set_title(f"{images}, {memory}", fontsize=10)
            ax.set_xlabel(label)
            ax.set_xscale("log" if log else "linear")
            within = [model for model in models_of(seeds) if model != AUTHORS]
            others = [_over_seeds(seeds, i, memory, model) for model in within for i in range(len(at))]
            ax.set_ylim(0, 1.1 * float(np.max(others)))
        np.atleast_2d(axes)[row, 0].set_ylabel("squared error")
    marks["from the smallest to the largest over seeds"] = Patch(color="#888888", alpha=0.25, lw=0)
    drawing.legend(figure, marks)
    drawing.save(figure, folder, name)


def _style(model: str) -> dict[str, Any]:
    """OutEffHop lies on the dense model's curve, so it is drawn thin and dashed over a thick line."""
    style: dict[str, Any] = {"color": drawing.colour(model), "marker": drawing.marker(model), "ms": 4, "lw": 1.4}
    if model == "dense":
        return {**style, "lw": 4.0, "ms": 7, "alpha": 0.35}
    if model == AUTHORS:
        return {**style, "ls": ":", "marker": "x"}
    return {**style, "ls": "--", "zorder": 3} if model == "outeffhop" else style


def figure_of(name: str, title: str) -> Figure:
    caption = (
        "Means over seeds, shaded from the smallest to the largest. OutEffHop (dashed) lies on the dense model (thick) "
        "wherever γ is near 1; a model that seems to be missing lies under them."
    )
    return Figure(name, title, caption)


def conditions(found: Mapping[str, Values], queries: str) -> Values:
    groups = by_images(found)
    return {
        "images": ", ".join(f"{name} (size {seeds[0]['size']})" for name, seeds in groups.items()),
        "seeds": max(map(len, groups.values())),
        "queries": queries,
        "retrieval": f"one update, β = {BETA:g}; gsh with α = 1.5, polynomial of order {ORDER}",
        "outliers": f"one for ten images; Λ: cosine below {PART:g} of the median to {SHARE:.0%} of the others, n = 1; "
        "both numbers were chosen on MNIST and CIFAR-10",
    }


def compared(claim: str, name: str, seeds: Sequence[Values]) -> Verdict:
    """OutEffHop against the best of the paper's baselines in a clean memory, at the end of the axis."""
    end = seeds[0]["points"][-1]
    means = {model: mean(_over_seeds(seeds, -1, "clean", model)) for model in models_of(seeds)}
    rivals = {model: means[model] for model in RIVALS if model in means}
    ours, best = means["outeffhop"], min(rivals, key=rivals.__getitem__)
    by = (ours - rivals[best]) / max(rivals[best], 1e-12)
    apart = max(
        abs(a - b) / max(b, 1e-12)
        for i in range(len(seeds[0]["points"]))
        for a, b in zip(
            _over_seeds(seeds, i, "clean", "outeffhop"), _over_seeds(seeds, i, "clean", "dense"), strict=True
        )
    )
    missing = missing_rivals(seeds)
    said = ", ".join(f"{model} {error:.4g}" for model, error in rivals.items())
    return Verdict(
        f"{claim} ({name})",
        "not measured" if missing else judged(-by, TIE, len(seeds)),
        f"{missing}At {end['at']:g}, {end['images']} images: OutEffHop {ours:.4g}, {said} ({by:+.1%} against {best}; "
        f"less than {TIE:.0%} is a tie); the normalized polynomial, which the paper does not compare with, "
        f"{means['polynomial']:.4g}. Over the whole axis OutEffHop and dense differ by at most {apart:.1g} of the "
        "error: one update of OutEffHop is γ times one of the dense model.",
        len(seeds),
    )


def classified(name: str, seeds: Sequence[Values]) -> Verdict:
    """Whether Λ undoes the harm of outliers, averaged over the axis, and for which models."""
    points = range(len(seeds[0]["points"]))

    def error(memory: str, model: str) -> float:
        return mean(mean(_over_seeds(seeds, i, memory, model)) for i in points)

    clean, off, on = (error(memory, "outeffhop") for memory in MEMORIES)
    every = [point for seed in seeds for point in seed["points"]]
    total, caught = sum(p["outliers"] for p in every), sum(p["found"] for p in every)
    mistaken, images = sum(p["mistaken"] for p in every), sum(p["images"] for p in every)
    harmed, undone = off > clean * (1 + TIE), on - clean < 0.1 * (off - clean)
    dense = [error(memory, "dense") for memory in MEMORIES]
    alike = abs(on - dense[2]) <= TIE * dense[2] and abs(off - dense[1]) <= TIE * dense[1]
    return Verdict(
        f"The no-op classification Λ keeps outliers out of retrieval ({name})",
        "not seen" if not harmed else judged(1.0 if undone else -1.0, 0.0, len(seeds)),
        f"error {clean:.4g} clean, {off:.4g} polluted, {on:.4g} with Λ (dense: "
        + ("the same" if alike else f"{dense[0]:.4g}, {dense[1]:.4g}, {dense[2]:.4g}")
        + f"); {caught} of {total} outliers found, {mistaken} of {images} images taken for one",
        len(seeds),
    )
