"""``--train.penalty``, and ``--init`` with calibration and a schedule: what a trained model is fine-tuned with."""

import dataclasses

import pytest
import torch
from runs import config, metrics, result, weight_bytes

from outeffhop.lab.data import batches
from outeffhop.lab.training import RunFolder, prepare_data, resume, starting_model, train
from outeffhop.lab.training.recipes import resolve
from outeffhop.models import convert, load_checkpoint, model_summary
from outeffhop.models.modules import attention_modules, state_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def softmax(cache, tmp_path_factory):
    """A model trained with softmax."""
    out = tmp_path_factory.mktemp("softmax") / "run"
    train(config("opt", out, cache, method="vanilla"), quiet=True)
    return out / "model"


@pytest.mark.parametrize("model", ["opt", "vit"])
def test_the_penalty_lowers_kurtosis(model, cache, tmp_path):
    found = {}
    for weight in (0.0, 1.0):
        out = tmp_path / str(weight)
        found[weight] = train(config(model, out, cache, method="vanilla", penalty=weight, lr=5e-3), quiet=True)
        written = ["outlier_penalty" in line for line in metrics(out) if "loss" in line]
        assert written == [weight > 0] * len(written)
        assert not load_checkpoint(out / "model")._forward_hooks
    assert found[1.0].avg_kurtosis < found[0.0].avg_kurtosis


def test_with_a_penalty_parts_of_a_step_are_the_step(cache, tmp_path):
    for accumulate in (1, 4):
        train(config("opt", tmp_path / str(accumulate), cache, penalty=0.5, accumulate=accumulate), quiet=True)
    one, four = (result(tmp_path / name) for name in ("1", "4"))
    assert one["metrics"] == pytest.approx(four["metrics"], rel=1e-3)
    assert one["avg_kurtosis"] == pytest.approx(four["avg_kurtosis"], rel=1e-3)


def test_init_starts_near_and_ends_at_the_method(softmax, cache, tmp_path):
    losses = {}
    for steps in (0, 4):
        run = config(
            "opt", tmp_path / str(steps), cache, method="gated-outeffhop(init=0.05)", init=softmax, log_steps=1,
            anneal_steps=steps, save_steps=2, keep=9, lr=1e-5,
        )  # fmt: skip
        train(run, quiet=True)
        losses[steps] = [line["loss"] for line in metrics(run.out) if "loss" in line]
        model = load_checkpoint(tmp_path / str(steps) / "model")
        assert model_summary(model).method == "gated-outeffhop(init=0.05)"
        assert all(state_of(m).sink is None for m in attention_modules(model).values())  # the schedule has ended
    trained = RunFolder(softmax.parent).metrics()[-1]["eval_loss"]
    assert losses[4][0] < losses[0][0]
    assert losses[4][0] == pytest.approx(trained, rel=0.2)
    midway = load_checkpoint(tmp_path / "4" / "checkpoints" / "checkpoint-2")
    assert all(state_of(m).sink is not None for m in attention_modules(midway).values())


def test_a_start_is_calibrated_on_the_device_of_the_run(softmax, cache, tmp_path, monkeypatch):
    run = resolve(config("opt", tmp_path / "run", cache, method="gated-outeffhop", init=softmax, anneal_steps=4))
    where = []
    monkeypatch.setattr(
        starting_model, "convert", lambda model, *_, calibrate: where.append((model.device.type, len(calibrate)))
    )
    model, _ = starting_model.first_model(run, prepare_data(run), torch.device("meta"))
    assert where == [("meta", starting_model._BATCHES)]
    assert model.device.type == "meta"  # where Trainer wants it


def test_a_run_starts_from_the_calibrated_model(softmax, cache, tmp_path, monkeypatch):
    run = config(
        "opt", tmp_path / "run", cache, method="outeffhop", init=softmax, anneal_steps=50, lr=0.0, save_steps=1, keep=99
    )
    asked = []

    def first(config, prepared, device):
        asked.append(device)
        return starting_model.first_model(config, prepared, device)

    monkeypatch.setattr("outeffhop.lab.training.run.first_model", first)
    train(run, quiet=True)
    assert asked == [torch.device("cpu")]
    prepared = prepare_data(resolve(run))
    some = list(batches(prepared.train, prepared.eval_collate, min(run.train.batch_size, 16), limit=8))
    expected = convert(load_checkpoint(softmax), "outeffhop", calibrate=some)
    started = load_checkpoint(tmp_path / "run" / "checkpoints" / "checkpoint-1")
    for name, module in attention_modules(started).items():
        assert torch.equal(state_of(module).sink_start, state_of(attention_modules(expected)[name]).sink_start)


@pytest.mark.parametrize("kept", [4, 8])
def test_resumed_in_and_after_the_schedule(kept, softmax, cache, tmp_path):
    run = config(
        "opt", tmp_path / "whole", cache, method="gated-outeffhop", init=softmax, anneal_steps=6, penalty=0.2, keep=9
    )
    train(run, quiet=True)
    part = dataclasses.replace(run, out=str(tmp_path / "part"))
    train(part, quiet=True)
    folder = RunFolder(part.out)
    for step in (4, 8, 12):
        if step > kept:
            place = folder.checkpoints / f"checkpoint-{step}"
            for path in place.iterdir():
                path.unlink()
            place.rmdir()
    resume(part.out, quiet=True)
    assert weight_bytes(run.out) == weight_bytes(part.out)
    assert metrics(run.out) == metrics(part.out)


def test_a_checkpoint_with_a_method_is_converted_at_once(whole_run, cache, tmp_path):
    run = config("opt", tmp_path / "a", cache, method="gated-outeffhop", init=whole_run("opt") / "model", max_steps=3)
    train(run, quiet=True)  # from outeffhop, which is not the same function as softmax
    assert model_summary(load_checkpoint(tmp_path / "a" / "model")).method == "gated-outeffhop"


@pytest.mark.parametrize(
    ("given", "words"), [({"penalty": -1.0}, "penalty=-1"), ({"anneal_steps": -1}, "anneal_steps")]
)
def test_wrong_values_are_refused(given, words, cache, tmp_path):
    with pytest.raises(ValueError, match=words):
        train(config("opt", tmp_path / "a", cache, **given), quiet=True)
    assert not (tmp_path / "a").exists()
