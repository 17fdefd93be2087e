"""Options beyond the paper, trained: learned sinks, gates of all features, QK-norm; none is lost on the way."""

import pytest
from runs import DATA, MODELS, SIZES, config, weights

from outeffhop.cli.main import main
from outeffhop.lab.training import RunFolder, TrainConfig, train
from outeffhop.lab.training.optimization import make_optimizer
from outeffhop.models import model_summary, presets
from outeffhop.models.checkpoint import load_checkpoint

EVERYTHING = "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)"
FIRST = {"sink": 0.0, "gate.weight": 0.0, "gate.bias": 0.0, "qk_norm.query.weight": 1.0}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_method_learns_is_trained_saved_and_counted(name, cache, tmp_path):
    run = config(name, tmp_path, cache, method=EVERYTHING, max_steps=4, lr=1e-2, eval_steps=4, outlier_steps=0)
    train(run, quiet=True)
    found = weights(tmp_path)
    layers = len({key.rpartition("sink")[0] for key in found if key.endswith("sink")})
    for part, first in FIRST.items():
        learned = [value for key, value in found.items() if key.endswith(part)]
        assert len(learned) == layers, part
        assert all((value != first).any() for value in learned), part
    summary = model_summary(load_checkpoint(RunFolder(tmp_path).model))
    assert (summary.method, summary.layers) == (EVERYTHING, layers)
    assert summary.extra_parameters == sum(v.numel() for k, v in found.items() if k.endswith(tuple(FIRST)))


@pytest.mark.parametrize("name", MODELS)
def test_the_command_takes_a_learned_sink(name, cache, tmp_path, capsys):
    out, method = tmp_path / "a", "outeffhop(sink=learned)"
    sizes = [str(word) for pair in SIZES[name].items() for word in pair]
    short = ["--train.max-steps", "2", "--train.batch-size", "4", "--train.eval-batches", "1"]
    text = ["--samples.length", "32", "--samples.vocab-size", "300", "--samples.cache-dir", str(cache)]
    command = ["train", "--model", name, "--method", method, "--data", DATA[name], "--out", str(out), *short]
    command += ["--train.device", "cpu", "--train.outlier-batches", "1", *(text if "text" in DATA[name] else [])]
    assert main([*command, "--changes", *sizes]) == 0, capsys.readouterr().err
    assert model_summary(load_checkpoint(out / "model")).method == method


@pytest.mark.parametrize("name", ["opt", "stanhop"])
def test_none_of_it_is_decayed(name):
    model = presets.build(name, "tiny", EVERYTHING, **SIZES[name])
    settings = TrainConfig(lr=1e-3, weight_decay=0.1, optimizer="adamw", betas=(0.9, 0.95))
    groups = make_optimizer(model, settings, decay_norms=True).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    names = {name for name, p in model.named_parameters() if id(p) in decayed}
    assert any("q_proj" in name for name in names)
    assert not any(name.endswith(tuple(FIRST)) for name in names)
