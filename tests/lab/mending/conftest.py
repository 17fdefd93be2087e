"""Tiny checkpoints to mend: with a head, and without."""

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, OPTConfig, OPTForCausalLM

from outeffhop.lab.data import prepare

SIZES = dict(
    num_hidden_layers=2,
    hidden_size=32,
    word_embed_proj_dim=32,
    ffn_dim=64,
    num_attention_heads=2,
    vocab_size=300,
    max_position_embeddings=64,
    do_layer_norm_before=True,
    pad_token_id=0,
    bos_token_id=1,
)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(autouse=True)
def own_cache(tokens, monkeypatch):
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tokens))


@pytest.fixture(scope="session")
def tokenizer(tokens):
    return prepare("builtin:text", "clm", vocab_size=300, length=16, cache_dir=tokens).tokenizer


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """A causal model with a large channel in its residual stream, as trained models have."""
    folder = tmp_path_factory.mktemp("checkpoint") / "opt"
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**SIZES))
    with torch.no_grad():
        model.model.decoder.layers[0].fc2.bias[3] += 1.0  # fifty times the deviation of the others
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def headless(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("headless") / "base"
    AutoModel.from_pretrained(checkpoint).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder
