"""Figure 5: retrieval error over the number of stored images, of six Hopfield models."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from outeffhop.lab.paper import image_retrieval
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings, Values

__all__ = ["EXPERIMENT"]

SIZES = (10, 20, 30, 50, 100, 200, 500)
CLAIM = "Figure 5: OutEffHop outperforms its baselines, especially when the memory is large"


def cells(settings: Settings) -> list[Cell]:
    return image_retrieval.cells(settings, SIZES[:2] if settings.quick else SIZES)


def measure(cell: Cell, settings: Settings) -> Values:
    return image_retrieval.errors(cell, settings, int, half_hidden)


def half_hidden(images: Tensor, size: float, rng: torch.Generator) -> Tensor:
    """The upper half of each image; the pixels of the lower half are 0."""
    queries = images.clone()
    queries[:, images.shape[1] // 2 :] = 0
    return queries


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    image_retrieval.draw_errors(found, folder, "memory-capacity", "images in memory, M", log=True)
    groups = image_retrieval.by_images(found)
    return EXPERIMENT.result(
        image_retrieval.error_tables(found, "M", "Queries: the upper half of each stored image; one update, β = 1."),
        [image_retrieval.figure_of("memory-capacity", "Retrieval error over memory size")],
        [
            *(image_retrieval.compared(CLAIM, name, seeds) for name, seeds in groups.items()),
            *(image_retrieval.classified(name, seeds) for name, seeds in groups.items()),
        ],
        image_retrieval.conditions(found, "the upper half of an image, the rest 0"),
    )


EXPERIMENT = Experiment(
    "memory-capacity",
    "Figure 5",
    "Retrieval of half-hidden images over memory size, in clean memories and in those polluted with outliers.",
    cells,
    measure,
    conclude,
    image_retrieval.needs,
    partial=True,
)
