"""A run's config: dataclasses, YAML and flags are three forms of one thing; a wrong field is refused by its name."""

import dataclasses
import subprocess
import sys
import typing
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro
import yaml
from runs import METHODS, MODELS, SIZES

import outeffhop
from outeffhop.lab.training import DataConfig, RunConfig, TrainConfig
from outeffhop.lab.training.config import from_dict, from_yaml, to_dict, to_yaml
from outeffhop.lab.training.recipes import counts_epochs, in_steps, resolve
from outeffhop.lab.training.starting_model import build
from outeffhop.methods import Method
from outeffhop.models import model_summary, presets

EVERY_TRAIN = TrainConfig(
    lr=4e-4,
    max_steps=7,
    epochs=3,
    batch_size=6,
    accumulate=3,
    optimizer="adam",
    schedule="halving",
    min_lr=1e-6,
    warmup_steps=2,
    weight_decay=0.3,
    betas=(0.8, 0.9),
    clip_norm=0.5,
    penalty=0.1,
    penalty_kind="fourth_power",
    penalty_tensors="paper+inputs",
    weight_bound=20.0,
    anneal_steps=2,
    patience=4,
    keep_best=True,
    eval_steps="epoch",
    eval_batches=5,
    log_steps=8,
    save_steps=11,
    keep=3,
    outlier_steps=13,
    outlier_batches=1,
    outlier_tensors="*.fc1,*.fc2",
    seed=17,
    precision="bf16",
    compile=True,
    gradient_checkpointing=True,
    fsdp=True,
    timeout=60,
    workers=1,
    device="cpu",
    track="tensorboard",
)
EVERY_SAMPLES = DataConfig(
    length=64,
    vocab_size=500,
    tokenizer="words",
    image_size=16,
    augment="light",
    label_smoothing=0.2,
    in_len=10,
    out_len=5,
    cache_dir="cache",
)
EVERY = RunConfig(
    model="vit",
    preset="small",
    method="gated",
    data="pictures",
    out="runs/b",
    init="runs/a/model",
    teacher="runs/t/model",
    task="classification",
    changes={"hidden_size": 8, "layer_norm_eps": 1e-5, "qkv_bias": True, "hidden_act": "relu"},
    train=EVERY_TRAIN,
    samples=EVERY_SAMPLES,
)


def test_every_field_is_another_than_by_default():
    for given, default in ((EVERY, RunConfig()), (EVERY_TRAIN, TrainConfig()), (EVERY_SAMPLES, DataConfig())):
        for field in dataclasses.fields(given):
            assert getattr(given, field.name) != getattr(default, field.name), field.name


@pytest.mark.parametrize("config", [EVERY, RunConfig()])
def test_yaml_and_back(config, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert from_yaml(file) == config
    assert from_dict(to_dict(config)) == config
    assert to_yaml(config).startswith("# outeffhop train --config")


def test_flags_and_back():
    flags = []
    for name, value in to_dict(EVERY).items():
        nested = name in ("train", "samples")
        for key, v in ({f"{name}.{inner}": v for inner, v in value.items()} if nested else {name: value}).items():
            flag = "--" + key.replace("_", "-")
            if isinstance(v, bool) and key != "train.keep_best":  # that of the recipe, if it is left out
                flags.append(flag)
            elif isinstance(v, dict):
                flags += [flag, *(str(word) for pair in v.items() for word in pair)]
            else:
                flags += [flag, *map(str, v if isinstance(v, list) else [v])]
    found = tyro.cli(RunConfig, args=flags)
    assert found == EVERY
    assert {k: type(v) for k, v in found.changes.items()} == {k: type(v) for k, v in EVERY.changes.items()}


def test_a_file_may_leave_fields_out(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("model: bert\ntrain:\n  lr: 4e-4\n  betas: [9e-1, 0.95]\n  clip_norm: 1\n")
    assert yaml.safe_load(file.read_text())["train"]["lr"] == "4e-4"  # YAML 1.1 has no such number
    found = from_yaml(file)
    assert found == RunConfig(model="bert", train=TrainConfig(lr=4e-4, betas=(0.9, 0.95), clip_norm=1.0))
    file.write_text("")
    assert from_yaml(file) == RunConfig()


def test_a_number_among_the_changes(tmp_path):
    """As a flag has it, so has a file: YAML has no number 1e-1."""
    file = tmp_path / "config.yaml"
    file.write_text("changes: {dropout: 1e-1, activation_function: relu, ffn_dim: 8, enable_bias: true}")
    found = from_yaml(file).changes
    assert found == {"dropout": 0.1, "activation_function": "relu", "ffn_dim": 8, "enable_bias": True}
    assert [type(v) for v in found.values()] == [float, str, int, bool]


@pytest.mark.parametrize(
    ("values", "key", "meant"),
    [
        ({"modle": "opt"}, "modle", "'model'"),
        ({"train": {"learn_rate": 1, "lr": 1}}, "train.learn_rate", "Available: lr, max_steps"),
        ({"train": {"max_step": 1}}, "train.max_step", "'max_steps'"),
        ({"samples": {"lenght": 1}}, "samples.lenght", "'length'"),
    ],
)
def test_an_unknown_key_gets_the_nearest_right_one(values, key, meant, tmp_path):
    with pytest.raises(ValueError, match=f"{key} is unknown.*{meant}"):
        from_dict(values)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=r"config\.yaml"):
        from_yaml(file)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "huge"}, "preset='huge': must be 'tiny' or 'small'"),
        ({"model": 3}, "model=3"),
        ({"method": ["a"]}, r"method=\['a'\]: must be a string"),
        ({"changes": 4}, "changes=4: must be a mapping"),
        ({"changes": {1: 2}}, "changes=.*: must be a mapping"),
        ({"train": 4}, "train=4: must be a mapping"),
        ({"train": {"lr": "fast"}}, "train.lr='fast': must be a number"),
        ({"train": {"lr": True}}, "train.lr=True: must be a number"),
        ({"train": {"max_steps": 1.5}}, "train.max_steps=1.5: must be an integer"),
        ({"train": {"max_steps": True}}, "train.max_steps=True"),
        ({"train": {"compile": 1}}, "train.compile=1: must be true or false"),
        ({"train": {"keep": None}}, "train.keep=None: must be an integer"),
        ({"train": {"betas": [0.9]}}, r"train.betas=\[0.9\]: must be a list of 2 numbers"),
        ({"train": {"betas": [0.9, "b"]}}, r"train.betas\[1\]='b': must be a number"),
        ({"train": {"precision": "bf8"}}, "train.precision='bf8': must be 'fp32' or 'bf16'"),
        ([1], r"^\[1\]: must be a mapping"),
    ],
)
def test_a_wrong_type_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=message):
        from_dict(values)


