"""A model that is trained for real, in seconds: what conversion, quantization and mending say of it is true."""

import copy

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outeffhop import convert
from outeffhop.lab.data import Backcopy
from outeffhop.models import load_checkpoint
from outeffhop.outliers import OutlierPenalty, measure
from outeffhop.quantization import evaluate

TASK = Backcopy(triggers=8, length=48)
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
NEW = TASK.batches(2, 64, seed=100)


def train(model, steps, lr, seed):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        model.train()
        loss = model(**TASK.batches(1, 16, random)[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(NEW[0]["input_ids"]).logits


def scores(model, batches):
    """The loss, and the share of symbols after a trigger that are right."""
    with torch.no_grad():
        outs = [model(**batch) for batch in batches]
    right = [
        (out.logits[:, :-1].argmax(-1) == batch["input_ids"][:, 1:])[TASK.copies(batch["input_ids"])]
        for out, batch in zip(outs, batches, strict=True)
    ]
    return {"loss": float(sum(out.loss for out in outs)) / len(outs), "copies": float(torch.cat(right).float().mean())}


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TASK.vocabulary, max_position_embeddings=64, bos_token_id=0, eos_token_id=None, **SIZES
    )
    return train(LlamaForCausalLM(config), 250, 1e-2, seed=0)


@pytest.fixture
def model(trained):
    return copy.deepcopy(trained)


def test_it_has_learned_to_copy_and_has_outliers(model):
    found = scores(model, NEW)
    assert found["copies"] > 0.95
    assert found["loss"] < 2.6
    assert measure(model, NEW).max_abs > 20


@pytest.mark.parametrize("method", ["outeffhop", "gated-outeffhop(gate=element, predictor=features)"])
def test_the_same_function_at_first(model, method):
    before = logits(model)
    same = convert(copy.deepcopy(model), method, same_function=True)
    torch.testing.assert_close(logits(same), before, rtol=1e-4, atol=1e-3)
    assert (logits(convert(model, method)) - before).abs().max() > 0.1


def test_calibration_starts_near_the_trained_function(model):
    before = scores(model, NEW)
    plain = scores(convert(copy.deepcopy(model), "gated-outeffhop"), NEW)
    batches = TASK.batches(2, 32, seed=200)
    near = convert(model, "gated-outeffhop", calibrate=batches, share=0.02)
    shares = [share for layer in measure(near, batches).attention for share in layer.no_op]
    assert shares == pytest.approx([0.02] * 8, rel=0.05)
    found = scores(near, NEW)
    assert abs(found["loss"] - before["loss"]) < 0.01 < plain["loss"] - before["loss"]
    assert found["copies"] > before["copies"] - 0.01 > plain["copies"]


def test_a_converted_model_comes_back_from_a_file(model, tmp_path):
    convert(model, "outeffhop", calibrate=NEW[:1])
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_checkpoint(tmp_path)), logits(model))


def test_fewer_bits_cost_more(model):
    calibration = TASK.batches(4, 32, seed=300)

    def loss(scheme):
        return evaluate(model, calibration, NEW, scores, scheme, seeds=1, calibration_batches=4).mean("loss")

    full = scores(model, NEW)["loss"]
    assert loss("W16A16") == pytest.approx(full, abs=1e-4)
    assert loss("W8A8") == pytest.approx(full, abs=0.01)
    assert loss("W5A5") > full + 0.05


def test_mending_takes_the_outliers_and_leaves_what_was_learned(model):
    plain, mended = copy.deepcopy(model), model
    before = measure(model, NEW)
    penalty = OutlierPenalty(mended, 0.1)
    train(mended, 80, 2e-3, seed=1)
    penalty.remove()
    train(plain, 80, 2e-3, seed=1)
    after, unmended = measure(mended, NEW), measure(plain, NEW)
    assert after.max_abs < 0.7 * before.max_abs
    assert after.avg_kurtosis < before.avg_kurtosis / 2
    assert unmended.max_abs > 0.9 * before.max_abs
    assert scores(mended, NEW)["copies"] > 0.95
    assert scores(mended, NEW)["loss"] < scores(plain, NEW)["loss"] + 0.05
