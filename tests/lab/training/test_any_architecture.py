"""Runs of models that have no preset: from a checkpoint, and from the config in a folder."""

import json

import pytest
import torch
from runs import OFTEN, weights
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    Qwen3Config,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from outeffhop.lab.data import prepare
from outeffhop.lab.training import DataConfig, RunConfig, TrainConfig, train
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import load_checkpoint, model_summary

SMALL = dict(vocab_size=300, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)


@pytest.fixture(scope="module")
def tokenizer(cache):
    return prepare("builtin:text", "mlm", vocab_size=300, length=32, cache_dir=cache).tokenizer


def run(out, cache, **given):
    settings = dict(method="outeffhop", data="builtin:text") | given
    train = TrainConfig(**(OFTEN | {"max_steps": 3}))
    return RunConfig(
        out=str(out), train=train, samples=DataConfig(length=32, vocab_size=300, cache_dir=str(cache)), **settings
    )


CHECKPOINTS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(max_position_embeddings=64, **SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2, n_positions=64)),
    "roberta": lambda: RobertaForMaskedLM(RobertaConfig(max_position_embeddings=66, pad_token_id=0, **SMALL)),
    "modernbert": lambda: ModernBertForMaskedLM(ModernBertConfig(pad_token_id=0, **SMALL)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}
TASKS = {"llama": "clm", "gpt2": "clm", "roberta": "mlm", "modernbert": "mlm", "t5": "seq2seq"}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_from_a_checkpoint(name, tokenizer, cache, tmp_path):
    torch.manual_seed(0)
    CHECKPOINTS[name]().save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    method = "vanilla" if name == "t5" else "gated-outeffhop"  # T5 adds position biases inside attention
    given = run(tmp_path / "out", cache, init=str(tmp_path / "source"), method=method)
    assert resolve(given).task == TASKS[name]
    found = train(given, quiet=True)
    assert found.metrics["perplexity"] > 1
    model = load_checkpoint(tmp_path / "out" / "model")
    assert model_summary(model).method in (method, "sdpa", "eager")
    assert (tmp_path / "out" / "model" / "README.md").read_text().count(name) >= 1


CONFIGS = {
    "qwen3": Qwen3Config(max_position_embeddings=64, head_dim=16, num_key_value_heads=1, **SMALL),
    "bart": BartConfig(
        vocab_size=999, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_from_the_config_in_a_folder(name, cache, tmp_path):
    config = CONFIGS[name]
    config.architectures = {"qwen3": ["Qwen3ForCausalLM"], "bart": ["BartForConditionalGeneration"]}[name]
    config.save_pretrained(tmp_path / "config")
    train(run(tmp_path / "out", cache, model=str(tmp_path / "config")), quiet=True)
    saved = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert saved["vocab_size"] == 300  # as the tokenizer that was trained on the data
    assert saved["outeffhop"]["method"] == "outeffhop"
    assert any(torch.count_nonzero(tensor) for tensor in weights(tmp_path / "out").values())


def test_changes_of_a_config_in_a_folder(cache, tmp_path):
    config = LlamaConfig(max_position_embeddings=64, architectures=["LlamaForCausalLM"], **SMALL)
    config.save_pretrained(tmp_path / "config")
    folder = str(tmp_path / "config")
    train(run(tmp_path / "out", cache, model=folder, changes={"num_hidden_layers": 2}), quiet=True)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model").config.num_hidden_layers == 2
    with pytest.raises(ValueError, match=r"changes\.layers is not a field of LlamaConfig"):
        resolve(run(tmp_path / "a", cache, model=folder, changes={"layers": 2}))


def test_a_config_that_names_no_architecture(cache, tmp_path):
    config = LlamaConfig(max_position_embeddings=64, **SMALL)
    config.save_pretrained(tmp_path / "config")
    given = dict(model=str(tmp_path / "config"))
    with pytest.raises(ValueError, match="no task is known"):
        resolve(run(tmp_path / "a", cache, **given))
    assert resolve(run(tmp_path / "a", cache, task="clm", **given)).task == "clm"
    with pytest.raises(ValueError, match="task='clmm' is unknown"):
        resolve(run(tmp_path / "a", cache, task="clmm", **given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(model="gpt"), "model='gpt' is neither a preset nor a folder with a config.json"),
        (dict(model="opt", task="mlm"), "task='mlm': this model learns clm"),
        (dict(teacher="nowhere", init=None), "nowhere"),
    ],
)
def test_refused(given, words, cache, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(run(tmp_path / "out", cache, **given), quiet=True)
    assert not (tmp_path / "out" / "config.yaml").exists()


def test_an_empty_folder_is_not_a_model(cache, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a folder with a config\.json"):
        resolve(run(tmp_path / "out", cache, model=str(tmp_path / "empty")))


def test_a_trained_model_generates_with_a_cache(cache, tmp_path):
    train(run(tmp_path / "out", cache, model="opt", changes=dict(num_hidden_layers=1)), quiet=True)
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["use_cache"] is True
