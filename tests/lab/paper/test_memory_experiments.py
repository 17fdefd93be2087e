"""The experiments without a transformer, cut down: numbers recomputed by hand, verdicts that follow from numbers."""

import dataclasses
import json
import math
import re

import pytest
import torch
from sklearn.datasets import load_digits

from outeffhop.lab.paper import (
    Settings,
    energy_landscape,
    image_retrieval,
    memory_capacity,
    mil,
    noise_robustness,
    run,
    theory_bounds,
)
from outeffhop.lab.paper.experiment import Cell
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.paper.theory_result import verdicts as theory_verdicts

EXPERIMENTS = [
    module.EXPERIMENT for module in (energy_landscape, memory_capacity, mil, noise_robustness, theory_bounds)
]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_quick_form(experiment, out):
    result = run(experiment, Settings(out=out, quick=True), lambda line: None)
    folder = out / experiment.name
    assert list(ResultFile.load(out / f"{experiment.name}.json").result.verdicts) == list(result.verdicts)
    assert "mean nothing" in result.conditions["scale"]
    assert result.figures
    for figure in result.figures:
        assert (folder / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
    for table in result.tables:
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert set(table.better) <= set(table.columns)
    assert result.verdicts
    assert all(re.search(r"\d", verdict.numbers) for verdict in result.verdicts)


def test_cells_are_the_same_twice(out):
    for module in (memory_capacity, theory_bounds, mil):
        settings = Settings(out=out, quick=True)
        cell = module.cells(settings)[-1]
        assert json.dumps(module.measure(cell, settings)) == json.dumps(module.measure(cell, settings))


# Retrieval


def plain_digits():
    images = load_digits().images.round().reshape(-1, 64)
    return torch.from_numpy((images * (255 / 16)).round()).float() / 255


def test_a_capacity_cell_by_hand():
    settings = Settings(quick=True)
    cell = memory_capacity.cells(settings)[0]
    point = memory_capacity.measure(cell, settings)["points"][1]
    assert point["at"] == point["images"] == 20
    train = image_retrieval._images("builtin:images")
    everything = {tuple(row.tolist()) for row in plain_digits()}
    assert all(tuple(row.tolist()) in everything for row in train[:50])
    stored = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:20]]
    queries = stored * (torch.arange(64) < 32)
    scores = queries @ stored.T
    answers = {
        "dense": scores.softmax(-1) @ stored,
        "outeffhop": (scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))) @ stored,
        "polynomial": (scores**9 / (scores**9).sum(-1, keepdim=True)) @ stored,
        image_retrieval.AUTHORS: scores**10 @ stored,
    }
    for model, answer in answers.items():
        by_hand = ((answer.clamp(0, 1) - stored) ** 2).sum(1).mean()
        assert point["errors"]["clean"][model] == pytest.approx(by_hand.item(), rel=1e-4)


def test_outliers_harm_and_lambda_finds_them():
    point = memory_capacity.measure(Cell("x", {"images": "digits", "seed": 1, "axis": [100]}), Settings())["points"][0]
    assert point["outliers"] == point["found"] == 10
    assert point["mistaken"] == 0
    for model in image_retrieval.MODELS:
        if model == image_retrieval.AUTHORS:  # it retrieves nothing from a clean memory either
            continue
        assert point["errors"]["polluted"][model] > 2 * point["errors"]["clean"][model]
        assert point["errors"]["polluted, with Λ"][model] == pytest.approx(point["errors"]["clean"][model], rel=1e-3)


def test_noisy_queries_stay_in_range_and_without_noise_are_the_images():
    images = torch.rand(5, 12)
    noisy = noise_robustness.noisy(images, 4.0, torch.Generator().manual_seed(0))
    assert noisy.min() >= 0
    assert noisy.max() <= 1
    assert not torch.equal(noisy, images)
    assert torch.equal(noise_robustness.noisy(images, 0.0, torch.Generator().manual_seed(0)), images)


