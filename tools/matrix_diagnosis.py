"""The cell about ``diagnose``: its metric and what it says that rounding costs, against the formulas."""

from __future__ import annotations

import functools
import math

import torch
from matrix_rounding import BY_HAND, changed, quantized, rounded_by_hand
from matrix_truth import NotServed, run

from outeffhop.lab.data import batches, prepare
from outeffhop.lab.data.samples import random_batches
from outeffhop.lab.diagnosis import diagnose
from outeffhop.lab.diagnosis.fitting import prepared_for

ROWS = 2


@functools.cache
def _tokenizer(vocab_size):
    return prepare("builtin:text", "mlm", vocab_size=vocab_size).tokenizer


def diagnosis(model, batch, name):
    """The metric, and what each scheme of Linear layers costs in decibels, against the formulas."""
    text = "input_ids" in batch
    tokenizer = _tokenizer(model.config.get_text_config().vocab_size) if text else None
    samples = {"length": 16} if text else {}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        report = diagnose(
            model, tokenizer=tokenizer, batch_size=ROWS, batches=1, calibration_batches=1, device="cpu", **samples
        )
    except ValueError as error:
        raise NotServed(str(error)) from error
    if any(not torch.equal(value, before[key]) for key, value in model.state_dict().items()):
        raise AssertionError("the model was changed")
    data = prepared_for(model, "", None, samples, tokenizer)
    measured = next(iter(batches(data.validation, data.eval_collate, ROWS)))
    calibration = random_batches(data.train, data.eval_collate, ROWS, 1, 0)[0]
    whole = run(model, measured)
    wanted = _metric(data.task, whole, measured)
    if wanted is not None and not math.isclose(next(iter(report.full.values())), wanted, rel_tol=1e-4):
        raise AssertionError(f"{next(iter(report.full))} is {next(iter(report.full.values()))}, not {wanted}")
    costs = {cost.scheme: cost.sqnr_db for cost in report.costs}
    names = changed(model, quantized(model, calibration, "per-token"))
    for scheme in BY_HAND if names else ():
        rounded = quantized(model, calibration, scheme)
        found = run(rounded_by_hand(model, calibration, rounded, names, scheme), measured)
        decibels = _decibels(whole, found, measured)
        if not abs(costs[scheme] - decibels) < 1.0:  # DeBERTa has ties between two points of a grid
            raise AssertionError(f"{scheme} costs {decibels:.2f} dB, and the diagnosis says {costs[scheme]:.2f}")
    return f"{data.task}; per token {costs['per-token']:.0f} dB"


def _metric(task, out, batch):
    """The first metric of a task, by its formula."""
    labels = batch.get("labels")
    if task in ("mlm", "clm", "seq2seq"):
        if task == "clm":
            out, labels = out[:, :-1], labels[:, 1:]
        chosen = out.double().log_softmax(-1)[labels != -100]
        return float(chosen.gather(-1, labels[labels != -100][:, None]).mean().neg().exp())
    if task == "classification":
        return float((out.argmax(-1) == labels).double().mean())
    if task == "forecasting":
        return float((out.double() - batch["future_values"]).square().mean())
    return None


def _decibels(truth, found, batch):
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    if mask is not None and mask.shape == truth.shape[:2]:
        truth, found = truth[mask.bool()], found[mask.bool()]
    truth, found = truth.double(), found.double()
    return 10 * math.log10(float(truth.square().sum() / (found - truth).square().sum()))
