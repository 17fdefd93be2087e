"""The paper's scale: every setting is the paper's, or differs for a reason that is written down."""

from dataclasses import replace
from pathlib import Path

import pytest

from outeffhop.lab.paper import paper_settings, training_runs
from outeffhop.lab.paper.dry_run import rows
from outeffhop.lab.paper.experiment import Settings
from outeffhop.lab.paper.registry import NAMES, find
from outeffhop.lab.paper.trained_models import measured_on, watched_on
from outeffhop.models import presets

PAPER = Settings(scale="paper", data=Path("sets"), device="cuda")


def rows_of(name):
    return rows(find(name), replace(PAPER, seeds=paper_settings.repeats(name) or 3))


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_the_papers_or_has_a_reason(name):
    found = rows_of(name)
    assert [f"{row.part}, {row.setting}: {row.ours} ≠ {row.paper}" for row in found if row.note == "differs"] == []
    differs = {(name, row.part, row.setting) for row in found if row.note.startswith("differs")}
    assert differs == {key for key in paper_settings.DIFFERENCES if key[0] == name}  # no reason without a difference


@pytest.mark.parametrize("name", NAMES)
def test_everything_the_paper_states_is_shown(name):
    shown = {(row.part, row.setting) for row in rows_of(name)}
    stated = {(part, setting) for part, values in paper_settings.STATED[name].items() for setting in values}
    assert stated - shown == set()
    assert all(row.source for row in rows_of(name) if row.paper is not None)


def test_a_setting_that_changes_is_seen(monkeypatch):
    monkeypatch.setitem(presets.MODELS["opt"].sizes["paper"], "dropout", 0.0)
    changed = [(row.part, row.setting) for row in rows_of("table1") if row.note == "differs"]
    assert changed == [("opt", "dropout")]


def test_smaller_scales_show_differences_without_reasons():
    found = rows(find("table1"), replace(PAPER, scale="small"))
    notes = {(row.part, row.setting): row.note for row in found}
    assert notes["opt", "layers"] == notes["bert", "precision"] == "differs"


@pytest.mark.parametrize("model", presets.MODELS)
def test_parts_of_a_batch_fit_the_gpu_and_make_up_the_batch(model, monkeypatch):
    most = {"bert": 256, "opt": 48, "vit": 512, "stanhop": 128}[model]
    for processes in (1, 2, 4, 8):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        train = training_runs.run_config(PAPER, model, "vanilla", 0).train
        assert train.batch_size % (processes * train.accumulate) == 0
        assert train.batch_size // (processes * train.accumulate) <= most
    monkeypatch.setenv("WORLD_SIZE", "1")
    whole = training_runs.run_config(PAPER, model, "vanilla", 0).train
    assert whole.accumulate == {"bert": 1, "opt": 4, "vit": 10, "stanhop": 1}[model]


def test_metric_and_outliers_are_of_the_whole_set_at_the_papers_scale_alone():
    for model in presets.MODELS:
        config = training_runs.run_config(PAPER, model, "vanilla", 0)
        assert measured_on(config, PAPER) is None
        assert measured_on(config, replace(PAPER, quick=True)) == 1
        assert measured_on(config, replace(PAPER, scale="small")) is not None
    assert watched_on(PAPER) is None
    assert watched_on(replace(PAPER, scale="small")) == 16


def test_tokenizers(tmp_path):
    def of(model, **changes):
        return training_runs.run_config(replace(PAPER, **changes), model, "vanilla", 0)

    assert of("bert").samples.tokenizer == "hub:bert-base-uncased"
    assert of("opt").samples.tokenizer == "hub:facebook/opt-125m"
    assert of("opt").changes["vocab_size"] == 50272  # the tokenizer has 50,265 tokens
    assert of("opt", scale="small").samples.tokenizer is None
    trained = of("opt", tokenizer="trained")
    assert (trained.samples.tokenizer, trained.samples.vocab_size, trained.changes) == (None, 50272, {})
    assert of("bert", tokenizer="hub:mine").samples.tokenizer == "hub:mine"
    (tmp_path / "bert").mkdir()
    assert of("bert", tokenizer=str(tmp_path)).samples.tokenizer == str(tmp_path / "bert")
    assert of("opt", tokenizer=str(tmp_path)).samples.tokenizer == str(tmp_path)
    assert of("vit").samples.tokenizer is None


def test_text_given_apart_is_trained_on_and_needs_no_folder():
    settings = replace(PAPER, text="hub:bookcorpus+wiki40b/en")
    assert training_runs.run_config(settings, "bert", "vanilla", 0).data == "hub:bookcorpus+wiki40b/en"
    assert training_runs.run_config(settings, "vit", "vanilla", 0).data == "sets/imagenet"
    assert find("table1").needs(settings) == ["ett", "imagenet"]
    assert find("table1").needs(PAPER) == ["bookcorpus+wiki40b", "ett", "imagenet"]
    cells = {cell.key: cell.values["data"] for cell in find("table1").cells(settings)}
    assert cells["opt-vanilla-0"] == "hub:bookcorpus+wiki40b/en"


def test_the_authors_values_that_smaller_scales_do_not_have():
    small = replace(PAPER, scale="small")
    both = ((PAPER, "gated(predictor=mlp, init=0.5)", 0.1), (small, "gated(predictor=mlp)", 0.0))
    for settings, opening, dropout in both:
        assert training_runs.run_config(settings, "bert", "gated", 0).method == opening
        assert presets.config("opt", settings.scale).dropout == dropout
    assert presets.config("stanhop", "paper").dropout == 0.5
    assert presets.config("stanhop", "small").dropout == 0.0