def test_squared_error_clamps_both_sides():
    answer, images = torch.tensor([[2.0, -1.0], [0.5, 0.0]]), torch.tensor([[1.0, 0.5], [0.0, 0.0]])
    assert image_retrieval.squared_error(answer, images) == pytest.approx((0.25 + 0.25) / 2)


def test_the_authors_polynomial_is_not_normalized():
    cell = Cell("x", {"images": "digits", "seed": 0, "axis": [500]})
    errors = memory_capacity.measure(cell, Settings())["points"][0]["errors"]["clean"]
    assert errors["polynomial"] == pytest.approx(3.50, abs=0.01)
    assert errors[image_retrieval.AUTHORS] == pytest.approx(35.0, abs=0.1)
    assert errors["outeffhop"] == pytest.approx(errors["dense"], rel=1e-3)
    assert errors["outeffhop"] == pytest.approx(3.61, abs=0.01)


def seeds_of(clean, polluted=None, classified=None, models=image_retrieval.MODELS, seeds=2):
    """Seeds with one point; a number for each of the models."""
    tables = (clean, polluted or clean, classified or clean)
    errors = {
        m: dict(zip(models, values, strict=True)) for m, values in zip(image_retrieval.MEMORIES, tables, strict=True)
    }
    point = {"at": 10, "images": 10, "outliers": 1, "found": 1, "mistaken": 0, "errors": errors}
    return [{"points": [point]}] * seeds


@pytest.mark.parametrize(
    ("ours", "says"), [(0.9, "confirmed"), (0.995, "not seen"), (1.005, "not seen"), (1.1, "contradicted")]
)
def test_the_verdict_on_figure_5_is_against_the_papers_baselines(ours, says):
    # dense, sparse, gsh, our polynomial, the authors', OutEffHop: gsh and ours are not the paper's
    verdict = image_retrieval.compared("claim", "digits", seeds_of([1.2, 1.3, 0.1, 0.1, 1.0, ours]))
    assert (verdict.verdict, verdict.seeds) == (says, 2)
    assert f"OutEffHop {ours:.4g}, dense 1.2, sparse 1.3, polynomial, unnormalized 1 " in verdict.numbers
    assert image_retrieval.compared("claim", "digits", seeds_of([1, 1, 1, 1, 1, 0.5], seeds=1)).verdict == "not seen"


def test_without_the_authors_polynomial_figures_5_and_6_are_not_measured():
    old = [m for m in image_retrieval.MODELS if m != image_retrieval.AUTHORS]
    seeds = seeds_of([1.2, 1.3, 1.0, 1.4, 0.5], models=old)
    for verdict in (image_retrieval.compared("claim", "digits", seeds), noise_robustness.least_rise("digits", seeds)):
        assert verdict.verdict == "not measured"
        assert verdict.numbers.startswith("not recorded: polynomial, unnormalized")
    (table,) = image_retrieval.error_tables({"digits-seed0": seeds[0]}, "M", "")
    assert [row[1] for row in table.rows[:5]] == old


@pytest.mark.parametrize(("off", "on", "says"), [(9, 1.0, "confirmed"), (9, 8.0, "contradicted"), (1, 1, "not seen")])
def test_the_verdict_on_lambda_follows_the_numbers(off, on, says):
    verdict = image_retrieval.classified("digits", seeds_of([1] * 6, [off] * 6, [on] * 6))
    assert verdict.verdict == says
    assert f"error 1 clean, {off} polluted, {on:.4g} with Λ" in verdict.numbers


def test_real_images_are_needed_beyond_the_tiny_scale(tmp_path):
    for experiment in (memory_capacity.EXPERIMENT, noise_robustness.EXPERIMENT, mil.EXPERIMENT):
        with pytest.raises(ValueError, match="needs the folder"):
            run(experiment, Settings(scale="small", out=tmp_path, data=tmp_path), lambda line: None)
    assert len(memory_capacity.cells(Settings(scale="paper", seeds=3))) == 10


