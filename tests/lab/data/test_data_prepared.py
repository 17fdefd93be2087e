"""The contract every kind of data keeps, and that real models take what it gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from outeffhop.lab.data import batches, describe, load_bags, prepare
from outeffhop.metrics import task_of
from outeffhop.models.presets import build, config

TASK = {"bert": "mlm", "opt": "clm", "vit": "classification", "stanhop": "forecasting"}
SPEC = {
    "mlm": "builtin:text",
    "clm": "builtin:text",
    "classification": "builtin:images",
    "forecasting": "builtin:series",
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", TASK)
def test_a_model_takes_what_its_data_gives(name, cache):
    model = build(name, "tiny")
    task = task_of(model)
    assert task == TASK[name]
    data = prepare(SPEC[task], task, cache_dir=cache)
    model = build(name, "tiny", **data.changes)
    for collate in (data.collate, data.eval_collate):
        loss = model(**next(batches(data.train, collate, 4))).loss
        assert loss.isfinite()
        assert loss > 0
    assert all(isinstance(part, Dataset) for part in (data.train, data.validation, data.test))
    assert json.loads(json.dumps(data.about))["source"] == SPEC[task]
    assert data.about["splits"]["test"]["samples"] == len(data.test)


def test_opt_leaves_no_token_without_a_gradient(cache):
    data = prepare("builtin:text", "clm", cache_dir=cache)
    changed = config("opt", "tiny", **data.changes)
    assert changed.pad_token_id == data.tokenizer.pad_token_id != data.tokenizer.bos_token_id


def test_task_of_a_config():
    saved = config("bert")
    with pytest.raises(ValueError, match="ForMaskedLM learns mlm"):
        task_of(saved)
    saved.architectures = ["BertForMaskedLM"]
    assert task_of(saved) == "mlm"
    assert task_of(config("stanhop")) == "forecasting"
    for name in ("BertForQuestionAnswering", "BertModel", "ViTModel", "BertForPreTraining"):
        saved.architectures = [name]
        assert task_of(saved) == "embedding"
    saved.architectures = ["GPT2LMHeadModel"]
    assert task_of(saved) == "clm"
    saved.architectures = ["Gemma3ForConditionalGeneration"]
    assert task_of(saved) == "clm"
    saved.is_encoder_decoder = True
    for name in ("T5ForConditionalGeneration", "MarianMTModel"):
        saved.architectures = [name]
        assert task_of(saved) == "seq2seq"
    for name in ("WhisperForConditionalGeneration", "BlipForConditionalGeneration", "Wav2Vec2Model"):
        saved.architectures = [name]
        with pytest.raises(ValueError, match=f"{name} takes (input_features|pixel_values|input_values)"):
            task_of(saved)
    saved.architectures = ["ForeignModel"]
    with pytest.raises(ValueError, match="ForeignModel"):
        task_of(saved)


def test_batches_are_in_order_and_whole():
    data = prepare("builtin:images", "classification")
    sizes = [len(batch["labels"]) for batch in batches(data.validation, data.eval_collate, 50)]
    assert sizes == [50, 50, 50, 29]
    together = torch.cat([batch["labels"] for batch in batches(data.validation, data.eval_collate, 50)])
    assert together.tolist() == [int(sample["labels"]) for sample in data.validation]
    assert len(list(batches(data.validation, data.eval_collate, 50, limit=2))) == 2
    assert list(batches(data.validation, data.eval_collate, 50, limit=0)) == []
    for wrong, message in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, "2.0"),
        ({"limit": -1}, "limit=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            batches(data.validation, data.eval_collate, **{"batch_size": 50} | wrong)
    with pytest.raises(ValueError, match="samples is empty"):
        data.eval_collate([])


@pytest.mark.parametrize("spec", sorted(set(SPEC.values())))
def test_describe(spec):
    found = describe(spec)
    assert json.loads(json.dumps(found)) == found
    assert set(found["splits"]) == {"train", "validation", "test"}
    assert len(found["samples"]) == 3
    assert all(0 < len(sample) <= 100 for sample in found["samples"])
    tasks = {"text": ["mlm", "clm", "seq2seq", "embedding"], "images": ["classification", "embedding"]}
    assert found["tasks"] == tasks.get(found["kind"], ["forecasting"])


def test_the_seed_changes_no_split(cache):
    first, second = (prepare("builtin:text", "mlm", cache_dir=cache, seed=seed) for seed in (0, 1))
    assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(first.test, second.test, strict=True))
    labels = [next(batches(data.test, data.eval_collate, 4))["labels"] for data in (first, second)]
    assert not labels[0].equal(labels[1])


def test_preparing_loads_no_library_of_the_lab():
    code = (
        "import sys, outeffhop, transformers; transformers.PreTrainedTokenizerFast; before = set(sys.modules); "
        "import outeffhop.lab.data.describing, outeffhop.lab.data.preparing; "
        "heavy = ('sklearn', 'datasets', 'kornia', 'PIL', 'matplotlib', 'pandas', 'pydoc_data.topics'); "
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


# ---- real data, where it is at hand

needs_data = pytest.mark.skipif("OUTEFFHOP_DATA" not in os.environ, reason="OUTEFFHOP_DATA names no folder of data")


def real(path):
    return str(Path(os.environ["OUTEFFHOP_DATA"]) / path)


@needs_data
@pytest.mark.parametrize(
    ("path", "sizes"),
    [
        ("ett/ETTh1.csv", (8640, 2880, 2880)),
        ("ett/ETTm1.csv", (34560, 11520, 11520)),
        ("wth", (20160, 7200, 7200)),
    ],
)
def test_real_series(path, sizes):
    assert tuple(split["rows"] for split in describe(real(path), "forecasting")["splits"].values()) == sizes


@needs_data
@pytest.mark.parametrize(("path", "sizes"), [("mnist", (54000, 6000, 10000)), ("cifar10", (18000, 2000, 10000))])
def test_real_pictures(path, sizes):
    data = prepare(real(path), "classification")
    assert (len(data.train), len(data.validation), len(data.test)) == sizes
    known = {"mnist": [0.1307], "cifar10": [0.4914, 0.4822, 0.4465]}[path]
    assert data.about["preprocessing"]["mean"] == pytest.approx(known, abs=0.01)


@needs_data
@pytest.mark.parametrize(
    ("name", "bags", "positive"),
    [("elephant", 200, 100), ("fox", 200, 100), ("tiger", 200, 100), ("ucsb_breast", 58, 26)],
)
def test_real_bags(name, bags, positive):
    found = load_bags(real(f"mil/{name}.npz"))
    assert (len(found), int(found.labels.sum())) == (bags, positive)


@needs_data
@pytest.mark.parametrize(
    ("name", "task", "hello"),
    [
        ("bert-base-uncased", "mlm", [101, 7592, 2088, 102]),
        ("gpt2", "clm", [15496, 995]),
        ("opt-roberta", "clm", [2, 31414, 232]),
    ],
)
def test_real_tokenizers(name, task, hello, tmp_path):
    data = prepare("builtin:text", task, tokenizer=real(f"tokenizers/{name}"), cache_dir=tmp_path)
    assert data.tokenizer("Hello world")["input_ids"] == hello
    assert data.changes["vocab_size"] == len(data.tokenizer)
    assert next(batches(data.train, data.collate, 2))["input_ids"].max() < len(data.tokenizer)


@needs_data
@pytest.mark.slow
def test_real_text(tmp_path):
    data = prepare(real("wikitext2"), "clm", cache_dir=tmp_path, length=512)
    counts = [describe(real("wikitext2"))["splits"][split]["characters"] for split in ("validation", "test")]
    assert [round(count, -4) for count in counts] == [1_120_000, 1_260_000]
    assert "Homarus gammarus" in data.tokenizer.decode(data.validation[0]["input_ids"])
