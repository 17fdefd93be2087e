"""What cannot be trained is refused by name before the run begins: the folder is left for the right command."""

import dataclasses
import shutil

import numpy as np
import pytest
from runs import config, metrics

from outeffhop.lab.training import RunFolder, train
from outeffhop.lab.training.estimate import estimate
from outeffhop.lab.training.recipes import resolve
from outeffhop.lab.training.run import prepare_data


def refused(run, message):
    """By a run, and by its estimate."""
    with pytest.raises(ValueError, match=message):
        train(run, quiet=True)
    assert not RunFolder(run.out).exists
    planned = resolve(run)
    with pytest.raises(ValueError, match=message):
        estimate(planned, prepare_data(planned))


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("opt", dict(changes={"max_position_embeddings": 16}), r"samples\.length=32: the model has 16 positions"),
        ("opt", dict(changes={"vocab_size": 280}), r"has vocab_size=300, changes\.vocab_size=280"),
        ("vit", dict(changes={"num_labels": 5}), r"has num_labels=10, changes\.num_labels=5"),
        (
            "vit",
            dict(changes={"image_size": 8}, samples={"image_size": 16}),
            r"has image_size=16, changes\.image_size=8",
        ),
        ("vit", dict(changes={"num_channels": 3}), r"has num_channels=1, changes\.num_channels=3"),
        ("stanhop", dict(changes={"in_len": 48}, samples={"in_len": 96}), r"has in_len=96, changes\.in_len=48"),
        ("stanhop", dict(gradient_checkpointing=True), r"train\.gradient_checkpointing=True"),
        ("opt", dict(outlier_tensors="*.fc1, *.fc3"), r"train\.outlier_tensors='\*\.fc1, \*\.fc3': .*'\*\.fc3'"),
        ("vit", dict(batch_size=1_000_000), r"train\.batch_size=1000000"),
        (
            "opt",
            dict(changes={"activation_function": "reluu"}),
            r"with .*activation_function='reluu'.*: 'reluu' is unknown",
        ),
        ("opt", dict(precision="fp16"), r"train\.precision='fp16' needs a GPU"),
    ],
)
def test_settings_that_do_not_fit(model, given, message, cache, tmp_path):
    refused(config(model, tmp_path / "a", cache, **given), message)


def test_data_that_a_checkpoint_does_not_fit(whole_run, cache, tmp_path):
    pictures = np.random.default_rng(0).integers(0, 255, (200, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "many.npz", x=pictures, y=np.arange(200) % 20)
    run = config("vit", tmp_path / "a", cache, init=whole_run("vit") / "model", samples={"length": 9})
    refused(
        dataclasses.replace(run, data=str(tmp_path / "many.npz")),
        r"has num_labels=20, the model of init='.*model' 10: they must agree",
    )


def test_a_checkpoint_without_its_tokenizer(whole_run, cache, tmp_path):
    """One trained on the data would number the tokens otherwise than the weights know them."""
    source = whole_run("opt") / "model"
    bare = tmp_path / "bare"
    shutil.copytree(source, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    run = config("opt", tmp_path / "a", cache, init=bare)
    with pytest.raises(ValueError, match=r"tokenizer='.*bare' is not a folder with a tokenizer"):
        train(run, quiet=True)
    named = config("opt", tmp_path / "a", cache, init=bare, samples={"tokenizer": str(source)}, max_steps=1)
    assert train(named, quiet=True).steps == 1


def test_a_finished_run_stands_for_its_model(whole_run, cache, tmp_path):
    out = whole_run("opt")
    short = dict(max_steps=1, log_steps=1)
    train(config("opt", tmp_path / "a", cache, init=out, **short), quiet=True)
    train(config("opt", tmp_path / "b", cache, init=out / "model", **short), quiet=True)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")
    assert RunFolder(tmp_path / "a").config().init == str(out / "model")
    begun = RunFolder(tmp_path / "begun")
    begun.create(RunFolder(out).config())
    with pytest.raises(ValueError, match=r"init='.*begun' is an unfinished run"):
        resolve(config("opt", tmp_path / "c", cache, init=begun.path))