# Energy


def test_an_energy_cell_by_hand():
    values = energy_landscape.measure(Cell("x", {"patterns": "centred", "n": 10, "points": 5}), Settings())
    # ∇T(0) = β ΞᵀΞ/(M + n) for patterns that sum to 0, and ΞᵀΞ = 1.5 for three unit patterns evenly spread
    assert values["eigenvalue"] == pytest.approx(8 * 1.5 / 13)
    assert values["moved"] < 1e-12
    moved = energy_landscape.measure(Cell("x", {"patterns": "one-sided", "n": 1, "points": 3}), Settings())["moved"]
    assert moved == pytest.approx(energy_landscape.stored("one-sided").sum(0).norm().item() / 4)


def test_the_verdict_on_the_no_op_point_follows_the_numbers(monkeypatch):
    calm = {"moved": 0.0, "eigenvalue": 0.5, "basin": 0.25, "unsettled": 0, "energy_rises": 0}
    found = {f"{name}-n{n}": dict(calm) for name in energy_landscape.PATTERNS for n in energy_landscape.NO_OPS}
    assert [v.verdict for v in energy_landscape.verdicts(found)] == ["confirmed"] * 3
    found["centred-n1"]["eigenvalue"], found["one-sided-n8"]["energy_rises"] = 1.5, 7
    first, _, last = energy_landscape.verdicts(found)
    assert first.verdict == "confirmed"  # it is about the space with the added dimension
    assert "eigenvalue 1.50" in first.numbers
    assert last.verdict == "contradicted"
    assert "7 queries" in last.numbers
    monkeypatch.setattr(energy_landscape, "LIFTED", 0.1)  # Ω is too close to the patterns' space to be stored
    assert energy_landscape.verdicts(found)[0].verdict == "contradicted"


def test_the_zero_energy_point_by_hand():
    found = energy_landscape.lifted("one-sided")
    # three patterns, each with the weight e^{−βC²} of Ω's
    assert found["moved"] == pytest.approx(3 * math.exp(-8 * 9) * energy_landscape.LIFTED, abs=1e-12)
    assert found["eigenvalue"] < 1e-6


# Theory


def test_bounds_by_hand():
    patterns = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = theory_bounds._against_bounds([(patterns, patterns[:1], torch.tensor([0]))], 4.0)
    e = math.exp(4)
    mass, dense = (e + 1 / e) / (1 + e + 1 / e), 2 * math.exp(-8)
    by_hand = {
        "dense": 1 - math.tanh(4),
        "outeffhop": 1 - (e - 1 / e) / (1 + e + 1 / e),
        "printed": mass * dense,
        "valid": mass * dense + (1 - mass),
    }
    assert found["medians"] == pytest.approx(by_hand)
    assert (found["printed_exceeds"], found["valid_exceeds"], found["closer"]) == (1.0, 0.0, 0.0)


def test_the_verdicts_on_the_theory_follow_the_numbers():
    settings = Settings(quick=True)
    found = {cell.values["topic"]: [theory_bounds.measure(cell, settings)] for cell in theory_bounds.cells(settings)}
    before = {v.claim: v.verdict for v in theory_verdicts(found)}
    assert before["Corollary: OutEffHop is at least as close where (γ + 1)/2 ≥ cos α"] == "not as printed"
    assert [word for claim, word in before.items() if claim.startswith("Theorem (capacity)")] == ["confirmed"]
    for case in found["bounds"][0].values():
        case.update(printed_exceeds=0.0)
    for case in found["capacity"][0].values():
        case.update(outeffhop=0)
    found["corollary"][0]["printed_wrong"] = 0.0
    found["dynamics"][0]["rises"] = 3
    after = {v.claim: v for v in theory_verdicts(found)}
    flipped = [claim for claim in before if after[claim].verdict != before[claim]]
    assert len(flipped) == 4
    assert not any("cosine" in claim for claim in before)  # the paper does not mention it
    assert "3 updates raised" in next(iter(after.values())).numbers


