"""Training really trains: each task, its folder, the size of its updates, and each way it can end."""

import dataclasses
import errno
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch
from runs import METHODS, MODELS, NO_DROPOUT, config, environment, furthest, metrics, result, weight_bytes, weights
from torch import nn
from transformers import Trainer

from outeffhop.cli.main import main
from outeffhop.lab.data import batches
from outeffhop.lab.training import RunFolder, resume, train, training_state
from outeffhop.lab.training.config import to_yaml
from outeffhop.lab.training.estimate import estimate
from outeffhop.lab.training.nonfinite import NotFinite
from outeffhop.lab.training.recipes import resolve
from outeffhop.lab.training.run import prepare_data
from outeffhop.lab.training.train_loader import EpochSampler
from outeffhop.lab.training.trainer import RunTrainer
from outeffhop.methods import Method
from outeffhop.metrics import metric_for
from outeffhop.models import model_summary
from outeffhop.models.checkpoint import load_checkpoint


def column(out, name):
    return [line[name] for line in metrics(out) if name in line]


def at_call(monkeypatch, count, happening):
    """Does something to trainer, model and inputs as the n-th forward begins."""
    original, calls = RunTrainer.training_step, []

    def step(trainer, model, inputs, *args):
        calls.append(1)
        if len(calls) == count:
            happening(trainer, model, inputs)
        return original(trainer, model, inputs, *args)

    monkeypatch.setattr(RunTrainer, "training_step", step)


def checkpoints(out):
    return sorted(p.name for p in (out / "checkpoints").iterdir())


# It learns


@pytest.mark.parametrize(
    ("model", "steps", "metric", "least"),
    [("bert", 40, "loss", 0.3), ("opt", 40, "loss", 1.0), ("vit", 120, "accuracy", 0.12), ("stanhop", 40, "mse", 0.2)],
)
def test_each_task_is_learned(model, steps, metric, least, cache, tmp_path):
    """The metric falls, or the accuracy rises, from that of the same model untrained."""
    sign = -1 if metric == "accuracy" else 1
    settings = dict(max_steps=steps, lr=4e-3, eval_steps=1000, save_steps=1000, log_steps=10, outlier_steps=0)
    run = config(model, tmp_path / "a", cache, patience=0, eval_batches=None, batch_size=32, **settings)
    untrained = dataclasses.replace(run.train, max_steps=1, lr=0.0)
    before = train(dataclasses.replace(run, out=str(tmp_path / "b"), train=untrained), quiet=True).metrics[metric]
    after = train(run, quiet=True).metrics[metric]
    assert (before - after) * sign > least
    losses = column(tmp_path / "a", "loss")
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_trained(method, cache, tmp_path):
    train(config("opt", tmp_path / "a", cache, method=method, batch_size=16), quiet=True)
    losses = column(tmp_path / "a", "loss")
    assert losses[-1] < losses[0] - 0.2
    assert model_summary(load_checkpoint(tmp_path / "a" / "model")).method.startswith(method)


def test_a_method_is_read_once_and_carried(cache, tmp_path, monkeypatch):
    """Its text is parsed where the config is resolved, where the model is built and for the card, and nowhere else."""
    parse, where = Method.parse, []

    def counted(text):
        caller = sys._getframe(1).f_code.co_filename
        if isinstance(text, str):
            where.append(caller)
        return parse(text)

    monkeypatch.setattr(Method, "parse", staticmethod(counted))
    train(config("opt", tmp_path / "a", cache, method="gated-outeffhop(init=0.3)"), quiet=True)
    assert 0 < len(where) <= 3, where


@pytest.mark.parametrize("model", MODELS)
def test_what_a_run_leaves(model, whole_run):
    out = whole_run(model)
    folder = RunFolder(out)
    names = {"config.yaml", "env.json", "metrics.jsonl", "checkpoints", "model", "outliers.json", "result.json"}
    assert {p.name for p in out.iterdir()} == names | {"run.lock"}
    assert checkpoints(out) == ["checkpoint-12", "checkpoint-8"]
    env = json.loads((out / "env.json").read_text())
    loaded = load_checkpoint(folder.model)
    assert env["parameters"] == sum(p.numel() for p in loaded.parameters())
    assert {"torch", "transformers", "outeffhop"} <= env["packages"].keys()
    assert env["data"]["source"] == folder.config().data
    steps = [line["step"] for line in metrics(out)]
    assert steps == sorted(steps)
    assert [line["step"] for line in metrics(out) if "loss" in line] == [3, 6, 9, 12]
    assert [line["step"] for line in metrics(out) if "tensors" in line] == [6, 12]
    assert column(out, "max_inf_norm")[-1] == result(out)["max_inf_norm"]


