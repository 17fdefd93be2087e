"""Figures 2, 3 and 4: which layers and tensors they are of, and verdicts that follow the numbers."""

import pytest

from outeffhop.lab.paper import Settings, run
from outeffhop.lab.paper.registry import find
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.paper.table1 import config_of
from outeffhop.lab.paper.training_components import (
    COMPONENTS,
    counted,
    depth_of,
    ffn_layers,
    late,
    layer_curve,
    shown_layer,
)
from outeffhop.lab.paper.training_verdicts import depth_verdicts, ffn_verdict, growth_verdict, norm_verdict, verdicts
from outeffhop.lab.training.checks import chosen_tensors
from outeffhop.models import presets
from outeffhop.outliers.tensors import pick


def names(depth):
    return [f"bert.encoder.layer.{i}.output.dense" for i in range(depth)]


@pytest.mark.parametrize(
    ("depth", "shown", "ffn"), [(12, 10, [3, 6, 9, 10]), (24, 10, [3, 6, 9, 10]), (6, 4, [1, 3, 4]), (1, 0, [0])]
)
def test_smaller_models_show_the_nearest_layers(depth, shown, ffn):
    assert depth_of(names(depth)) == depth
    assert shown_layer("bert", names(depth)) == shown
    assert ffn_layers(names(depth)) == ffn


def test_stanhop_shows_layer_nine():
    assert shown_layer("stanhop", [f"decoder.{i}.sthm.time_mlp.2" for i in range(12)]) == 9


@pytest.mark.parametrize("model", COMPONENTS)
def test_components_are_those_of_the_model_and_are_recorded(model, tmp_path):
    cell = next(c for c in find("table1").cells(Settings()) if c.values["model"] == model)
    train = config_of(cell, Settings(out=tmp_path)).train
    built = presets.build(model, "tiny", "vanilla")
    recorded = [p.name for p in pick(built, chosen_tensors(train.outlier_tensors))]
    for layer in range(depth_of(recorded)):
        for name in COMPONENTS[model].values():
            assert sum(tensor.endswith(f".{layer}.{name}") for tensor in recorded) == 1
    papers = pick(built)
    assert [p.name for p in papers if p.name not in recorded] == []
    assert {t for t in recorded if counted(model, t)} == {p.name for p in papers}
    assert {t for t in recorded if counted(model, t, kurtosis=True)} == {p.name for p in papers if p.kurtosis}


def test_the_figures_of_bert_have_every_component(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "cache"))
    keys = ("bert-vanilla-0", "bert-outeffhop-0")
    settings = Settings(out=tmp_path, seeds=1, quick=True, only=keys)
    result = run(find("training-outliers"), settings, tell=lambda _: None)
    curve = ResultFile.load(tmp_path / "training-outliers.json").cells[keys[0]].found
    of_paper = [norms for tensor, norms in curve["tensors"].items() if counted("bert", tensor)]
    assert len(curve["tensors"]) == 6  # of one layer
    assert len(of_paper) == 3
    assert curve["max_inf_norm"] == [max(at) for at in zip(*of_paper, strict=True)]
    said = {v.claim: v for v in result.verdicts}
    of_figure_4 = [v.verdict for claim, v in said.items() if "FFN layers" in claim or "residual LayerNorm" in claim]
    assert of_figure_4 == ["not seen"] * 2  # one seed
    of_figure_3 = [v.numbers for claim, v in said.items() if "FFN output" in claim]
    assert len(of_figure_3) == 2
    assert all("one" in numbers or "1 layer" in numbers for numbers in of_figure_3)


# made-up curves


def curve(ffn=(1.0, 1.0), **parts):
    """Of four layers: ``ffn`` are the norms of layers 1 and 2, which are shown; ``parts`` are those of layer 2."""
    tensors = {f"layer.{i}.output.dense": [9.0, norm, norm] for i, norm in enumerate((50.0, *ffn, 50.0))}
    tensors |= {f"layer.2.{name.replace('__', '.')}": [9.0, norm, norm] for name, norm in parts.items()}
    return {"steps": [1, 2, 3], "max_inf_norm": [9.0, 9.0, 9.0], "tensors": tensors}


def pair(old, new, model="bert", methods=("vanilla", "outeffhop")):
    return {(model, method): side for method, side in zip(methods, (old, new), strict=True)}


def test_a_layers_curve_is_of_the_papers_tensors():
    found = curve((1.0, 2.0), intermediate__dense=50.0, output__LayerNorm=3.0)
    assert layer_curve("bert", found, 2) == [9.0, 3.0, 3.0]
    assert late([9.0, 3.0, 5.0]) == 4.0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ([3.0, 3.1], [2.0, 2.1], "confirmed"),
        ([3.0, 3.1], [4.0, 4.1], "contradicted"),
        ([3.0, 3.1], [3.0, 3.1], "not seen"),
        ([60, 62, 64], [40, 41, 75], "not seen"),
        ([3.0], [2.0], "not seen"),
    ],
)
@pytest.mark.parametrize("methods", [("vanilla", "outeffhop"), ("gated", "gated-outeffhop")])
def test_growth_verdict_is_of_the_shown_layer(methods, old, new, said):
    sides = ([curve((99.0, norm)) for norm in norms] for norms in (old, new))
    verdict = growth_verdict(pair(*sides, methods=methods), "bert", *methods)
    assert verdict.verdict == said
    assert verdict.seeds == min(len(old), len(new))
    assert growth_verdict({}, "bert", *methods).verdict == "not measured"


@pytest.mark.parametrize(
    ("old", "new", "grows", "level"),
    [
        ([(1, 9), (1.1, 9)], [(1, 2), (1, 2.1)], "confirmed", "confirmed"),
        ([(9, 1), (9, 1.1)], [(1, 1), (1, 1)], "contradicted", "confirmed"),
        ([(1, 2), (1, 2.1)], [(1, 9), (1, 9.1)], "confirmed", "contradicted"),
        ([(1, 1), (1, 1)], [(1, 1), (1, 1)], "not seen", "not seen"),
        ([(1, 9)], [(1, 1)], "not seen", "not seen"),
    ],
)
def test_the_trend_with_depth(old, new, grows, level):
    found = depth_verdicts(pair(*([curve(ffn) for ffn in side] for side in (old, new))))
    assert [v.verdict for v in found] == [grows, level]


def layers(first, second, norm):
    parts = {"intermediate__dense": first, "attention__output__LayerNorm": norm}
    return [curve((1.0, second + x), **{k: v + x for k, v in parts.items()}) for x in (0.0, 0.01)]


@pytest.mark.parametrize(
    ("new", "ffn", "norm"),
    [
        ((1, 1, 9), "confirmed", "confirmed"),
        ((1, 9, 1), "contradicted", "contradicted"),
        ((1, 5, 5), "not seen", "not seen"),
    ],
)
def test_within_one_layer(new, ffn, norm):
    curves = pair(layers(5, 5, 5), layers(*new))
    assert ffn_verdict(curves).verdict == ffn
    assert norm_verdict(curves).verdict == norm


def test_what_was_not_recorded_is_not_measured():
    curves = pair(*([curve((1.0, 2.0)), curve((1.0, 2.0))] for _ in range(2)))
    said = [v for v in verdicts(curves, ["bert"]) if "FFN layers" in v.claim or "residual LayerNorm" in v.claim]
    assert [v.verdict for v in said] == ["not measured"] * 2
    assert "was not recorded" in ffn_verdict(curves).numbers