# Multiple-instance learning


@pytest.mark.parametrize("method", mil.METHODS)
def test_a_bags_score_is_its_own(method):
    torch.manual_seed(0)
    model = mil.BagClassifier(6, 8, 2, method).eval()
    bags = [torch.randn(n, 6) for n in (3, 5)]
    padded = torch.zeros(2, 5, 6)
    padded[0, :3], padded[0, 3:], padded[1] = bags[0], 9.0, bags[1]
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    alone = [model(bag[None], torch.zeros(1, len(bag), dtype=torch.bool)) for bag in bags]
    assert torch.allclose(model(padded, mask), torch.cat(alone), atol=1e-5)


def test_training_learns_bags_that_can_be_learned():
    bags = mil.load_bags("builtin:images", count=40, target=0, mean_size=3, std_size=0)
    asked = {"hidden": 16, "heads": 2, "method": "outeffhop", "epochs": 30, "batch": 8, "lr": 1e-2, "weight_decay": 0.0}
    right = (mil.scores(mil.trained(bags, asked, 0, "cpu"), bags, "cpu") > 0).long() == bags.labels
    untrained = mil.trained(bags, {**asked, "epochs": 0}, 0, "cpu")
    before = (mil.scores(untrained, bags, "cpu") > 0).long() == bags.labels
    assert right.double().mean() > 0.9 > before.double().mean()


@pytest.mark.parametrize(
    ("ours", "says"),
    [([0.9, 0.91, 0.9], "confirmed"), ([0.8, 0.82, 0.81], "not seen"), ([0.5, 0.52, 0.5], "contradicted")],
)
def test_the_verdict_on_bags_follows_the_numbers(ours, says):
    others = {"dense": [0.81, 0.8, 0.82], "sparse": [0.7, 0.7, 0.7], "gsh": [0.6, 0.6, 0.6]}
    seen = {("b", m): {"auc": auc} for m, auc in {**others, "polynomial": [0.5] * 3, "outeffhop": ours}.items()}
    verdict = mil.verdict(seen, "b", 3)
    assert verdict.verdict == says
    assert f"outeffhop {sum(ours) / 3:.3f}; against dense" in verdict.numbers
    assert mil.verdict(seen, "b", 1).verdict == "not seen"
    del seen["b", "polynomial"]
    verdict = mil.verdict(seen, "b", 3)
    assert verdict.verdict == ("not measured" if says == "confirmed" else says)
    assert verdict.numbers.endswith("not measured: polynomial") == (says == "confirmed")


def test_bags_are_compared_on_the_seeds_that_all_have(tmp_path):
    folds = {"auc": [0.8, 0.9], "accuracy": [0.8, 0.9]}
    found = {f"fox-{m}-seed{s}": folds for m in ("dense", "outeffhop") for s in range(3)}
    del found["fox-dense-seed1"]
    result = mil.conclude(found, Settings(quick=True), tmp_path)
    assert [row[:2] for row in result.tables[0].rows] == [["fox", "dense"], ["fox", "outeffhop"]]
    assert (result.verdicts[0].seeds, result.conditions["seeds"]) == (2, 2)
    assert "paired over 4 folds" in result.verdicts[0].numbers


def test_sources_follow_the_data_folder(tmp_path):
    settings = Settings(data=tmp_path)
    assert mil.sources(settings) == {"digit bags": "builtin:images"}
    assert image_retrieval.sources(settings) == {"digits": "builtin:images"}
    (tmp_path / "mnist").mkdir()
    assert mil.sources(settings) == {"mnist bags": str(tmp_path / "mnist")}
    assert image_retrieval.sources(settings) == {"mnist": str(tmp_path / "mnist")}
    assert image_retrieval.sources(dataclasses.replace(settings, data=None)) == {"digits": "builtin:images"}
