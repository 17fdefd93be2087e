"""What a checkpoint holds beside the weights comes back bit for bit, and nothing of it is a pickle."""

import json
import random

import numpy as np
import pytest
import torch
from runs import METHODS, MODELS, SIZES

from outeffhop.lab.training import RunConfig, RunFolder, training_state
from outeffhop.lab.training.optimization import make_optimizer
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import presets

BATCHES = {
    "bert": lambda: {"input_ids": torch.randint(9, (2, 8)), "labels": torch.randint(9, (2, 8))},
    "opt": lambda: {"input_ids": torch.randint(9, (2, 8)), "labels": torch.randint(9, (2, 8))},
    "vit": lambda: {"pixel_values": torch.randn(2, 1, 8, 8), "labels": torch.randint(9, (2,))},
    "stanhop": lambda: {"past_values": torch.randn(2, 48, 7), "future_values": torch.randn(2, 24, 7)},
}


def trained(name, method, steps=2):
    """A model and its optimizer after some steps."""
    torch.manual_seed(0)
    model = presets.build(name, "tiny", method, **SIZES[name]).train()
    optimizer = make_optimizer(model, resolve(RunConfig(model=name, data="x")).train, name == "opt")
    for _ in range(steps):
        model(**BATCHES[name]()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def equal(first, second):
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


@pytest.mark.parametrize(
    ("name", "method"), [*(("opt", m) for m in METHODS), *((n, "gated-outeffhop") for n in MODELS)]
)
def test_the_optimizer_comes_back(name, method, tmp_path):
    model, optimizer = trained(name, method)
    training_state.save_optimizer(training_state.optimizer_state(model, optimizer), tmp_path)
    other, fresh = trained(name, method, steps=0)
    training_state.load_optimizer(other, fresh, tmp_path)
    names = {id(p): n for n, p in model.named_parameters()}
    kept = {names[id(p)]: entries for p, entries in optimizer.state.items()}
    names = {id(p): n for n, p in other.named_parameters()}
    found = {names[id(p)]: entries for p, entries in fresh.state.items()}
    assert kept.keys() == found.keys()
    for parameter, entries in kept.items():
        assert entries.keys() == found[parameter].keys()
        assert all(equal(value, found[parameter][key]) for key, value in entries.items()), parameter
    for before, after in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert {k: v for k, v in before.items() if k != "params"} == {k: v for k, v in after.items() if k != "params"}
    # and the next step is the same
    model.eval(), other.eval()
    other.load_state_dict(model.state_dict())
    batch = BATCHES[name]()
    for each, its in ((model, optimizer), (other, fresh)):
        each(**batch).loss.backward()
        its.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "method"), [*(("bert", m) for m in METHODS), *((n, "gated-outeffhop") for n in MODELS)]
)
def test_the_weights_come_back(name, method, tmp_path):
    model, _ = trained(name, method)
    model.save_pretrained(tmp_path, state_dict=training_state.model_state(model))
    other, _ = trained(name, method, steps=0)
    training_state.load_model_state(other, tmp_path)
    before, after = model.state_dict(), other.state_dict()
    assert before.keys() == after.keys()
    assert all(equal(before[k], after[k]) for k in before)


def test_tied_weights_stay_tied(tmp_path):
    model, _ = trained("opt", "outeffhop")
    model.save_pretrained(tmp_path, state_dict=training_state.model_state(model))
    other, _ = trained("opt", "outeffhop", steps=0)
    training_state.load_model_state(other, tmp_path)
    assert other.lm_head.weight is other.model.decoder.embed_tokens.weight
    assert torch.equal(other.lm_head.weight, model.lm_head.weight)


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))


def test_random_numbers_go_on(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draw()  # gauss and randn keep a second number back
    training_state.save_random_state(tmp_path, 0)
    expected = [draw() for _ in range(3)]
    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    training_state.load_random_state(tmp_path, 0)
    assert [draw() for _ in range(3)] == expected


def test_a_new_process_keeps_its_own_random_numbers(tmp_path):
    training_state.save_random_state(tmp_path, 0)
    torch.manual_seed(3)
    expected = float(torch.rand(()))
    torch.manual_seed(3)
    training_state.load_random_state(tmp_path, 1)
    assert float(torch.rand(())) == expected


@pytest.mark.parametrize("name", MODELS)
def test_no_pickle(whole_run, name):
    folder = RunFolder(whole_run(name))
    files = [p for p in folder.path.rglob("*") if p.is_file()]
    assert {p.suffix for p in files} <= {".json", ".jsonl", ".safetensors", ".yaml", ".lock", ".txt", ".md"}
    assert any(p.name == "optimizer.safetensors" for p in files)
    for file in files:
        assert file.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"PK"), file
        if file.suffix == ".json":
            json.loads(file.read_text())
