"""A cut of the compatibility matrix: a few models, the quick cells; and a cell that must fail does."""

import matrix
import matrix_cells
import matrix_truth
import pytest
import torch

QUICK = (
    "outliers",
    "quantize",
    *matrix_cells.SIX,
    "same function",
    "there and back",
    "batches",
    "gradients",
    "training",
)
SERVED = ("LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification")


@pytest.mark.parametrize("what", QUICK)
@pytest.mark.parametrize("name", SERVED)
def test_a_cell_holds(name, what):
    found = matrix.cell(name, what)
    assert found["state"] == "held", found["text"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("Gemma2ForCausalLM", "softcap"), ("DebertaV2ForMaskedLM", "attention"), ("BloomForCausalLM", "attention")],
)
def test_what_cannot_be_served_is_refused_unchanged(name, words):
    found = matrix.cell(name, "outeffhop")
    assert found["state"] == "not served"
    assert words in found["text"]


def test_another_method_is_not_taken_for_the_truth():
    model, batch = matrix_truth.subject("BertForMaskedLM")
    found = matrix_truth.run(matrix_truth.converted(model, "outeffhop"), batch)
    with pytest.raises(AssertionError, match="from the truth"):
        matrix_truth.held(found, matrix_truth.run(matrix_truth.by_hand(model, "clipped"), batch), "clipped")


def test_a_diagnosis_compares_forecasts_and_not_their_loss():
    found = matrix.cell("StanhopForForecasting", "diagnose")
    assert found["state"] == "held", found["text"]


def test_cells_are_kept_and_shown(tmp_path):
    file, kept = tmp_path / "cells.json", {"state": "held", "text": "kept"}
    found = matrix.fill({"BertForMaskedLM": {"padding": kept}}, ["BertForMaskedLM"], ["padding"], False, print, file)
    assert found["BertForMaskedLM"]["padding"] is kept
    assert "kept" in file.read_text()
    assert "| BertForMaskedLM |" in matrix.page(found)
    assert torch.is_grad_enabled()
