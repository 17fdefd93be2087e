"""Evaluation: each task's metric against a plain sum, seeds, and the report as JSON."""

import json
import math

import pytest
import torch
from subjects import build, decibels, inputs, output, quantize
from transformers import BertConfig, BertModel

from outeffhop.metrics import main_output, metric_for
from outeffhop.ops.probe import is_probed
from outeffhop.quantization import QuantizationReport, Scheme, evaluate


def labelled(name, seed=0):
    batch = inputs(name, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {**batch, "labels": torch.randint(10, (3,), generator=generator)}
    if name == "stanhop":
        return {**batch, "future_values": torch.randn(3, 24, 3, generator=generator)}
    labels = batch["input_ids"].clone()
    if name == "bert":
        labels[torch.rand(labels.shape, generator=generator) < 0.7] = -100
    return {**batch, "labels": labels}


def data(name, count=4):
    return [labelled(name, seed) for seed in range(count)]


def test_perplexity_weighs_tokens_not_batches():
    for name, task, shift in (("bert", "mlm", 0), ("opt", "clm", 1)):
        model = build(name)
        batches = data(name, 3)
        batches[1] = {k: v[:1] for k, v in batches[1].items()}  # batches of unequal size
        batches.append({**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)})  # and one without labels
        losses = []
        for batch in batches:
            logits, labels = output(model, batch), batch["labels"]
            logits, labels = (logits[:, :-1], labels[:, 1:]) if shift else (logits, labels)
            losses.append(
                torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")[labels != -100]
            )
        expected = torch.cat(losses).mean().item()
        found = metric_for(task)(model, batches)
        assert found["loss"] == pytest.approx(expected, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


def test_accuracy_and_forecast_errors():
    model, batches = build("vit"), data("vit")
    truth = torch.cat([b["labels"] for b in batches])
    predicted = torch.cat([output(model, b) for b in batches]).argmax(-1)
    assert metric_for("classification")(model, batches)["accuracy"] == pytest.approx(
        (predicted == truth).float().mean()
    )

    model, batches = build("stanhop"), data("stanhop")
    difference = torch.cat([output(model, b) - b["future_values"] for b in batches])
    found = metric_for("forecasting")(model, batches)
    assert found["mse"] == pytest.approx(difference.square().mean().item(), rel=1e-5)
    assert found["mae"] == pytest.approx(difference.abs().mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["bert", "opt", "vit", "stanhop"])
def test_the_report_is_what_its_parts_give(name):
    model = build(name)
    batches = data(name)
    report = evaluate(model, batches, batches, seeds=2, calibration_batches=2, scheme="W6A6")
    assert report.model == type(model).__name__
    assert report.method.startswith("outeffhop")
    assert (report.scheme, report.placement, report.seeds) == ("W6A6 paper", "paper", (0, 1))
    assert (report.calibration_batches, report.evaluation_batches) == (2, 4)
    task = {"bert": "mlm", "opt": "clm", "vit": "classification", "stanhop": "forecasting"}[name]
    assert report.task == task
    assert report.full == metric_for(task)(model, batches)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(1))[:2]
    quantized = quantize(model, [batches[int(i)] for i in order], scheme="W6A6")
    for metric, value in metric_for(task)(quantized, batches).items():
        assert report.quantized[metric][1] == value
        values = torch.tensor(report.quantized[metric], dtype=torch.float64)
        assert report.mean(metric) == pytest.approx(values.mean().item())
        assert report.std(metric) == pytest.approx(values.std().item(), abs=1e-12)
    typical = [row.typical_db for row in report.worst]
    assert typical == sorted(typical)
    assert len(report.worst) == 20
    assert "head" in report.floating.values()


def test_one_seed_gives_the_same_twice_and_the_model_comes_back_as_it_was():
    model = build("opt").train()
    batches = data("opt")
    first = evaluate(model, batches, batches, seeds=[7], calibration_batches=2)
    assert model.training
    assert first == evaluate(model, batches, batches, seeds=[7], calibration_batches=2)
    assert first.std("loss") == 0.0


def test_evaluation_data_may_have_no_length():
    class Stream:
        def __iter__(self):
            return iter(data("opt", 3))

    for evaluation in (Stream(), iter(data("opt", 3))):
        report = evaluate(build("opt"), data("opt"), evaluation, seeds=1)
        assert report.evaluation_batches == 3
        assert report.full == metric_for("clm")(build("opt"), data("opt", 3))


