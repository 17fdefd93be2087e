"""A cut of the compatibility matrix: a few models, the quick cells; and a cell that must fail does."""

import copy
import json

import matrix
import matrix_cells
import matrix_mending
import matrix_rounding
import matrix_truth
import pytest
import torch

from outeffhop.models import convert
from outeffhop.models.hf_private import implementation

QUICK = (
    "outliers",
    "quantize",
    *matrix_cells.SIX,
    "same function",
    "there and back",
    "batches",
    "gradients",
    "training",
    "mending",
)
SERVED = ("LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification")
ONCE = (
    ("GPT2LMHeadModel", "quantize"),  # its layers are Conv1D
    ("AlbertForMaskedLM", "outliers"),  # its one layer runs several times
    ("SwinForImageClassification", "gated-outeffhop"),  # its stages are of several sizes
    pytest.param("MixtralForCausalLM", "export", marks=pytest.mark.slow),
    ("LlamaForCausalLM", "same data"),
    ("BartForConditionalGeneration", "same data"),  # an encoder and a decoder have their own padding
    ("Gemma2ForCausalLM", "outeffhop"),  # caps its scores
    ("GptOssForCausalLM", "clipped"),  # has its own sinks
    ("FalconForCausalLM", "mending"),  # has the penalty alone, and changes tensors in place
    ("MistralForCausalLM", "static cache"),
    ("WhisperForConditionalGeneration", "dynamic cache"),
    ("OPTForCausalLM", "planted outlier"),
    ("BertForMaskedLM", "diagnose"),
    pytest.param("StanhopForForecasting", "diagnose", marks=pytest.mark.slow),  # its output is not its loss
    ("StanhopForForecasting", "gated"),
)
REFUSED = (
    ("DebertaV2ForMaskedLM", "outeffhop", {}, "no attention module"),  # relative positions inside attention
    ("BloomForCausalLM", "clipped", {}, "no attention module"),
    ("FalconForCausalLM", "gated", {}, "no attention module"),
    ("GptOssForCausalLM", "sparse", {}, "own learned sinks"),
    ("GptOssForCausalLM", "outeffhop", {"same_function": True}, "own learned sinks"),
    ("SiglipModel", "gated", {}, "does not pass keyword arguments"),
    ("Qwen3ForCausalLM", "outeffhop(qk_norm=rms)", {}, "normalizes queries and keys itself"),
    ("LlamaForCausalLM", "gated(gate=head)", {}, "averages over all tokens"),
    ("StanhopForForecasting", "outeffhop", {"same_function": True}, "no schedule"),
)


@pytest.mark.parametrize("what", QUICK)
@pytest.mark.parametrize("name", SERVED)
def test_a_cell_holds(name, what):
    found = matrix.cell(name, what)
    assert found["state"] == "held", found["text"]


@pytest.mark.parametrize(("name", "what"), ONCE)
def test_a_cell_of_one_model_holds(name, what):
    found = matrix.cell(name, what)
    assert found["state"] == "held", found["text"]


@pytest.mark.parametrize(("name", "method", "how", "words"), REFUSED)
def test_what_cannot_be_served_is_refused_in_one_line_before_anything_is_changed(name, method, how, words):
    model, batch = matrix_truth.subject(name)
    before, config = {k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(model.config)
    output = matrix_truth.run(model, batch)
    with pytest.raises(ValueError, match=words) as refused:
        convert(model, method, **how)
    assert "\n" not in str(refused.value)
    assert model.config.to_dict() == config.to_dict()
    assert implementation(model.config) == implementation(config)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(matrix_truth.run(model, batch), output)


def test_another_method_is_not_taken_for_the_truth():
    model, batch = matrix_truth.subject("BertForMaskedLM")
    found = matrix_truth.run(matrix_truth.converted(model, "outeffhop"), batch)
    with pytest.raises(AssertionError, match="from the truth"):
        matrix_truth.held(found, matrix_truth.run(matrix_truth.by_hand(model, "clipped"), batch), "clipped")


@pytest.mark.parametrize(("scheme", "other"), [("paper", "W8A7"), ("paper", "W7A8"), ("paper", "fp8"), ("fp8", "W8A8")])
def test_another_scheme_is_not_taken_for_the_truth(scheme, other):
    model, batch = matrix_truth.subject("BertForMaskedLM")
    names = matrix_rounding.changed(model, matrix_rounding.quantized(model, batch, "per-token"))
    rounded = matrix_rounding.quantized(model, batch, other)
    with pytest.raises(AssertionError, match=f"{scheme} .* (off|beside)"):
        matrix_rounding.check_everything(model, batch, rounded, names, scheme)


@pytest.mark.parametrize(("part", "value"), [("SHARE", 0.012), ("WEIGHT", 0.05), ("_move", lambda *_: None)])
def test_another_mending_is_not_taken_for_the_truth(part, value, monkeypatch):
    if part == "WEIGHT":  # of the truth alone
        mean = matrix_mending._Tails.mean
        monkeypatch.setattr(matrix_mending._Tails, "mean", lambda self: mean(self) * value)
    else:
        monkeypatch.setattr(matrix_mending, part, value)
    found = matrix.cell("BertForMaskedLM", "mending")
    assert (found["state"], "from the truth" in found["text"]) == ("failed", True)


def test_tokens_of_another_method_are_not_taken_for_the_truth(monkeypatch):
    monkeypatch.setattr(matrix_cells, "by_hand", lambda model, method: matrix_truth.by_hand(model, "vanilla"))
    found = matrix.cell("LlamaForCausalLM", "dynamic cache")
    assert (found["state"], "logits: " in found["text"]) == ("failed", True)


def test_what_another_machine_found_stays(tmp_path, monkeypatch):
    def nothing_here(name, what):
        raise matrix_truth.NotHere("no such machine")

    file, kept = tmp_path / "cells.json", {"state": "held", "text": "kept"}
    monkeypatch.setattr(matrix, "cell", nothing_here)
    rows = {"LlamaForCausalLM": {"moved device": kept}}
    matrix.fill(rows, ["BertForMaskedLM"], ["moved device"], True, print, file)
    matrix.fill(rows, ["LlamaForCausalLM"], ["moved device"], True, print, file)  # as another process does
    found = json.loads(file.read_text())
    assert list(found) == ["LlamaForCausalLM", "BertForMaskedLM"]
    assert found["LlamaForCausalLM"]["moved device"] == kept
    assert found["BertForMaskedLM"]["moved device"] == {"state": "not served", "text": "no such machine"}


def test_cells_are_kept_and_shown(tmp_path):
    file, kept = tmp_path / "cells.json", {"state": "held", "text": "kept"}
    found = matrix.fill({"BertForMaskedLM": {"padding": kept}}, ["BertForMaskedLM"], ["padding"], False, print, file)
    assert found["BertForMaskedLM"]["padding"] is kept
    assert "kept" in file.read_text()
    assert "| Bert |" in matrix.page(found)
    assert torch.is_grad_enabled()
