"""Data that needs no download: shipped with Python or scikit-learn, or computed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outeffhop._naming import require

__all__ = ["digits", "synthetic_series", "topics"]


def topics() -> list[str]:
    """Python's documentation topics, sorted by name.

    Some topics repeat whole sections of longer ones. A topic is left out if less than half of it is new, so that the
    test text does not occur in the training text. The text differs a little between versions of Python.
    """
    from pydoc_data.topics import topics as by_name

    seen: set[str] = set()
    kept: dict[str, str] = {}
    for name in sorted(by_name, key=lambda n: (-len(by_name[n]), n)):
        text = by_name[name].strip()
        passages = [passage.strip() for passage in text.split("\n\n")]
        new = sum(len(passage) for passage in passages if passage not in seen)
        if 2 * new >= sum(map(len, passages)) > 0:
            kept[name] = text
            seen.update(passages)
    return [kept[name] for name in sorted(kept)]


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """scikit-learn's handwritten digits: images [1797, 8, 8, 1] and their classes 0 to 9."""
    found = require("sklearn.datasets").load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)  # pixels are from 0 to 16
    return images[..., None], found.target.astype(np.int64)


def synthetic_series(rows: int = 4000, series: int = 7, seed: int = 0) -> tuple[list[str], NDArray[np.float64]]:
    """A multivariate hourly series that can be forecast in part: dates and values [rows, series].

    With t in hours, series i is

        x_i(t) = a_i sin(2π t/24 + φ_i) + b_i sin(2π t/168 + ψ_i) + c_i t/rows + Σ_j M_ij n_j(t),
        n_j(t) = 0.9 n_j(t − 1) + 0.2 ε_j(t),   ε ~ N(0, 1):

    a daily and a weekly wave, a slow trend, and autoregressive noise of order 1. The matrix M = I + 0.3 G/√series with
    Gaussian G mixes the noise of the series. Amplitudes are a ~ U(0.5, 1.5), b ~ U(0.2, 0.8), c ~ N(0, 0.3²), phases
    are uniform. A forecaster can learn the waves and the decay of the noise, but not its new shocks.
    """
    random = np.random.default_rng(seed)
    hours = np.arange(rows)[:, None]
    a, b = random.uniform(0.5, 1.5, series), random.uniform(0.2, 0.8, series)
    c = random.normal(0.0, 0.3, series)
    daily, weekly = random.uniform(0.0, 2 * np.pi, (2, series))
    mixing = np.eye(series) + 0.3 * random.normal(size=(series, series)) / np.sqrt(series)
    shocks = 0.2 * random.normal(size=(rows, series))
    noise = np.empty_like(shocks)
    state = np.zeros(series)
    for t in range(rows):
        state = 0.9 * state + shocks[t]
        noise[t] = state
    waves = a * np.sin(2 * np.pi * hours / 24 + daily) + b * np.sin(2 * np.pi * hours / 168 + weekly)
    dates = np.datetime64("2020-01-01T00") + np.arange(rows)
    return [str(date) for date in dates], waves + c * hours / rows + noise @ mixing.T
