"""Figure 6: retrieval error over the noise in queries, of six Hopfield models."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

from outeffhop.lab.paper import image_retrieval
from outeffhop.lab.paper.experiment import Cell, Experiment, Result, Settings, Values, Verdict
from outeffhop.lab.paper.ranking import judged

__all__ = ["EXPERIMENT"]

STORED = 100
NOISE = (0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 0.7, 1.0, 1.2, 1.4, 2.0, 3.0, 4.0)
CLAIM = "Figure 6: OutEffHop excels when the signal-to-noise ratio is low"


def cells(settings: Settings) -> list[Cell]:
    return image_retrieval.cells(settings, NOISE[::6] if settings.quick else NOISE)


def measure(cell: Cell, settings: Settings) -> Values:
    return image_retrieval.errors(cell, settings, lambda deviation: STORED, noisy)


def noisy(images: Tensor, deviation: float, rng: torch.Generator) -> Tensor:
    """clamp(|x + N(0, σ²)|, 0, 1)."""
    noise = torch.randn(images.shape, generator=rng).to(images)
    return (images + deviation * noise).abs().clamp(0, 1)


def least_rise(name: str, seeds: list[Values]) -> Verdict:
    """How much each model's error rises from the least noise to the most."""

    def at(point: int, model: str) -> float:
        return mean(seed["points"][point]["errors"]["clean"][model] for seed in seeds)

    rise = {model: at(-1, model) - at(0, model) for model in image_retrieval.models_of(seeds)}
    others = min(rise[model] for model in image_retrieval.RIVALS if model in rise)
    by = (rise["outeffhop"] - others) / max(abs(others), 1e-12)
    tie, missing = image_retrieval.TIE, image_retrieval.missing_rivals(seeds)
    return Verdict(
        f"Figure 6: noise has the least effect on OutEffHop ({name})",
        "not measured" if missing else judged(-by, tie, len(seeds)),
        f"{missing}Rise of the error from σ = {seeds[0]['points'][0]['at']:g} to {seeds[0]['points'][-1]['at']:g}: "
        + ", ".join(f"{model} {value:.4g}" for model, value in rise.items())
        + f" (OutEffHop {by:+.1%} against the least of the paper's baselines; less than {tie:.0%} is a tie).",
        len(seeds),
    )


def conclude(found: dict[str, Values], settings: Settings, folder: Path) -> Result:
    image_retrieval.draw_errors(found, folder, "noise-robustness", "standard deviation of the noise, σ", log=False)
    groups = image_retrieval.by_images(found)
    return EXPERIMENT.result(
        image_retrieval.error_tables(found, "σ", f"{STORED} images in memory; one update, β = 1."),
        [image_retrieval.figure_of("noise-robustness", "Retrieval error over noise")],
        [
            *(image_retrieval.compared(CLAIM, name, seeds) for name, seeds in groups.items()),
            *(least_rise(name, seeds) for name, seeds in groups.items()),
            *(image_retrieval.classified(name, seeds) for name, seeds in groups.items()),
        ],
        image_retrieval.conditions(found, "clamp(|x + N(0, σ²)|, 0, 1)"),
    )


EXPERIMENT = Experiment(
    "noise-robustness",
    "Figure 6",
    "Retrieval of noisy images over the noise's size, in clean memories and in those polluted with outliers.",
    cells,
    measure,
    conclude,
    image_retrieval.needs,
    partial=True,
)