@pytest.mark.parametrize("model", MODELS)
def test_the_saved_model_has_the_result(model, whole_run):
    out = whole_run(model)
    run = RunFolder(out).config()
    loaded, prepared = load_checkpoint(out / "model"), prepare_data(run)
    assert model_summary(loaded).method == run.method == "outeffhop"
    found = metric_for(prepared.task)(loaded, batches(prepared.validation, prepared.eval_collate, 8, limit=2))
    assert found == pytest.approx(result(out)["metrics"], rel=1e-6)


def test_a_seed_decides_everything(whole_run, cache, tmp_path):
    train(config("bert", tmp_path / "same", cache), quiet=True)
    train(config("bert", tmp_path / "other", cache, seed=1), quiet=True)
    assert weight_bytes(tmp_path / "same") == weight_bytes(whole_run("bert"))
    assert weight_bytes(tmp_path / "other") != weight_bytes(whole_run("bert"))


def test_workers_change_nothing(whole_run, cache, tmp_path):
    train(config("bert", tmp_path / "a", cache, workers=1), quiet=True)
    assert weight_bytes(tmp_path / "a") == weight_bytes(whole_run("bert"))


def test_an_epoch_is_a_shuffle_cut_to_whole_steps():
    sampler = EpochSampler(23, 5, seed=3)
    first = list(sampler)
    assert len(sampler) == len(first) == len(set(first)) == 20
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert set(first) < set(range(23))


# The size of an update


def run_with(model, out, cache, **train_settings):
    settings = dict(log_steps=1, max_steps=6, save_steps=6, outlier_steps=0)
    changes = NO_DROPOUT[model]
    train(config(model, out, cache, changes=changes, **(settings | train_settings)), quiet=True)
    return column(out, "grad_norm")


@pytest.mark.parametrize("model", MODELS)
def test_accumulation_changes_nothing(model, cache, tmp_path):
    """Also where the parts of a step have different numbers of tokens to guess."""
    whole = run_with(model, tmp_path / "1", cache)
    parts = run_with(model, tmp_path / "4", cache, accumulate=4)
    assert parts == pytest.approx(whole, rel=1e-4)
    assert column(tmp_path / "4", "loss") == pytest.approx(column(tmp_path / "1", "loss"), rel=1e-5)
    assert furthest(weights(tmp_path / "1"), weights(tmp_path / "4")) < 1e-5


def test_accumulation_without_our_scaling(cache, tmp_path, monkeypatch):
    """The model takes the number of items and does not use it: Trainer's own loss is four times too large."""
    whole = run_with("bert", tmp_path / "1", cache)
    monkeypatch.setattr(RunTrainer, "compute_loss", Trainer.compute_loss)
    parts = run_with("bert", tmp_path / "4", cache, accumulate=4)
    assert parts[0] / whole[0] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_the_loss_is_the_models_own(model, cache, tmp_path, monkeypatch):
    own = []

    def look(trainer, module, inputs):
        with torch.no_grad():
            own.append(float(module(**inputs).loss))

    at_call(monkeypatch, 1, look)
    run_with(model, tmp_path / "a", cache, max_steps=1)
    assert column(tmp_path / "a", "loss") == pytest.approx(own, rel=1e-6)


def test_soft_labels(cache, tmp_path, monkeypatch):
    """Mixed pictures have mixed labels, and smoothed ones."""
    pytest.importorskip("kornia")
    own = []

    def look(trainer, module, inputs):
        soft = inputs["soft_labels"]
        assert torch.allclose(soft.sum(-1), torch.ones(len(soft)))
        assert float(soft.min()) >= 0.1 / 10 - 1e-6
        with torch.no_grad():
            logits = module(pixel_values=inputs["pixel_values"]).logits
        own.append(float(-(soft * logits.log_softmax(-1)).sum(-1).mean()))

    at_call(monkeypatch, 1, look)
    run = config("vit", tmp_path / "a", cache, samples={"augment": "paper", "label_smoothing": 0.1}, log_steps=1)
    train(run, quiet=True)
    assert column(tmp_path / "a", "loss")[:1] == pytest.approx(own, rel=1e-5)


