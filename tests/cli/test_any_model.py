"""Every command serves any model of text or images that transformers has, or refuses it by name before any work."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from architectures import CAUSAL, CLASSIFIERS, EMBEDDING, MASKED, MODELS, SEQ2SEQ, SIDE, VOCAB, build

from outeffhop.cli import evaluate, outliers, quantize
from outeffhop.cli.options import Evaluate, Outliers, Quantize
from outeffhop.lab.data import prepare
from outeffhop.lab.data.image_settings import image_fields
from outeffhop.lab.diagnosis.checkpoint_config import CheckpointConfig
from outeffhop.lab.diagnosis.opening import open_checkpoint
from outeffhop.metrics import task_of
from outeffhop.outliers import OutlierReport
from outeffhop.quantization import QuantizationReport

TASKS = {"mlm": MASKED, "clm": CAUSAL, "seq2seq": SEQ2SEQ, "classification": CLASSIFIERS, "embedding": EMBEDDING}
METRIC = dict.fromkeys(("mlm", "clm", "seq2seq"), "perplexity") | {
    "classification": "accuracy",
    "embedding": "sqnr_db",
}
# without attention, or with attention that nothing can look into
NO_HEADS = ("DebertaV2ForMaskedLM", "FalconForCausalLM", "BloomForCausalLM")
NO_ATTENTION = ("ConvNextForImageClassification", "ResNetForImageClassification")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a model, with a tokenizer if it reads text; returns the fields of the commands' options."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTEFFHOP_CACHE", str(root / "cache"))
        tokenizer = prepare("builtin:text", "mlm", vocab_size=VOCAB).tokenizer

        def save(model, name=None):
            folder = root / (name or type(model).__name__)
            model.save_pretrained(folder)
            text = model.main_input_name == "input_ids"
            if text:
                tokenizer.save_pretrained(folder)
            data = {"data": "builtin:text", "length": 32} if text else {"data": "builtin:images"}
            return {"checkpoint": str(folder), "batch_size": 2, "batches": 2, "device": "cpu", **data}

        yield save


def test_the_table_names_each_model_once():
    assert len(MODELS) == sum(map(len, TASKS.values()))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_served(name, saved, tmp_path, capsys):
    model = build(name)
    task = next(task for task, models in TASKS.items() if name in models)
    assert task_of(model) == task
    fields = saved(model)

    out = tmp_path / "evaluation"
    if task == "embedding":
        with pytest.raises(ValueError, match=f"{name} has no head with a metric"):
            evaluate.run(Evaluate(**fields, out=out))
    else:
        evaluate.run(Evaluate(**fields, out=out))
        found = json.loads((out / "evaluation.json").read_text())
        assert (found["model"], next(iter(found["metrics"]))) == (name, METRIC[task])

    attends = name not in NO_ATTENTION
    outliers.run(Outliers(**fields, out=tmp_path, tensors="paper" if attends else "all"))
    report = OutlierReport.load(tmp_path / "outliers.json")
    assert report.samples == 4
    assert all(tensor.tokens for tensor in report.tensors)
    assert bool(report.attention) == (attends and name not in NO_HEADS)

    for scheme in ("paper", "linear") if name != "ResNetForImageClassification" else ("paper",):
        quantize.run(Quantize(**fields, scheme=scheme, calibration_batches=2, seeds=1, out=tmp_path))
        costs = QuantizationReport.load(tmp_path / "quantization.json")
        assert costs.task == task
        assert next(iter(costs.quantized)) == METRIC[task]
        if task == "embedding":
            assert 5.0 < costs.quantized["sqnr_db"][0] < 80.0
        if scheme == "paper" and name in NO_HEADS:
            assert "attention that does not show its scores" in costs.floating.values()
    capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("RobertaForMaskedLM", 62),  # the position of padding and those before it are not used
        ("BertForMaskedLM", 64),
        ("OPTForCausalLM", 64),
        ("BartForConditionalGeneration", 64),
    ],
)
def test_all_positions_are_used_and_no_more(name, longest, saved, capsys):
    fields = saved(build(name)) | {"length": longest}
    evaluate.run(Evaluate(**fields))
    with pytest.raises(ValueError, match=f"length={longest + 1}: the model of .* has {longest} positions"):
        evaluate.run(Evaluate(**fields | {"length": longest + 1}))
    capsys.readouterr()


def test_a_model_without_positions_takes_any_length(saved, capsys):
    for name in ("T5ForConditionalGeneration", "BloomForCausalLM"):
        evaluate.run(Evaluate(**saved(build(name)) | {"length": 200}))
    capsys.readouterr()


def test_images_as_the_checkpoint_wants_them(saved, tmp_path, capsys):
    fields = saved(build("ViTForImageClassification"), "normalized")
    settings = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.1, 0.2, 0.3], "size": {"height": 99, "width": 99}}
    with open(f"{fields['checkpoint']}/preprocessor_config.json", "w") as file:
        json.dump(settings, file)
    wanted = image_fields(build("ViTForImageClassification").config, fields["checkpoint"])
    assert wanted == {"image_size": SIDE, "num_channels": 3, "mean": (0.5,) * 3, "std": (0.1, 0.2, 0.3)}
    assert image_fields(build("ResNetForImageClassification").config, fields["checkpoint"])["image_size"] == 99
    assert image_fields(build("ResNetForImageClassification").config, str(tmp_path))["image_size"] == 224
    oblong = build("ViTForImageClassification", image_size=[16, 8])
    with pytest.raises(ValueError, match="only square ones are served"):
        image_fields(oblong.config, fields["checkpoint"])
    square = build("ViTForImageClassification", image_size=[16, 16])
    evaluate.run(Evaluate(**saved(square, "square")))
    capsys.readouterr()


def _headless_t5():
    return transformers.T5Model(transformers.T5Config(**SEQ2SEQ["T5ForConditionalGeneration"]))


def _classifier(base, **changes):
    kind = getattr(transformers, base)
    config = {"GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM", "Bart": "BartForConditionalGeneration"}
    name = base.removesuffix("ForSequenceClassification")
    return kind(kind.config_class(**MODELS[config[name]] | {"num_labels": 3} | changes))


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda: build("CLIPModel"), "vision_model.encoder.layers.1"),
        (lambda: build("SiglipModel"), "text_model.encoder.layers.1"),
        (_headless_t5, "decoder.block.1.layer.0.layer_norm"),
        (lambda: _classifier("GPT2ForSequenceClassification", pad_token_id=None), "transformer.h.1"),
        (lambda: _classifier("LlamaForSequenceClassification", pad_token_id=None), "model.layers.1"),
        (lambda: _classifier("BartForSequenceClassification"), "model.decoder.layers.1"),
    ],
)
def test_models_that_take_more_than_a_text(make, tensors, saved, tmp_path, capsys):
    """Texts with images, the inputs of a decoder, classifiers without a token of padding or that read the end."""
    torch.manual_seed(0)
    fields = saved(make(), make.__name__)
    outliers.run(Outliers(**fields, out=tmp_path))
    assert tensors in {t.name for t in OutlierReport.load(tmp_path / "outliers.json").tensors}
    quantize.run(Quantize(**fields, scheme="per-channel", calibration_batches=2, seeds=1, out=tmp_path))
    report = QuantizationReport.load(tmp_path / "quantization.json")
    assert (report.task, report.full["sqnr_db"]) == ("embedding", float("inf"))
    assert 5.0 < report.quantized["sqnr_db"][0] < 80.0
    capsys.readouterr()


def test_images_for_a_model_of_texts_and_images(saved):
    fields = saved(build("CLIPModel"))
    for data, text in (("builtin:images", "builtin:text"), ("builtin:text", "builtin:text"), (None, "builtin:text")):
        config = CheckpointConfig(checkpoint=fields["checkpoint"], data=data, length=32)
        prepared = open_checkpoint(config, builtin=True)[2]
        assert prepared.about["source"] == f"{text} with builtin:images"
        assert set(prepared.eval_collate([prepared.test[0]])) == {"input_ids", "pixel_values"}


def test_a_model_that_needs_more_is_refused_by_name(saved, tmp_path):
    fields = saved(build("WhisperForConditionalGeneration"))
    with pytest.raises(ValueError, match="WhisperForConditionalGeneration takes input_features: only models of text"):
        outliers.run(Outliers(**fields, out=tmp_path / "out"))
    fields = saved(build("ViTModel")) | {"data": "builtin:text"}
    with pytest.raises(ValueError, match="has text, but ViTModel takes pixel_values"):
        outliers.run(Outliers(**fields, out=tmp_path / "out"))
    for model in (build("T5ForConditionalGeneration"), _headless_t5()):
        with pytest.raises(ValueError, match="export_int8 does not serve"):
            quantize.run(Quantize(**saved(model), int8=True, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_task_by_flag(saved, tmp_path, capsys):
    fields = saved(build("BertForMaskedLM"), "as-embedding")
    quantize.run(Quantize(**fields, task="embedding", calibration_batches=2, seeds=1, out=tmp_path))
    assert list(QuantizationReport.load(tmp_path / "quantization.json").full) == ["sqnr_db"]
    with pytest.raises(ValueError, match=r"task='classification' needs images, but BertForMaskedLM takes text"):
        evaluate.run(Evaluate(**fields, task="classification"))
    with pytest.raises(ValueError, match="task='mln' is unknown; did you mean 'mlm'"):
        evaluate.run(Evaluate(**fields, task="mln"))
    with pytest.raises(ValueError, match=r"BertModel of .* does not run on input_ids, labels alone.*--task embedding"):
        evaluate.run(Evaluate(**saved(build("BertModel")), task="mlm"))
    many = saved(build("ViTForImageClassification", num_labels=3), "three-labels")
    with pytest.raises(ValueError, match=r"num_labels=10, .* 3: they do not fit; --task embedding compares"):
        outliers.run(Outliers(**many, out=tmp_path / "out"))
    outliers.run(Outliers(**many, task="embedding", out=tmp_path))
    capsys.readouterr()


def test_a_tokenizer_without_a_mask(saved, tmp_path):
    fields = saved(build("BertForMaskedLM"), "without-mask")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = Path(fields["checkpoint"]) / name
        content = json.loads(file.read_text())
        content.pop("mask_token", None)
        content.pop("extra_special_tokens", None)
        content["added_tokens"] = [t for t in content.get("added_tokens", []) if t["content"] != "<mask>"]
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"no mask_token.*--tokenizer FOLDER.*--task embedding"):
        outliers.run(Outliers(**fields, out=tmp_path / "out"))
    outliers.run(Outliers(**fields, task="embedding", out=tmp_path))


def test_the_dtype_by_flag(saved, tmp_path, capsys):
    model = build("LlamaForCausalLM")
    fields = saved(model.bfloat16(), "stored-in-bfloat16")
    found = {}
    for dtype in (None, "bfloat16", "float32"):
        evaluate.run(Evaluate(**fields, dtype=dtype, out=tmp_path))
        found[dtype] = json.loads((tmp_path / "evaluation.json").read_text())["metrics"]["loss"]
    assert found[None] == found["bfloat16"] != found["float32"]
    with pytest.raises(ValueError, match="dtype='float64' is unknown"):
        evaluate.run(Evaluate(**fields, dtype="float64"))
    capsys.readouterr()


def test_pairs_of_different_lengths(saved, tmp_path, capsys):
    rows = [f"{'word ' * (1 + i % 4)}\t{'more ' * (1 + i % 3)}" for i in range(30)]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    for name in ("T5ForConditionalGeneration", "BartForConditionalGeneration"):
        fields = saved(build(name)) | {"data": str(tmp_path / "pairs.tsv")}
        evaluate.run(Evaluate(**fields, out=tmp_path))
        outliers.run(Outliers(**fields, out=tmp_path))
    capsys.readouterr()
