"""The tensors or layers to blame: what each of them costs the outputs alone, and what leaving them out gains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outeffhop.lab.diagnosis.comparing import Comparison
from outeffhop.lab.diagnosis.diagnosis_report import Blamed, Culprits, LeftOut
from outeffhop.metrics import Batch, evaluating
from outeffhop.quantization.evaluation import worst_rounded
from outeffhop.quantization.leaving import leaving
from outeffhop.quantization.simulation import simulation_of

__all__ = ["blame"]

_CANDIDATES = 8  # as many tensors or layers are looked at one by one
_SAMPLES = 2  # on so few samples


@torch.no_grad()
def blame(model: nn.Module, quantized: nn.Module, batch: Batch) -> Culprits:
    """Which tensors cost a quantized model most, on a few samples.

    Where sums and attention are rounded too, the candidates are single tensors. Where only Linear layers are, they are
    layers, each with its input and its weight. Those whose own values are rounded worst are tried one by one: with
    everything else in floating point, how far are the outputs off? Then the worst are left in floating point, more and
    more of them.

    Args:
        quantized: a frozen simulation of the model.
    """
    few = {name: value[:_SAMPLES] for name, value in batch.items()}
    simulation = simulation_of(quantized)
    by_layer = simulation.scheme.placement == "linear"
    everything = list(simulation.points)
    with evaluating(model):
        compare = Comparison(model, [few], "embedding")

        def decibels(passing: Sequence[str]) -> float:
            with leaving(quantized, model, passing):
                return compare(quantized, [few])["sqnr_db"]

        groups: dict[str, list[str]] = {}
        rows: dict[str, Any] = {}
        for row in worst_rounded(model, quantized, few, None):
            unit = row.name.rpartition("/")[0] if by_layer else row.name
            if unit not in rows and len(rows) == _CANDIDATES:
                break
            rows.setdefault(unit, row)
            groups[unit] = [n for n in everything if n.rpartition("/")[0] == unit] if by_layer else [unit]
        alone = {unit: decibels([n for n in everything if n not in names]) for unit, names in groups.items()}
        ranked = sorted(groups, key=lambda unit: alone[unit])
        tensors = tuple(
            Blamed(unit, alone[unit], rows[unit].typical_db, rows[unit].largest, rows[unit].std) for unit in ranked
        )
        left, count = [], 1
        while count <= len(ranked):
            left.append(LeftOut(count, decibels([name for unit in ranked[:count] for name in groups[unit]])))
            count *= 2
        return Culprits(
            scheme=simulation.scheme.name,
            units="layers" if by_layer else "tensors",
            among=len({n.rpartition("/")[0] for n in everything}) if by_layer else len(everything),
            sqnr_db=decibels([]),
            tensors=tensors,
            left_out=tuple(left),
        )
