"""Masks: how many, which, and that they depend on nothing but block, seed and epoch."""

import pytest
import torch
from torch.utils.data import DataLoader

from outeffhop.lab.data import batches, prepare
from outeffhop.lab.data.masking import MaskedBatch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepare("builtin:text", "mlm", length=64, vocab_size=512, cache_dir=tmp_path_factory.mktemp("cache"))


def all_of(dataset, collate, size):
    found = list(batches(dataset, collate, size))
    return {name: torch.cat([batch[name] for batch in found]) for name in found[0]}


def test_fifteen_percent_of_which_80_10_10(data):
    plain = torch.stack([sample["input_ids"] for sample in data.train])
    batch = all_of(data.train, data.collate, 100)
    ids, labels = batch["input_ids"], batch["labels"]
    special = torch.isin(plain, torch.tensor(data.tokenizer.all_special_ids))
    chosen = labels != -100
    assert special.any(dim=1).all()
    assert not (chosen & special).any()
    count = int((~special).sum())
    assert count > 100_000
    assert chosen.sum() / count == pytest.approx(0.15, abs=0.005)
    assert labels[chosen].equal(plain[chosen])
    assert ids[~chosen].equal(plain[~chosen])
    masked = ids[chosen] == data.tokenizer.mask_token_id
    kept = ids[chosen] == plain[chosen]
    other = ~masked & ~kept
    assert masked.float().mean() == pytest.approx(0.8, abs=0.01)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.01)  # 1 of 507 drawn tokens is the same by chance
    assert other.float().mean() == pytest.approx(0.1, abs=0.01)
    drawn = ids[chosen][other]
    assert not torch.isin(drawn, torch.tensor(data.tokenizer.all_special_ids)).any()
    counts = torch.bincount(drawn, minlength=512)[5:]
    assert (counts > 0).float().mean() > 0.9  # 1,800 draws over 507 tokens
    assert drawn.float().mean() == pytest.approx((5 + 511) / 2, rel=0.05)


@pytest.mark.parametrize("which", ["collate", "eval_collate"])
def test_masks_do_not_depend_on_how_blocks_are_batched(data, which):
    collate = getattr(data, which)
    together, alone = all_of(data.validation, collate, 1000), all_of(data.validation, collate, 7)
    assert together["input_ids"].equal(alone["input_ids"])
    assert together["labels"].equal(alone["labels"])


def test_masks_do_not_depend_on_the_worker_or_the_global_generator(data):
    torch.manual_seed(1)
    loader = DataLoader(data.validation, batch_size=8, collate_fn=data.collate, num_workers=1)
    elsewhere = torch.cat([batch["input_ids"] for batch in loader])
    torch.manual_seed(2)
    assert all_of(data.validation, data.collate, 8)["input_ids"].equal(elsewhere)


def test_each_epoch_draws_anew_and_can_be_drawn_again(data):
    drawn = {}
    for epoch in (0, 1, 2):
        data.set_epoch(epoch)
        drawn[epoch] = all_of(data.validation, data.collate, 8)["labels"]
    assert not drawn[0].equal(drawn[1])
    assert not drawn[1].equal(drawn[2])
    chosen = (drawn[0] != -100) & (drawn[1] != -100)
    assert chosen.float().mean() == pytest.approx(0.15**2, abs=0.01)  # independent of each other
    data.set_epoch(1)
    assert all_of(data.validation, data.collate, 8)["labels"].equal(drawn[1])
    data.set_epoch(0)


def test_evaluation_masks_stay_and_follow_the_seed(data):
    before = all_of(data.test, data.eval_collate, 8)["labels"]
    data.set_epoch(5)
    assert all_of(data.test, data.eval_collate, 8)["labels"].equal(before)
    data.set_epoch(0)
    other = MaskedBatch(data.tokenizer, 0.15, seed=1)
    assert not all_of(data.test, other, 8)["labels"].equal(before)


def test_a_short_block_always_has_something_to_guess(data):
    collate = MaskedBatch(data.tokenizer, 0.01, seed=0)
    first, last = data.tokenizer.cls_token_id, data.tokenizer.sep_token_id
    blocks = [{"input_ids": torch.tensor([first, 100 + i, 200 + i, last])} for i in range(50)]
    labels = collate(blocks)["labels"]
    assert ((labels != -100).sum(dim=1) >= 1).all()
    nothing = collate([{"input_ids": torch.tensor([first, last, last])}])
    assert (nothing["labels"] == -100).all()


@pytest.mark.parametrize("probability", [0.0, 1.5, -1.0])
def test_probability_is_checked(data, probability):
    with pytest.raises(ValueError, match="mask_probability="):
        MaskedBatch(data.tokenizer, probability)
    assert (MaskedBatch(data.tokenizer, 1.0)([data.test[0]])["labels"][0, 1:-1] != -100).sum() > 50
