"""A bound on weights: it closes in on the largest ones, leaves others alone, and is the same after a resume."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from runs import config, metrics, weight_bytes, weights
from torch import nn

from outeffhop.lab.training import RunFolder, resume, train
from outeffhop.lab.training.weight_bounds import WeightBounds
from outeffhop.models import load_checkpoint


def test_the_bound_closes_in():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight[3, 5] = -50.0
        model[2].weight[0] = 90.0  # the scale of a norm is not a matrix
    start = [p.clone() for p in model.parameters()]
    spread = model[0].weight.std().item()
    bounds = WeightBounds(model, 16.0, steps=10)
    assert set(bounds.bounds) == {"0.weight"}
    seen = []
    for step in range(13):
        bounds.apply(model, step)
        seen.append(-model[0].weight[3, 5].item())
    assert seen[0] == 50.0
    factors = [after / before for before, after in pairwise(seen[:11])]
    assert factors == pytest.approx([factors[0]] * 10, rel=1e-4)
    assert seen[10:] == pytest.approx([16.0 * spread] * 3)
    for before, after in zip(start, model.parameters(), strict=True):
        others = torch.ones_like(before, dtype=torch.bool)
        if before is start[0]:
            others[3, 5] = False
        assert torch.equal(before[others], after[others])


@pytest.fixture
def planted(whole_run, tmp_path):
    """A trained model with one huge weight."""
    source = tmp_path / "planted"
    model = load_checkpoint(whole_run("opt") / "model")
    with torch.no_grad():
        model.model.decoder.layers[0].fc2.weight[3, 5] = 9.0
    model.save_pretrained(source)
    for file in (whole_run("opt") / "model").glob("tokenizer*"):
        (source / file.name).write_bytes(file.read_bytes())
    return source


def test_in_a_run_and_after_a_resume(planted, cache, tmp_path):
    name = "model.decoder.layers.0.fc2.weight"
    before = load_checkpoint(planted).get_parameter(name)
    run = config("opt", tmp_path / "whole", cache, init=planted, weight_bound=10.0, keep=9)
    train(run, quiet=True)
    after = weights(run.out)[name]
    bound = 10.0 * before.std().item()
    assert 0.9 * bound < after.abs().max().item() <= bound * (1 + 1e-6)
    part = dataclasses.replace(run, out=str(tmp_path / "part"))
    train(part, quiet=True)
    folder = RunFolder(part.out)
    for step in (8, 12):
        place = folder.checkpoints / f"checkpoint-{step}"
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    resume(part.out, quiet=True)
    assert weight_bytes(run.out) == weight_bytes(part.out)
    assert metrics(run.out) == metrics(part.out)


def test_a_negative_bound_is_refused(cache, tmp_path):
    with pytest.raises(ValueError, match="weight_bound=-1"):
        train(config("opt", tmp_path / "a", cache, weight_bound=-1.0), quiet=True)
