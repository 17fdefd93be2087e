"""Mending: what it writes, what it leaves alone, what it refuses, and that it can be interrupted."""

import dataclasses
import hashlib
import json

import pytest
import torch
from quick import QUICK
from safetensors.torch import load_file
from trained_look import look_trained
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import outeffhop
from outeffhop.lab.data import batches, prepare
from outeffhop.lab.mending import MendConfig, MendReport, mend, mending_page, resume_mending
from outeffhop.lab.mending.measuring_models import MEASURED
from outeffhop.lab.mending.mend_config import from_mend_yaml, to_mend_yaml
from outeffhop.metrics import metric_for
from outeffhop.models import model_summary
from outeffhop.outliers import measure


def contents(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.is_file()}


def without_times(report):
    return dataclasses.replace(report, seconds=0.0)


@pytest.fixture(scope="module")
def mended(checkpoint, tmp_path_factory):
    """One mending, with plain fine-tuning beside it."""
    out = tmp_path_factory.mktemp("mended") / "out"
    before = contents(checkpoint)
    settings = dict(steps=30, plain=True, lr=1e-2, penalty=0.5, teacher=str(checkpoint))  # its own teacher
    report = mend(checkpoint, "builtin:text", out, **settings, **QUICK)
    assert contents(checkpoint) == before, "the original must never change"
    return out, report


def test_it_removes_outliers_that_plain_fine_tuning_leaves(mended):
    _, report = mended
    before, plain, after = (m.outliers for m in report.columns.values())
    stream = [next(t for t in m.tensors if t.name == "model.decoder.layers.0") for m in (before, plain, after)]
    assert stream[0].kurtosis > 15
    assert stream[1].kurtosis > 0.5 * stream[0].kurtosis
    assert stream[2].kurtosis < 0.3 * stream[1].kurtosis
    assert after.avg_kurtosis < plain.avg_kurtosis


def test_its_numbers_are_those_of_the_saved_model(mended):
    out, report = mended
    model = AutoModelForCausalLM.from_pretrained(out / "model").eval()
    data = prepare("builtin:text", "clm", tokenizer=out / "model", length=16)
    drawn = list(batches(data.validation, data.eval_collate, 4, limit=2))
    assert metric_for("clm")(model, drawn) == pytest.approx(report.after.full, rel=1e-6)
    assert measure(model, drawn).max_inf_norm == pytest.approx(report.after.outliers.max_inf_norm, rel=1e-6)
    assert report.after.quantized.keys() == set(MEASURED)


def test_vanilla_keeps_the_architecture(mended, checkpoint):
    out, report = mended
    assert report.method == "vanilla"
    old, new = (load_file(folder / "model.safetensors") for folder in (checkpoint, out / "model"))
    assert {k: v.shape for k, v in old.items()} == {k: v.shape for k, v in new.items()}
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (checkpoint, out / "model"))
    assert now == was


def test_the_files_of_a_mending(mended):
    out, report = mended
    assert MendReport.load(out / "mend.json") == report
    page = (out / "mend.html").read_text()
    for words in ("What 8 bits cost", "plain fine-tuning", "Attention on the first token", "data:image/png"):
        assert words in page
    columns, rows = mending_page.cost_table(report)
    assert columns[1:] == ("as it came", "plain fine-tuning", "mended")
    assert {row[0] for row in rows} >= {"max inf norm", "perplexity, floating point"}
    assert not (out / "run" / "checkpoints").exists()


def test_a_finished_mending_is_read_again(mended):
    out, report = mended
    assert resume_mending(out) == report


def test_killed_before_its_checkpoints_were_removed(mended):
    out, report = mended
    for left in ("checkpoints", ".checkpoints.1a2b3c4d.tmp"):
        (out / "run" / left / "checkpoint-30").mkdir(parents=True)
    assert resume_mending(out) == report
    assert not list((out / "run").glob("*checkpoints*"))