def test_the_gradient_is_clipped(cache, tmp_path):
    """Adam forgets a common scale, so the update is looked at where it has one: by the norm of the gradient itself."""
    seen = []

    class Watch(torch.optim.AdamW):
        def step(self, *args):
            norms = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
            seen.append(float(torch.stack(norms).norm()))
            return super().step(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", Watch)
        norms = run_with("opt", tmp_path / "a", cache, clip_norm=0.01)
    assert min(norms) > 0.01
    assert seen == pytest.approx([0.01] * 6, rel=1e-3)


# How it is computed


def test_bf16(whole_run, cache, tmp_path):
    train(config("opt", tmp_path / "a", cache, precision="bf16"), quiet=True)
    ours, exact = column(tmp_path / "a", "loss"), column(whole_run("opt"), "loss")
    assert ours == pytest.approx(exact, rel=0.02)
    assert ours != exact
    assert all(w.dtype == torch.float32 for w in weights(tmp_path / "a").values())


@pytest.mark.parametrize("model", ["bert", "opt", "vit"])
def test_gradient_checkpointing_changes_nothing(model, cache, tmp_path):
    calls = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: calls.append(type(m).__name__))
    try:
        run_with(model, tmp_path / "plain", cache)
        plain = calls.count("Linear")
        calls.clear()
        run_with(model, tmp_path / "again", cache, gradient_checkpointing=True)
    finally:
        handle.remove()
    assert calls.count("Linear") > plain  # in backward
    assert furthest(weights(tmp_path / "plain"), weights(tmp_path / "again")) < 1e-6


@pytest.mark.slow
def test_compile_changes_little(cache, tmp_path):
    run_with("opt", tmp_path / "plain", cache)
    run_with("opt", tmp_path / "compiled", cache, compile=True)
    assert furthest(weights(tmp_path / "plain"), weights(tmp_path / "compiled")) < 1e-4


def test_what_a_device_cannot(cache, tmp_path):
    with pytest.raises(ValueError, match=r"train\.precision='fp16' needs a GPU"):
        train(config("opt", tmp_path / "a", cache, precision="fp16"), quiet=True)
    with pytest.raises(ValueError, match=r"train\.fsdp=True.*torchrun"):
        train(config("opt", tmp_path / "a", cache, fsdp=True), quiet=True)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"train\.device='cuda'"):
            train(config("opt", tmp_path / "a", cache, device="cuda"), quiet=True)
    assert not RunFolder(tmp_path / "a").exists


def test_tensorboard_of_two_runs(cache, tmp_path):
    pytest.importorskip("tensorboard")
    for name in "ab":
        train(config("vit", tmp_path / name, cache, max_steps=1, track="tensorboard"), quiet=True)
        assert list((tmp_path / name / "track").glob("events*"))


def test_outliers_of_chosen_tensors(cache, tmp_path):
    run = config("opt", tmp_path / "a", cache, max_steps=2, outlier_steps=1, outlier_tensors="*.fc1, *.fc2")
    train(run, quiet=True)
    named = [set(tensors) for tensors in column(tmp_path / "a", "tensors")]
    assert named == [{f"model.decoder.layers.{i}.fc{j}" for i in (0, 1) for j in (1, 2)}] * 2


def test_init_from_a_model_of_another_method(whole_run, cache, tmp_path):
    source = whole_run("opt") / "model"
    run = config("opt", tmp_path / "a", cache, method="gated-outeffhop(init=0.9)", init=source, log_steps=1)
    planned = estimate(resolve(run), prepare_data(resolve(run)))
    train(run, quiet=True)
    loaded = load_checkpoint(tmp_path / "a" / "model")
    assert model_summary(loaded).method == "gated-outeffhop(init=0.9)"
    count = sum(p.numel() for p in loaded.parameters())
    assert count == planned.parameters == json.loads((tmp_path / "a" / "env.json").read_text())["parameters"]
    assert column(tmp_path / "a", "loss")[0] < column(whole_run("opt"), "loss")[0] - 0.2  # it was trained already
    for wrong, message in (
        (config("bert", tmp_path / "b", cache, init=source), "holds a opt, not model='bert'"),
        (config("opt", tmp_path / "b", cache, init=source, samples={"length": 4096}), "samples.length=4096"),
    ):
        with pytest.raises(ValueError, match=message):
            train(wrong, quiet=True)


@pytest.mark.parametrize("model", MODELS)
def test_an_estimate_counts_what_is_built(model, whole_run):
    run = RunFolder(whole_run(model)).config()
    found = estimate(run, prepare_data(run))
    assert found.parameters == sum(p.numel() for p in load_checkpoint(whole_run(model) / "model").parameters())
    assert found.samples_per_step == 8
    assert found.tokens_per_step == (8 * 32 if model in ("bert", "opt") else None)
    assert found.flops_per_step > 6 * 8 * 10_000  # six a weight and sample, at the least
    assert found.memory_mib > found.parameters * 16 / 2**20


