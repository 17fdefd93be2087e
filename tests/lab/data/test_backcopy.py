"""Backcopy: what follows what, and which symbols count as copies."""

import pytest
import torch

from outeffhop.lab.data import Backcopy


def test_every_sequence_follows_the_rules():
    task = Backcopy(symbols=10, triggers=2, length=50)
    ids = task.sample(200, seed=1)
    assert ids.shape == (200, 50)
    assert (ids[:, 0] == 0).all()
    assert ids[:, 1:].min() == 1
    assert ids.max() == task.vocabulary - 1 == 10
    triggers = (ids == 1) | (ids == 2)
    assert not triggers[:, 1].any()  # there would be no symbol to copy
    assert not (triggers[:, 1:] & triggers[:, :-1]).any()
    rows, at = triggers[:, 2:-1].nonzero(as_tuple=True)
    assert len(rows) > 100
    assert torch.equal(ids[rows, at + 3], ids[rows, at + 1])


def test_the_chain_is_one_and_its_draws_are_many():
    task, same, other = Backcopy(), Backcopy(), Backcopy(seed=1)
    ids = task.sample(500, seed=2)
    assert torch.equal(ids, same.sample(500, seed=2))
    assert not torch.equal(ids, other.sample(500, seed=2))
    later = task.sample(500, seed=3)
    assert not torch.equal(ids, later)

    def followers(ids, symbol):
        counts = torch.bincount(ids[:, 2:][ids[:, 1:-1] == symbol], minlength=task.vocabulary)
        return counts / counts.sum()

    common = int(torch.bincount(ids[ids > task.triggers]).argmax())
    assert (followers(ids, common) - followers(later, common)).abs().max() < 0.05
    assert (followers(ids, common) - followers(other.sample(500, seed=2), common)).abs().max() > 0.1


def test_a_higher_concentration_is_harder_to_guess():
    def surprise(concentration):
        ids = Backcopy(concentration=concentration).sample(2000, seed=0)
        pairs = torch.bincount(ids[:, 1] * 65 + ids[:, 2], minlength=65 * 65).double().reshape(65, 65)
        joint = pairs / pairs.sum()
        return float(joint.sum(1).xlogy(joint.sum(1)).sum() - joint.xlogy(joint).sum())

    assert surprise(0.02) < surprise(0.1) - 0.3 < surprise(0.5) - 0.6


def test_batches_and_copies():
    task = Backcopy(length=20)
    batches = task.batches(3, 4, seed=5)
    assert [batch["input_ids"].shape for batch in batches] == [(4, 20)] * 3
    ids = torch.cat([batch["input_ids"] for batch in batches])
    assert torch.equal(ids, task.sample(12, seed=5))
    assert all(torch.equal(batch["labels"], batch["input_ids"]) for batch in batches)
    rows, at = task.copies(ids).nonzero(as_tuple=True)
    assert torch.equal(ids[rows, at + 1], ids[rows, at - 1])
    assert set(ids[rows, at].tolist()) <= {1, 2, 3, 4}


@pytest.mark.parametrize("triggers", [0, 64])
def test_triggers_are_some_of_the_symbols(triggers):
    with pytest.raises(ValueError, match=f"triggers={triggers}: must be at least 1 and less than symbols=64"):
        Backcopy(triggers=triggers)
