"""Verdicts on Figures 2, 3 and 4: outliers over training, with depth, and within one layer."""

from __future__ import annotations

from statistics import mean

from outeffhop.lab.paper import published
from outeffhop.lab.paper.experiment import Values, Verdict
from outeffhop.lab.paper.ranking import judged, mean_std, shown, surplus
from outeffhop.lab.paper.training_components import (
    COMPONENTS,
    FFN,
    FFN_1,
    FFN_2,
    FIRST_NORM,
    component,
    ffn_layers,
    late,
    layer_curve,
    shown_layer,
)

__all__ = ["Curves", "depth_verdicts", "ffn_verdict", "growth_verdict", "norm_verdict", "verdicts"]

MARGIN = 0.05  # smaller differences do not count
_LATE = "second half of training"

Curves = dict[tuple[str, str], list[Values]]  # (model, method) → a curve of each seed


def verdicts(curves: Curves, models: list[str]) -> list[Verdict]:
    """Figure 2 is of four models and three pairs, Figures 3 and 4 of BERT, vanilla and with OutEffHop."""
    found = [growth_verdict(curves, model, *pair) for model in models for pair in published.PAIRS]
    if "bert" in models:
        found += [*depth_verdicts(curves), ffn_verdict(curves), norm_verdict(curves)]
    return found


def growth_verdict(curves: Curves, model: str, old: str, new: str) -> Verdict:
    """Differences within ``MARGIN``, or within two standard errors over seeds, do not count."""
    claim = f"{published.NAMES[model]}: max inf norm during training is lower with {new} than with {old}"
    sides = [curves.get((model, method), []) for method in (old, new)]
    if not all(sides):
        return Verdict(claim, "not measured", "")
    layer = shown_layer(model, sides[0][0]["tensors"])
    before, after = ([late(layer_curve(model, curve, layer)) for curve in side] for side in sides)
    numbers = f"{mean_std(after, 3)} against {mean_std(before, 3)} (layer {layer}, {_LATE})"
    seeds = min(map(len, sides))
    return Verdict(claim, judged(surplus(before, after) / mean(before), MARGIN, seeds), numbers, seeds)


def _bert(curves: Curves) -> list[list[Values]]:
    """The seeds of vanilla and of OutEffHop."""
    return [curves.get(("bert", method), []) for method in published.PAIRS[0]]


def depth_verdicts(curves: Curves) -> list[Verdict]:
    """The trend with depth: of vanilla from the first layer shown to the last, and OutEffHop's against vanilla's."""
    grows = "BERT: in vanilla, outliers of the FFN output grow with depth"
    level = "BERT: the FFN output's norm is more even over the layers with OutEffHop"
    sides = _bert(curves)
    if not all(sides):
        return [Verdict(grows, "not measured", ""), Verdict(level, "not measured", "")]
    layers = ffn_layers(sides[0][0]["tensors"])
    old, new = (_by_layer(side, layers) for side in sides)
    if old is None or new is None:
        missing = "the FFN output was not recorded"
        return [Verdict(grows, "not measured", missing), Verdict(level, "not measured", missing)]
    if len(layers) < 2:
        return [Verdict(claim, "not measured", f"{len(layers)} layer has no trend") for claim in (grows, level)]
    places = ", ".join(map(str, layers))
    said = [", ".join(shown(mean(norms), 3) for norms in zip(*side, strict=True)) for side in (old, new)]
    first, last = [norms[0] for norms in old], [norms[-1] for norms in old]
    before, after = ([max(norms) / min(norms) for norms in side] for side in (old, new))
    seeds = min(map(len, sides))
    return [
        Verdict(
            grows,
            judged(surplus(last, first) / mean(first), MARGIN, len(old)),
            f"{said[0]} in layers {places}, {_LATE}",
            len(old),
        ),
        Verdict(
            level,
            judged(surplus(before, after) / mean(before), MARGIN, seeds),
            f"{said[1]} against {said[0]} in layers {places}; largest over smallest {mean_std(after, 3)} "
            f"against {mean_std(before, 3)}",
            seeds,
        ),
    ]


def _by_layer(side: list[Values], layers: list[int]) -> list[list[float]] | None:
    """The norm of the FFN output in each layer, for each seed."""
    found = [[component(curve, layer, FFN["bert"]) for layer in layers] for curve in side]
    known = [[late(norms) for norms in seed if norms is not None] for seed in found]
    return known if all(len(seed) == len(layers) for seed in known) else None


def _of_component(side: list[Values], name: str) -> list[float] | None:
    """The norm of one of BERT's components, for each seed; None if one did not record it."""
    found = [component(c, shown_layer("bert", c["tensors"]), COMPONENTS["bert"][name]) for c in side]
    known = [late(norms) for norms in found if norms is not None]
    return known if side and len(known) == len(side) else None


def ffn_verdict(curves: Curves) -> Verdict:
    """Confirmed if both norms are lower by more than chance, contradicted if one is higher."""
    claim = "BERT: OutEffHop suppresses the outliers in both FFN layers"
    parts = {name: [_of_component(side, name) for side in _bert(curves)] for name in (FFN_1, FFN_2)}
    gains, numbers, seeds = [], [], []
    for name, (old, new) in parts.items():
        if old is None or new is None:
            return Verdict(claim, "not measured", f"the {name} was not recorded")
        gains.append(surplus(old, new) / mean(old))
        numbers.append(f"{name} {mean_std(new, 3)} against {mean_std(old, 3)}")
        seeds.append(min(len(old), len(new)))
    return Verdict(claim, judged(min(gains), MARGIN, min(seeds)), f"{', '.join(numbers)}, {_LATE}", min(seeds))


def norm_verdict(curves: Curves) -> Verdict:
    """The limitation that the paper states: there, OutEffHop's outliers are the larger ones."""
    claim = "BERT: OutEffHop's outliers are larger than vanilla's after the first residual LayerNorm"
    old, new = (_of_component(side, FIRST_NORM) for side in _bert(curves))
    if old is None or new is None:
        return Verdict(claim, "not measured", f"the {FIRST_NORM} was not recorded")
    seeds = min(len(old), len(new))
    numbers = f"{mean_std(new, 3)} against {mean_std(old, 3)}, {_LATE}"
    return Verdict(claim, judged(surplus(new, old) / mean(old), MARGIN, seeds), numbers, seeds)