# How it ends


def spoil(model):
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.weight[0, 0] = float("nan")


def overflow(model):
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.weight.fill_(1e38)


@pytest.mark.parametrize(
    ("harm", "tensors"),
    [
        (lambda t, m, i: spoil(m), r"weights not finite: model\.decoder\.layers\.1\.fc1\.weight"),
        (lambda t, m, i: overflow(m), r"activations not finite, first in model\.decoder\.layers\.1\.fc"),
    ],
)
def test_a_loss_that_is_not_finite(harm, tensors, cache, tmp_path, monkeypatch):
    at_call(monkeypatch, 7, harm)
    with pytest.raises(NotFinite, match=rf"at step 7 \({tensors}.*last good checkpoint is .*checkpoint-4"):
        train(config("opt", tmp_path / "a", cache), quiet=True)
    assert checkpoints(tmp_path / "a") == ["checkpoint-4"]


def test_data_that_is_not_finite(cache, tmp_path, monkeypatch):
    at_call(monkeypatch, 2, lambda t, m, i: i["past_values"].view(-1)[:1].fill_(float("nan")))
    with pytest.raises(NotFinite, match=r"at step 2 \(the data: past_values is not finite\); there is no checkpoint"):
        train(config("stanhop", tmp_path / "a", cache), quiet=True)


def test_after_a_loss_that_is_not_finite_the_folder_takes_another_try(cache, tmp_path):
    with pytest.raises(NotFinite, match=r"no checkpoint yet; .*train\.lr=1e\+30 is probably too large: try 3e\+29"):
        train(config("opt", tmp_path / "a", cache, lr=1e30, warmup_steps=0, save_steps=8), quiet=True)
    assert not (tmp_path / "a").exists()
    assert train(config("opt", tmp_path / "a", cache), quiet=True).steps == 12


def test_weights_that_are_not_finite_are_not_saved(cache, tmp_path, monkeypatch):
    """A gradient that is not finite, of a loss that is, in the very step that is saved."""

    def harm(trainer, model, inputs):
        model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))

    at_call(monkeypatch, 8, harm)
    with pytest.raises(NotFinite, match=r"not finite after step 8: .*last good checkpoint is .*checkpoint-4"):
        train(config("opt", tmp_path / "a", cache), quiet=True)
    assert checkpoints(tmp_path / "a") == ["checkpoint-4"]


def command(run, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(run))
    return ["train", "--config", str(file), "--json"]


def test_the_command_says_so(cache, tmp_path, monkeypatch, capsys):
    at_call(monkeypatch, 5, lambda t, m, i: spoil(m))
    assert main(command(config("opt", tmp_path / "a", cache), tmp_path)) == 1
    said = "".join(capsys.readouterr().err.split())
    assert "atstep5(weightsnotfinite:model.decoder.layers.1.fc1.weight)" in said
    assert "checkpoint-4" in said


@pytest.mark.parametrize(("kind", "step"), [(signal.SIGINT, 6), (signal.SIGTERM, 12)])
def test_a_signal_checkpoints_and_ends(kind, step, whole_run, cache, tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, step, lambda *_: os.kill(os.getpid(), kind))
        assert main(command(config("opt", tmp_path / "a", cache), tmp_path)) == 130
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert RunFolder(tmp_path / "a").last_checkpoint().name == f"checkpoint-{step}"
    assert not RunFolder(tmp_path / "a").finished
    resume(tmp_path / "a", quiet=True)
    assert weight_bytes(tmp_path / "a") == weight_bytes(whole_run("opt"))
    assert metrics(tmp_path / "a") == metrics(whole_run("opt"))


def test_a_signal_to_all_processes_of_a_job(cache, tmp_path):
    """Workers that load data are needed to finish the step. The signal comes from outside, as from a scheduler."""
    send = "import os, signal, sys; [os.kill(int(who), signal.SIGTERM) for who in sys.argv[1:]]"

    def everyone(*_):
        loading = [str(process.pid) for process in multiprocessing.active_children()]
        assert len(loading) == 1
        subprocess.run([sys.executable, "-S", "-c", send, *loading, str(os.getpid())], check=True)

    with pytest.MonkeyPatch.context() as patch:
        at_call(patch, 6, everyone)
        assert main(command(config("opt", tmp_path / "a", cache, workers=1), tmp_path)) == 130
    assert RunFolder(tmp_path / "a").last_checkpoint().name == "checkpoint-6"
    assert multiprocessing.active_children() == []


