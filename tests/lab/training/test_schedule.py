"""What is decayed, and the learning rate, against values by hand."""

import math

import pytest
import torch
from runs import MODELS, SIZES

from outeffhop.lab.training import RunConfig, TrainConfig
from outeffhop.lab.training.optimization import make_optimizer, make_schedule
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import presets


def groups(name, method="gated-outeffhop(sink=learned)", **given):
    """The names of what is decayed, and of what is not."""
    model = presets.build(name, "tiny", method, **SIZES[name])
    train = resolve(RunConfig(model=name, data="x", train=TrainConfig(weight_decay=0.25, **given))).train
    optimizer = make_optimizer(model, train, decay_norms=name == "opt")
    names = {id(p): n for n, p in model.named_parameters()}
    decayed, plain = set(), set()
    for group in optimizer.param_groups:
        assert group["weight_decay"] in (0.0, 0.25)
        (decayed if group["weight_decay"] else plain).update(names[id(p)] for p in group["params"])
    assert decayed | plain == set(names.values())
    assert not decayed & plain
    return decayed, plain, optimizer


@pytest.mark.parametrize("name", MODELS)
def test_biases_gates_and_sinks_are_not_decayed(name):
    decayed, plain, _ = groups(name)
    assert not [n for n in decayed if n.endswith("bias")]
    model = presets.build(name, "tiny", "gated-outeffhop(sink=learned)", **SIZES[name])
    without = presets.build(name, "tiny", "vanilla", **SIZES[name])
    ours = {n for n, _ in model.named_parameters()} - {n for n, _ in without.named_parameters()}
    assert ours  # gates and learned sinks
    assert ours <= plain
    # Every matrix of a Linear is
    matrices = {f"{n}.weight" for n, m in without.named_modules() if isinstance(m, torch.nn.Linear)}
    tied = {"lm_head.weight", "cls.predictions.decoder.weight"}
    assert matrices - tied <= decayed


@pytest.mark.parametrize("name", MODELS)
def test_only_opt_decays_the_scales_of_norms(name):
    decayed, plain, _ = groups(name)
    model = presets.build(name, "tiny", "vanilla", **SIZES[name])
    scales = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, torch.nn.LayerNorm)}
    assert scales
    assert scales <= (decayed if name == "opt" else plain)


def test_embeddings_are_decayed_once():
    decayed, _, optimizer = groups("opt")
    assert "model.decoder.embed_tokens.weight" in decayed
    counted = [id(p) for g in optimizer.param_groups for p in g["params"]]
    assert len(counted) == len(set(counted))  # the head has the same weights


def test_frozen_weights_are_left_out():
    model = presets.build("opt", "tiny", "vanilla", **SIZES["opt"])
    model.model.decoder.embed_tokens.weight.requires_grad_(False)
    train = resolve(RunConfig(data="x")).train
    held = {id(p) for g in make_optimizer(model, train, True).param_groups for p in g["params"]}
    assert id(model.model.decoder.embed_tokens.weight) not in held


def test_the_optimizer_asked_for():
    assert type(groups("bert", optimizer="adam")[2]) is torch.optim.Adam
    optimizer = groups("bert", optimizer="adamw", betas=(0.5, 0.6), lr=0.125)[2]
    assert type(optimizer) is torch.optim.AdamW
    assert all(g["betas"] == (0.5, 0.6) and g["lr"] == 0.125 for g in optimizer.param_groups)


def rates(steps, per_epoch=100, **given):
    """The learning rate each step is taken with."""
    weight = torch.nn.Parameter(torch.zeros(1))
    train = TrainConfig(lr=2.0, **({"max_steps": steps, "warmup_steps": 0, "min_lr": 0.0} | given))
    optimizer = torch.optim.SGD([weight], lr=2.0)
    schedule = make_schedule(optimizer, train, per_epoch)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_linear():
    assert rates(4, schedule="linear") == [2.0, 1.5, 1.0, 0.5]


def test_linear_after_warm_up():
    assert rates(7, schedule="linear", warmup_steps=3) == pytest.approx([0.5, 1.0, 1.5, 2.0, 1.5, 1.0, 0.5])


def test_linear_to_its_least():
    assert rates(4, schedule="linear", min_lr=0.4) == pytest.approx([2.0, 1.6, 1.2, 0.8])


def test_cosine_to_its_least():
    found = rates(6, schedule="cosine", warmup_steps=1, min_lr=0.4)
    by_hand = [0.4 + 1.6 * 0.5 * (1 + math.cos(math.pi * i / 5)) for i in range(5)]
    assert found == pytest.approx([1.0, *by_hand])
    assert rates(1000, schedule="cosine", min_lr=0.4)[-1] == pytest.approx(0.4, abs=1e-4)


def test_halved_after_every_two_epochs():
    found = rates(42, schedule="halving", per_epoch=3)
    by_hand = [2.0 * 0.5 ** min(step // 6, 5) for step in range(42)]
    assert found == by_hand
    assert found[5:7] == [2.0, 1.0]
    assert found[-1] == 2.0 / 32  # five times, and no more


def test_all_of_it_warm_up():
    assert rates(2, schedule="linear", warmup_steps=9) == pytest.approx([0.2, 0.4])


def test_a_rate_of_zero():
    train = TrainConfig(lr=0.0, max_steps=2, warmup_steps=0, min_lr=0.0, schedule="cosine")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    assert make_schedule(optimizer, train, 1).get_last_lr() == [0.0]