def test_a_base_model_is_measured_by_its_hidden_states():
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=64)
    ).eval()
    batches = [inputs("bert", seed=i) for i in range(2)]
    report = evaluate(model, batches, batches, seeds=1)
    assert report.task == "embedding"
    assert report.full == {"sqnr_db": math.inf}
    assert 20.0 < report.quantized["sqnr_db"][0] < 60.0
    assert QuantizationReport.from_json(report.to_json()) == report


def test_the_output_of_a_forecaster_is_its_forecast():
    model = build("stanhop")
    with torch.no_grad():
        out = model(**labelled("stanhop"))
    assert out.loss is not None
    assert main_output(out) is out.prediction


def test_a_metric_and_a_draw_of_ones_own():
    model = build("vit")
    drawn = []

    def draw(seed):
        drawn.append(seed)
        return data("vit", 1)

    told = []
    report = evaluate(
        model,
        draw,
        data("vit", 1),
        lambda m, batches: {"mean": float(output(m, batches[0]).mean())},
        Scheme.parse("per-token"),
        seeds=[3, 5],
        progress=told.append,
    )
    assert drawn == [3, 5]
    assert report.task == "custom"
    assert told[0] == "floating point"
    assert len(told) == 5
    assert report.worst[0].low is None or report.worst[0].kind == "weight"


def test_the_report_is_written_whole_and_read_back(tmp_path):
    batches = data("opt", 2)
    report = evaluate(build("opt"), batches, batches, seeds=2, calibration_batches=1)
    path = tmp_path / "new" / "quantization.json"
    report.save(path)
    assert QuantizationReport.load(path) == report
    assert [p.name for p in path.parent.iterdir()] == ["quantization.json"]
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert "perplexity" in str(report)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"quantization\.json: not a valid QuantizationReport"):
        QuantizationReport.load(path)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(evaluation=[]), "evaluation holds no batch"),
        (dict(calibration=[]), "calibration holds no batch"),
        (dict(seeds=0), "seeds=0"),
        (dict(calibration_batches=0), "calibration_batches=0"),
        (dict(scheme="W8A8 nothing"), "scheme='W8A8 nothing'"),
        (dict(metric="clm"), "no 'labels'"),
        (dict(metric="speech"), "task='speech'"),
    ],
)
def test_wrong_arguments_are_named(arguments, match):
    batches = [inputs("opt")]
    with pytest.raises(ValueError, match=match):
        evaluate(build("opt"), **{"calibration": batches, "evaluation": batches, **arguments})


def test_every_module_has_its_mode_again():
    model = build("opt").train()
    model.model.decoder.layers[0].eval()
    modes = [m.training for m in model.modules()]
    evaluate(model, data("opt", 1), data("opt", 1), seeds=1)
    assert [m.training for m in model.modules()] == modes


def test_half_precision_shows_what_quantization_costs():
    model, batches = build("bert"), data("bert", 2)
    half = build("bert").bfloat16()
    full = metric_for("mlm")(model, batches)["loss"]
    report = evaluate(half, batches, batches, seeds=1)
    assert report.full["loss"] == pytest.approx(full, rel=1e-3)
    assert report.quantized["loss"][0] != report.full["loss"]
    logits = torch.cat([output(half, b).float() for b in batches]).flatten(0, 1)
    labels = torch.cat([b["labels"] for b in batches]).flatten()
    assert report.full["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)


def test_a_loss_that_is_nan_has_a_perplexity_that_is():
    model = build("opt")
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    assert all(map(math.isnan, metric_for("clm")(model, data("opt", 1)).values()))


def test_hidden_states_of_padding_do_not_count():
    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, vocab_size=64)
    model, batch = BertModel(config).eval(), inputs("bert")
    quantized = quantize(model, [batch])
    with torch.no_grad():
        seen = batch["attention_mask"].bool()
        truth, found = (m(**batch).last_hidden_state[seen] for m in (model, quantized))
    assert metric_for("embedding", model)(quantized, [batch])["sqnr_db"] == pytest.approx(decibels(truth, found))


def test_numbers_of_a_metric_of_ones_own_may_be_tensors():
    batches = data("vit", 1)
    report = evaluate(build("vit"), batches, batches, lambda m, b: {"mean": output(m, b[0]).mean()}, seeds=1)
    assert QuantizationReport.from_json(report.to_json()) == report


def test_an_interrupted_evaluation_leaves_nothing_behind():
    batches, calls = data("opt", 1), []

    def metric(model, given):
        calls.append(model)
        if len(calls) == 2:  # the quantized one
            model.get_submodule("model.decoder.layers.1.self_attn.out_proj").register_forward_pre_hook(press)
        return {"mean": float(output(model, given[0]).mean())}

    def press(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(build("opt"), batches, batches, metric, seeds=1)
    assert not is_probed()
    assert torch.overrides._get_current_function_mode() is None