def test_begun_by_another_process_meanwhile(checkpoint, tmp_path, monkeypatch):
    from outeffhop.lab.mending import stages

    checked = stages._checked

    def meanwhile(run):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mend.yaml").write_text("theirs")
        return checked(run)

    monkeypatch.setattr(stages, "_checked", meanwhile)
    with pytest.raises(ValueError, match="already contains a mending"):
        mend(checkpoint, "builtin:text", tmp_path / "out", steps=1, **QUICK)
    assert (tmp_path / "out" / "mend.yaml").read_text() == "theirs"


def test_with_another_method(checkpoint, tmp_path):
    method = "gated-outeffhop(gate=element, predictor=features)"
    report = mend(checkpoint, "builtin:text", tmp_path / "out", steps=4, method=method, **QUICK)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model_summary(model).method == report.method == str(outeffhop.Method.parse(method))


def test_auto_keeps_the_method_of_a_model(checkpoint, tokenizer, tmp_path):
    model = outeffhop.convert(AutoModelForCausalLM.from_pretrained(checkpoint), "outeffhop(n=2)")
    report = mend(model, "builtin:text", tmp_path / "out", tokenizer=tokenizer, steps=1, plain=True, **QUICK)
    assert report.method == "outeffhop(n=2)"
    for each in ("run", "plain"):
        saved = json.loads((tmp_path / "out" / each / "model" / "config.json").read_text())
        assert saved["outeffhop"]["method"] == "outeffhop(n=2)"


STAGES = ["before", "steps", "run", "after", "page"]


