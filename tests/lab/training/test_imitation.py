"""Learning from a teacher: the loss by hand, parts of a step, padding, and runs."""

import dataclasses
import shutil

import pytest
import torch
from runs import config, metrics, weights
from torch.nn.functional import cosine_similarity, kl_div
from transformers import AutoModel, BertConfig, BertForSequenceClassification, BertModel, OPTConfig, OPTForCausalLM

from outeffhop.lab.training import train
from outeffhop.lab.training.imitation import Teacher, inputs_of, without_dropout

SMALL = dict(num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=50, max_position_embeddings=32)
OPT = OPTConfig(ffn_dim=32, word_embed_proj_dim=16, **SMALL)
BERT = BertConfig(intermediate_size=32, **SMALL)


def pair(kind, config, seed=0):
    torch.manual_seed(seed)
    return kind(config).double().eval(), kind(config).double().eval()


def some(padded):
    ids = torch.randint(1, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_of_logits_is_the_divergence(padded):
    model, other = pair(OPTForCausalLM, OPT)
    batch, teacher = some(padded), Teacher(other)
    real = batch["attention_mask"].bool()
    own = model(**inputs_of(batch, model))
    truth = other(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    by_hand = sum(
        kl_div(a.log_softmax(-1), b.softmax(-1), reduction="sum")
        for a, b in zip(own.logits[real], truth[real], strict=True)
    ) / int(real.sum())
    assert teacher.loss(own, batch).item() == pytest.approx(by_hand.item(), rel=1e-9)
    assert int(teacher.items(batch)) == int(real.sum())


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_of_hidden_states(padded):
    model, other = pair(BertModel, BERT)
    batch, teacher = some(padded), Teacher(other)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    own, truth = model(**given).last_hidden_state, other(**given).last_hidden_state
    by_hand = 0.0
    for a, b, mask in zip(own, truth, batch["attention_mask"].bool(), strict=True):
        a, b = a[mask], b[mask]
        by_hand += (a - b).square().sum() / b.square().sum() + 1 - cosine_similarity(a.mean(0), b.mean(0), dim=0)
    assert teacher.loss(model(**given), batch).item() == pytest.approx(by_hand.item() / 3, rel=1e-9)
    assert teacher.items(batch) == 3


def test_a_head_without_labels_here_is_imitated_by_its_logits():
    model, other = pair(BertForSequenceClassification, BERT)
    batch, teacher = some(False), Teacher(other)
    own = model(**inputs_of(batch, model))
    truth = other(**inputs_of(batch, other)).logits
    by_hand = kl_div(own.logits.log_softmax(-1), truth.softmax(-1), reduction="batchmean")
    assert teacher.loss(own, batch).item() == pytest.approx(by_hand.item(), rel=1e-9)


@pytest.mark.parametrize(("kind", "sizes"), [(OPTForCausalLM, OPT), (BertModel, BERT)])
def test_a_model_has_no_loss_against_itself_and_its_teacher_no_gradient(kind, sizes):
    model, other = pair(kind, sizes)
    other.load_state_dict(model.state_dict())
    batch, teacher = some(True), Teacher(other)
    loss = teacher.loss(model(**inputs_of(batch, model)), batch)
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    loss.backward()
    assert all(p.grad is None for p in other.parameters())
    assert teacher.likeness(model, [batch])["cosine"] == pytest.approx(1.0)


def test_without_dropout_training_mode_is_evaluation_mode():
    for kind, sizes in ((OPTForCausalLM, OPT), (BertModel, BERT)):
        model, _ = pair(kind, sizes)
        given = inputs_of(some(False), model)
        expected = model(**given)[0]
        model.train()
        assert not torch.allclose(model(**given)[0], expected)
        without_dropout(model)
        assert torch.allclose(model(**given)[0], expected)


@pytest.fixture
def bare(whole_run, tmp_path):
    """The model of a run without its head, and its tokenizer."""
    source = whole_run("opt") / "model"
    AutoModel.from_pretrained(source).save_pretrained(tmp_path / "bare")
    for file in source.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "bare")
    return tmp_path / "bare"


def test_a_model_without_a_head_imitates_itself(bare, cache, tmp_path):
    run = config("opt", tmp_path / "a", cache, init=bare, method="outeffhop", anneal_steps=0)
    found = train(run, quiet=True)
    assert set(found.metrics) == {"cosine", "sqnr_db"}
    assert found.metrics["cosine"] == pytest.approx(1.0, abs=1e-4)  # it starts where it should be
    four = dataclasses.replace(run, out=str(tmp_path / "b"), train=dataclasses.replace(run.train, accumulate=4))
    train(four, quiet=True)
    lines = [[line["loss"] for line in metrics(out) if "loss" in line] for out in (tmp_path / "a", tmp_path / "b")]
    assert lines[0] == pytest.approx(lines[1], abs=1e-6)


def test_a_teacher_replaces_labels(whole_run, cache, tmp_path):
    source = whole_run("opt") / "model"
    run = dataclasses.replace(config("opt", tmp_path / "a", cache, init=source, max_steps=3), teacher=str(source))
    train(run, quiet=True)
    first = next(line["loss"] for line in metrics(tmp_path / "a") if "loss" in line)
    assert first == pytest.approx(0.0, abs=1e-5)
    before, after = weights(source.parent), weights(tmp_path / "a")
    assert all(torch.allclose(before[name], after[name], atol=2e-3) for name in before)
