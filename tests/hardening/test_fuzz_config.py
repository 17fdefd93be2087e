"""Run configs of any shape: what is wrong is refused by file and field, and what is right comes back."""

import dataclasses
import math

import pytest
import yaml
from fuzzing import bytes_like, cases, command, one_line, outcome, refused
from hypothesis import example, given
from hypothesis import strategies as st

from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig, from_dict, from_yaml, to_dict, to_yaml
from outeffhop.lab.training.recipes import resolve

FIELDS = [f"{f.name}" for kind in (RunConfig, TrainConfig, DataConfig) for f in dataclasses.fields(kind)]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=10**400, max_value=10**401),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["opt", "bert", "tiny", "adamw", "linear", "1e-3", "nan", "builtin:text", "fp32", "paper"]),
    st.dates(),
    st.binary(max_size=4),
)
NAMES = st.sampled_from(FIELDS) | st.text(max_size=6)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
CONFIGS = st.dictionaries(
    NAMES,
    VALUES,
    max_size=4,
) | st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["opt", "bert", "vit", "stanhop"]) | SCALARS,
        "method": st.sampled_from(["outeffhop", "gated", "clipped(gamma=-0.1)"]) | SCALARS,
        "data": st.just("builtin:text") | SCALARS,
        "changes": st.dictionaries(
            st.sampled_from(["hidden_size", "num_hidden_layers", "dropout"]), VALUES, max_size=2
        ),
        "train": st.dictionaries(
            st.sampled_from([f.name for f in dataclasses.fields(TrainConfig)]), VALUES, max_size=4
        ),
        "samples": st.dictionaries(
            st.sampled_from([f.name for f in dataclasses.fields(DataConfig)]), VALUES, max_size=3
        ),
    },
)


@cases(62)
@given(CONFIGS)
@example({"train": {"lr": 10**400}})
@example({"train": {"betas": [10**400, 1]}})
@example({"changes": {"hidden_size": [1]}})
@example({"changes": {"dropout": math.nan}})
def test_a_config_of_any_values(values):
    found = outcome(lambda: from_dict(values))
    if refused(found):
        assert len(str(found)) < 2000
        return
    assert from_dict(to_dict(found)) == found or "nan" in str(found)
    resolved = outcome(lambda: resolve(found))
    if not refused(resolved):
        assert from_dict(to_dict(resolved)) == resolved or "nan" in str(resolved)


ODD_YAML = (
    "train: {lr: !!timestamp x}",
    "train: {lr: !!bool x}",
    "train: {lr: !!int x}",
    "train: {lr: !!float x}",
    "train: {lr: !!binary x}",
    "!!python/object/apply:os.system ['true']",
    "train: {lr: 2020-99-99}",
    "train: {seed: " + "9" * 5000 + "}",
    "train: " + "[" * 1000,
    "&a [*a]",
    "changes: &a {x: *a}",
    "train: &a {lr: *a}",
    "? [a, b]\n: c",
    "? {a: b}\n: c",
    "? !!set {a}\n: c",
    "<<: 3",
    "<<: [1, 2]",
    "a: *unknown",
    "- 1",
    "3",
    "''",
    "\t",
    "%YAML 9.9\n---\n",
    "a: b\n---\nc: d",
    "\x00",
    "\ufeffmodel: opt",
    "=",
    "model: [",
    "train: {lr: .inf}",
)


@pytest.mark.parametrize("text", ODD_YAML, ids=range(len(ODD_YAML)))
def test_yaml_that_is_odd(text, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    found = outcome(lambda: from_yaml(file), str(file))
    if refused(found):
        assert len(str(found).splitlines()) == 1
        assert len(str(found)) < 2000
    code, _, err = command("train", "--config", file, "--dry-run")
    assert code == 2
    one_line(err, str(file), "data is missing", "train.", "changes.")


@cases(50)
@given(st.data())
def test_a_damaged_file(tmp_path, data):
    config = RunConfig(data="builtin:text", train=TrainConfig(lr=1e-3, betas=(0.9, 0.95)), changes={"dropout": 0.0})
    file = tmp_path / "run.yaml"
    text = data.draw(bytes_like(to_yaml(config).encode()) | CONFIGS.map(lambda v: yaml.safe_dump(v).encode()))
    file.write_bytes(text)
    found = outcome(lambda: from_yaml(file), str(file))
    if refused(found):
        assert len(str(found).splitlines()) == 1
    else:
        assert isinstance(found, RunConfig)


@cases(15)
@given(
    st.builds(
        RunConfig,
        model=st.sampled_from(["opt", "bert", "vit", "stanhop"]),
        method=st.text(max_size=10),
        data=st.text(max_size=10),
        out=st.text(max_size=10),
        changes=st.dictionaries(st.text(max_size=5), st.integers() | st.booleans() | st.text(max_size=5), max_size=2),
        train=st.builds(
            TrainConfig,
            lr=st.none() | st.floats(0, 1),
            betas=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)),
            seed=st.integers(),
        ),
        samples=st.builds(DataConfig, length=st.none() | st.integers(), tokenizer=st.none() | st.text(max_size=9)),
    )
)
def test_what_is_right_comes_back(tmp_path, config):
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")
    assert from_yaml(file) == config