@pytest.mark.parametrize("stage", STAGES)
def test_interrupted_and_resumed(stage, checkpoint, tmp_path, monkeypatch):
    from outeffhop.lab.mending import stages
    from outeffhop.lab.training.trainer import RunTrainer

    settings = dict(steps=6, penalty=0.2, **QUICK)
    whole = mend(checkpoint, "builtin:text", tmp_path / "whole", **settings)

    def stop(*_, **__):
        raise KeyboardInterrupt

    taken = []

    def some_steps(self, *args, **kwargs):
        taken.append(1)
        if len(taken) == 5:
            raise KeyboardInterrupt
        return training_step(self, *args, **kwargs)

    training_step = RunTrainer.training_step
    with monkeypatch.context() as patch:
        if stage in ("before", "after"):
            measured = stages.measured
            calls = []

            def one(*args):
                calls.append(1)
                return stop() if len(calls) == (1 if stage == "before" else 2) else measured(*args)

            patch.setattr(stages, "measured", one)
        elif stage == "run":
            patch.setattr(RunTrainer, "training_step", some_steps)
        else:
            patch.setattr(stages, {"steps": "_steps", "page": "mending_page"}[stage], stop)
        with pytest.raises(KeyboardInterrupt):
            mend(checkpoint, "builtin:text", tmp_path / "part", **settings)
    assert not (tmp_path / "part" / "mend.json").exists()
    with pytest.raises(ValueError, match="already contains a mending"):
        mend(checkpoint, "builtin:text", tmp_path / "part", **settings)
    with pytest.raises(ValueError, match="was started with steps=6, not 7"):
        mend(checkpoint, "builtin:text", tmp_path / "part", resume=True, **(settings | {"steps": 7}))
    part = resume_mending(tmp_path / "part", quiet=True)
    assert without_times(part) == without_times(whole)
    first, second = ((tmp_path / n / "model" / "model.safetensors").read_bytes() for n in ("whole", "part"))
    assert first == second


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(model="nowhere"), "nowhere"),
        (dict(data="nothing.txt"), "nothing.txt"),
        (dict(data="builtin:images"), "builtin:images"),
        (dict(method="outefhop"), "outefhop"),
        (dict(teacher="nobody"), "nobody"),
        (dict(steps=0), "steps=0"),
        (dict(steps=2, minutes=1.0), "exclude each other"),
        (dict(minutes=-1.0), "minutes=-1"),
        (dict(length=100_000), "length=100000"),
        (dict(batch_size=4, accumulate=3), "accumulate=3"),
    ],
)
def test_refused_before_anything_is_written(given, words, checkpoint, tmp_path):
    settings = {"model": checkpoint, "data": "builtin:text", **QUICK, **given}
    with pytest.raises(ValueError, match=words):
        mend(out=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_refused(checkpoint, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        mend(checkpoint, "builtin:text", tmp_path, steps=1, **QUICK)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]
    before = contents(checkpoint)
    with pytest.raises(ValueError, match="not empty"):
        mend(checkpoint, "builtin:text", checkpoint, steps=1, **QUICK)
    assert contents(checkpoint) == before


def test_a_teacher_of_another_vocabulary_is_refused(checkpoint, tokenizer, tmp_path):
    other = LlamaConfig(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(other).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="vocab_size=400, the model 300"):
        mend(checkpoint, "builtin:text", tmp_path / "out", steps=1, teacher=str(tmp_path / "other"), **QUICK)
    assert not (tmp_path / "out").exists()


def test_minutes_become_steps_once(checkpoint, tmp_path):
    report = mend(checkpoint, "builtin:text", tmp_path / "out", minutes=0.01, **QUICK)
    assert report.steps == json.loads((tmp_path / "out" / "steps.json").read_text())["steps"] >= 1


def test_a_model_without_a_head_is_its_own_teacher(headless, tmp_path):
    report = mend(headless, "builtin:text", tmp_path / "out", steps=20, lr=1e-2, penalty=0.3, **QUICK)
    assert (report.task, report.teacher) == ("embedding", "base")
    assert report.before.full["cosine"] == pytest.approx(1.0)
    assert 0.5 < report.after.full["cosine"] < 1.0
    assert report.after.outliers.avg_kurtosis < report.before.outliers.avg_kurtosis
    AutoModel.from_pretrained(tmp_path / "out" / "model")


def test_a_model_in_memory(checkpoint, tokenizer, tmp_path):
    model = look_trained(AutoModelForCausalLM.from_pretrained(checkpoint))
    weights = {name: p.clone() for name, p in model.state_dict().items()}
    report = mend(model, "builtin:text", tmp_path / "out", tokenizer=tokenizer, steps=2, **QUICK)
    data = prepare("builtin:text", "clm", tokenizer=tokenizer, length=16)
    drawn = list(batches(data.validation, data.eval_collate, 4, limit=2))
    assert metric_for("clm")(model, drawn) == pytest.approx(report.before.full, rel=1e-6)
    assert all(torch.equal(p, weights[name]) for name, p in model.state_dict().items())
    assert report.checkpoint == "start"


def test_every_kind_of_model(tokenizer, tmp_path):
    torch.manual_seed(0)
    small = dict(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **small))
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=300, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    vit = ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **small))
    for name, model, data in (("llama", llama, "text"), ("t5", t5, "text"), ("vit", vit, "images")):
        given = {"tokenizer": tokenizer} if data == "text" else {}
        report = mend(model, f"builtin:{data}", tmp_path / name, steps=2, **QUICK, **given)
        assert report.steps == 2
        assert report.after.outliers.tensors


def test_several_processes_are_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        mend(checkpoint, "builtin:text", tmp_path / "out", steps=1, **QUICK)
    assert not (tmp_path / "out").exists()


def test_settings_are_kept(tmp_path):
    config = MendConfig(checkpoint="a", data="b", out="c", minutes=2.5, plain=True, teacher="d", precision="bf16")
    (tmp_path / "mend.yaml").write_text(to_mend_yaml(config))
    assert from_mend_yaml(tmp_path / "mend.yaml") == config
    (tmp_path / "mend.yaml").write_text("checkpoint: a\ndata: b\nout: c\nsteps: many\n")
    with pytest.raises(ValueError, match="steps='many'"):
        from_mend_yaml(tmp_path / "mend.yaml")