@pytest.mark.parametrize("content", ["a: [", "\x00"])
def test_what_is_no_yaml(content, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match="is not YAML"):
        from_yaml(file)
    with pytest.raises(ValueError, match="cannot be read"):
        from_yaml(tmp_path / "none.yaml")


NEEDED = {
    "bert": ("length", "vocab_size"),
    "opt": ("length", "vocab_size"),
    "vit": ("image_size", "augment", "label_smoothing"),
    "stanhop": ("in_len", "out_len"),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("preset", presets.SIZES)
def test_a_resolved_config_leaves_nothing_open(model, preset):
    found = resolve(RunConfig(model=model, preset=preset, data="builtin:text", out="a"))
    open_fields = {f.name for f in dataclasses.fields(TrainConfig) if getattr(found.train, f.name) is None}
    unit = {"epochs", "max_steps"} & open_fields
    assert len(unit) == 1
    assert open_fields - unit == {"eval_batches", "device"}  # all of the set, and the best device there is
    assert all(getattr(found.samples, name) is not None for name in NEEDED[model])
    assert resolve(found) == found
    assert from_dict(to_dict(found)) == found


def test_what_is_given_wins_over_the_recipe():
    given = TrainConfig(lr=0.0, max_steps=3, schedule="cosine")
    found = resolve(RunConfig(data="builtin:text", train=given, samples=DataConfig(length=16)))
    assert (found.train.lr, found.train.max_steps, found.train.schedule) == (0.0, 3, "cosine")
    assert found.samples.length == 16
    assert found.train.weight_decay == 0.1


def test_the_papers_recipe():
    bert, opt, vit, stanhop = (resolve(RunConfig(model=m, preset="paper", data="x")).train for m in MODELS)
    assert (bert.lr, bert.max_steps, bert.warmup_steps, bert.batch_size) == (1e-4, 200_000, 10_000, 256)
    assert (opt.lr, opt.max_steps, opt.warmup_steps, opt.batch_size) == (4e-4, 125_000, 2000, 192)
    assert (bert.weight_decay, opt.weight_decay, opt.betas) == (0.01, 0.1, (0.9, 0.95))
    assert (vit.lr, vit.min_lr, vit.schedule, vit.weight_decay, vit.clip_norm) == (1e-3, 1e-5, "cosine", 0.03, 0.0)
    assert (stanhop.optimizer, stanhop.schedule, stanhop.patience, stanhop.clip_norm) == ("adam", "halving", 5, 5.0)
    # every epoch on the whole validation set, and the best epoch's weights
    assert (stanhop.epochs, stanhop.eval_steps, stanhop.eval_batches, stanhop.keep_best) == (100, "epoch", None, True)
    assert not any(other.keep_best for other in (bert, opt, vit))


def prepared(samples):
    return SimpleNamespace(train=range(samples))


def test_epochs_become_steps():
    given = TrainConfig(epochs=3, batch_size=8, eval_steps="epoch", save_steps=5, outlier_steps="epoch")
    found = resolve(RunConfig(data="builtin:text", train=given))
    assert (found.train.epochs, found.train.max_steps) == (3, None)
    assert counts_epochs(found.train)
    known = in_steps(found, prepared(83)).train  # ten whole steps, and a rest that is left out
    assert (known.max_steps, known.epochs, known.eval_steps, known.save_steps, known.outlier_steps) == (
        30, None, 10, 5, 10,
    )  # fmt: skip
    assert not counts_epochs(known)
    assert in_steps(dataclasses.replace(found, train=known), prepared(83)).train == known


def test_a_length_in_the_other_unit_replaces_the_recipes():
    steps = resolve(RunConfig(model="stanhop", preset="paper", data="x", train=TrainConfig(max_steps=7))).train
    assert (steps.max_steps, steps.epochs) == (7, None)
    epochs = resolve(RunConfig(model="opt", data="x", train=TrainConfig(epochs=7))).train
    assert (epochs.max_steps, epochs.epochs) == (None, 7)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_a_method_by_its_name_has_its_defaults(model, method):
    """For every model, with or without brackets; the paper's parameters are written out."""
    for written in (method, f"{method}()"):
        found = resolve(RunConfig(model=model, method=written, data="x", changes=SIZES[model]))
        assert found.method == method


@pytest.mark.parametrize("method", ["gated(predictor=linear)", "clipped(alpha=3)", "outeffhop(n=2)", "clipped()"])
def test_a_method_with_parameters_is_taken_as_it_is_written(method):
    found = resolve(RunConfig(model="bert", method=method, data="x", changes=SIZES["bert"]))
    assert Method.parse(found.method) == Method.parse(method)
    assert Method.parse(model_summary(build(found, {})).method) == Method.parse(method)
    assert resolve(found) == found


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 0) for name in ("max_steps", "batch_size", "accumulate", "eval_steps", "log_steps", "save_steps")),
        ("epochs", 0),
        ("eval_steps", "day"),
        *((name, 0) for name in ("keep", "eval_batches", "outlier_batches")),
        *((name, -1) for name in ("warmup_steps", "patience", "outlier_steps", "workers", "seed")),
        *((name, -1.0) for name in ("lr", "weight_decay", "clip_norm", "penalty", "min_lr")),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("betas", (0.9, 1.0)),
        ("accumulate", 5),
        ("precision", "bf8"),
        ("optimizer", "sgd"),
        ("max_steps", 1.5),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=rf"train\.{field}="):
        resolve(RunConfig(data="builtin:text", train=dataclasses.replace(TrainConfig(), **{field: value})))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "data is missing"),
        ({"data": "x", "model": "gpt"}, "model='gpt'"),
        ({"data": "x", "preset": "huge"}, "preset='huge'"),
        ({"data": "x", "method": "outefhop"}, "outeffhop"),
        ({"data": "x", "changes": {"num_hiden_layers": 1}}, "changes.num_hiden_layers.*'num_hidden_layers'"),
        ({"data": "x", "changes": {"hidden_size": "big"}}, "changes={'hidden_size': 'big'}: .*expected int"),
        ({"data": "x", "train": TrainConfig(epochs=2, max_steps=9)}, r"train\.epochs=2 and train\.max_steps=9"),
        ({"data": "x", "init": "nowhere"}, "init='nowhere' is not a checkpoint folder"),
        ({"data": "x", "model": "vit", "train": TrainConfig(lr=1e-6)}, r"train\.min_lr=1e-05 is above train\.lr=1e-06"),
    ],
)
def test_a_config_that_cannot_be(given, message):
    with pytest.raises(ValueError, match=message):
        resolve(RunConfig(**given))


def test_samples_follow_the_changes():
    found = resolve(RunConfig(model="stanhop", data="builtin:series", changes={"in_len": 96, "out_len": 12}))
    assert (found.samples.in_len, found.samples.out_len) == (96, 12)
    short = resolve(RunConfig(model="bert", data="builtin:text", changes={"max_position_embeddings": 16}))
    assert short.samples.length == 16


def test_every_field_is_explained():
    """``--help-all`` has its words from the docstrings."""
    for kind in (RunConfig, TrainConfig, DataConfig):
        for name in typing.get_type_hints(kind):
            assert f"        {name}: " in kind.__doc__


def test_a_config_needs_neither_torch_nor_transformers():
    """The command builds its help from it. The package around it is left out: what that imports is its own affair."""
    code = (
        "import sys, types; "
        f"package = types.ModuleType('outeffhop'); package.__path__ = [{str(Path(outeffhop.__file__).parent)!r}]; "
        "sys.modules['outeffhop'] = package; "
        "import outeffhop.lab.training.config; "
        "print([name for name in ('torch', 'transformers', 'accelerate', 'datasets') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