def test_a_second_signal_ends_at_once(cache, tmp_path, monkeypatch):
    def twice(*_):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_call(monkeypatch, 6, twice)
    with pytest.raises(KeyboardInterrupt):
        train(config("opt", tmp_path / "a", cache), quiet=True)
    assert checkpoints(tmp_path / "a") == ["checkpoint-4"]


def test_ctrl_c_from_outside(cache, tmp_path):
    run = config("opt", tmp_path / "a", cache, max_steps=100_000, save_steps=100_000)
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(run))
    process = subprocess.Popen(
        [sys.executable, "-m", "outeffhop.cli.main", "train", "--config", str(file)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step 6/"):
            process.send_signal(signal.SIGINT)
            break
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert 6 <= int(RunFolder(tmp_path / "a").last_checkpoint().name.split("-")[1]) < 100_000


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def small_files(*_):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))


@pytest.mark.parametrize(("fault", "word"), [(no_space, "No space left"), (small_files, "File too large")])
def test_a_full_disk(fault, word, whole_run, cache, tmp_path):
    """The second is the system's own refusal, which safetensors has another exception for."""
    original, calls = training_state.save_optimizer, []

    def save(*args):
        calls.append(1)
        if len(calls) == 3:
            fault()
        return original(*args)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = rf"checkpoint 12 could not be written \(.*{word}.*\); the last checkpoint, .*checkpoint-8, is whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_state, "save_optimizer", save)
        try:
            with pytest.raises(OSError, match=message):
                train(config("opt", tmp_path / "a", cache), quiet=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints(tmp_path / "a") == ["checkpoint-4", "checkpoint-8"]  # and no side folder
    resume(tmp_path / "a", quiet=True)
    assert weight_bytes(tmp_path / "a") == weight_bytes(whole_run("opt"))
    assert metrics(tmp_path / "a") == metrics(whole_run("opt"))


def test_patience(cache, tmp_path):
    """A rate that spoils everything ends it long before its steps."""
    found = train(config("stanhop", tmp_path / "a", cache, lr=0.5, patience=2, eval_steps=1, max_steps=30), quiet=True)
    values = column(tmp_path / "a", "eval_mse")
    assert found.stopped_early
    assert found.steps == len(values) < 30
    assert min(values[-2:]) >= min(values[:-2])


def test_the_best_step_is_the_one_that_is_saved(cache, tmp_path):
    """A rate that rises until it spoils the model: the metrics, the outliers and the weights are those of before."""
    settings = dict(lr=0.3, warmup_steps=6, eval_steps=2, keep=1, patience=0, eval_batches=None, outlier_steps=2)
    run = config("stanhop", tmp_path / "best", cache, keep_best=True, **settings)
    found, last = (
        train(run, quiet=True),
        train(config("stanhop", tmp_path / "last", cache, keep_best=False, **settings)),
    )
    lines = metrics(tmp_path / "best")
    values = {line["step"]: line["eval_mse"] for line in lines if "eval_mse" in line}
    assert found.best_step == min(values, key=values.get) < found.steps == 12
    assert (last.best_step, last.metrics["mse"]) == (None, values[12])
    assert found.metrics["mse"] == values[found.best_step]
    norms = {line["step"]: line["max_inf_norm"] for line in lines if "max_inf_norm" in line}
    assert found.max_inf_norm == norms[found.best_step]
    checkpoint = RunFolder(tmp_path / "best").checkpoint(found.best_step)
    assert weight_bytes(tmp_path / "best") == (checkpoint / "model.safetensors").read_bytes()
    assert metrics(tmp_path / "last") == lines  # it was trained in the same way
    card = (tmp_path / "best" / "model" / "README.md").read_text()
    assert f"After step {found.best_step}, the best evaluation of the run" in card


def test_a_run_in_epochs(cache, tmp_path):
    run = config("vit", tmp_path / "a", cache, max_steps=None, epochs=2, batch_size=240, eval_steps="epoch")
    assert train(run, quiet=True).steps == 10
    kept = RunFolder(tmp_path / "a").config().train
    assert (kept.max_steps, kept.epochs, kept.eval_steps) == (10, None, 5)
    assert [line["step"] for line in metrics(tmp_path / "a") if "eval_accuracy" in line] == [5, 10]
    assert train(run, resume=True, quiet=True).steps == 10  # the same run, in either unit
    longer = dataclasses.replace(run, train=dataclasses.replace(run.train, epochs=3))
    with pytest.raises(ValueError, match=r"train\.max_steps=10, not 15"):
        train(longer, resume=True, quiet=True)
