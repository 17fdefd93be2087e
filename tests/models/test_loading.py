"""load_checkpoint: what save_pretrained wrote comes back; every fault is a ValueError that names it."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel, Qwen2Config, Qwen2ForCausalLM

import outeffhop
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint


def bert():
    config, auto = tiny.MODELS["bert"]
    return auto.from_config(config())


@pytest.fixture
def folder(tmp_path):
    bert().save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize("name", ["bert", "opt", "vit", "gpt2", "llama"])
def test_the_class_that_was_saved(name, tmp_path):
    config, auto = tiny.MODELS[name]
    model = auto.from_config(config())
    model.save_pretrained(tmp_path)
    again = load_checkpoint(tmp_path)
    assert type(again) is type(model)
    assert not again.training
    for (_, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b)


def test_methods_models_of_ours_and_base_models(tmp_path):
    outeffhop.convert(bert(), "gated-outeffhop").save_pretrained(tmp_path / "gated")
    assert outeffhop.model_summary(load_checkpoint(tmp_path / "gated")).method == "gated-outeffhop"
    presets.build("stanhop", "tiny", "clipped").save_pretrained(tmp_path / "stanhop")
    assert type(load_checkpoint(tmp_path / "stanhop")).__name__ == "StanhopForForecasting"
    BertModel(tiny.config("bert"), add_pooling_layer=False).save_pretrained(tmp_path / "base")
    assert type(load_checkpoint(tmp_path / "base")) is BertModel


def test_attention_of_another_model_is_saved_if_its_method_can_be(tmp_path):
    config, auto = tiny.MODELS["llama"]
    llama, opt = auto.from_config(config()), auto.from_config(tiny.config("opt"))
    llama.model.layers[0].self_attn = opt.model.decoder.layers[0].self_attn
    llama.save_pretrained(tmp_path / "softmax")
    outeffhop.convert(opt, "outeffhop")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn has outeffhop, but its OPTConfig is not part of"):
        llama.save_pretrained(tmp_path / "lost")
    model, gated = bert(), outeffhop.convert(bert(), "gated-outeffhop")
    model.bert.encoder.layer[1] = gated.bert.encoder.layer[1]
    with pytest.raises(ValueError, match=r"has softmax and .* has gated-outeffhop, but both .* one BertConfig"):
        model.save_pretrained(tmp_path / "both")


def test_shards(tmp_path):
    bert().save_pretrained(tmp_path, max_shard_size="20KB")
    assert not (tmp_path / "model.safetensors").exists()
    load_checkpoint(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ValueError, match=f"has no {shard.name}"):
        load_checkpoint(tmp_path)


def test_a_config_without_architectures_is_a_base_model(folder):
    content = json.loads((folder / "config.json").read_text())
    del content["architectures"]
    (folder / "config.json").write_text(json.dumps(content))
    assert type(load_checkpoint(folder)) is BertModel


def test_a_small_model_with_windows_from_a_layer_it_does_not_have(tmp_path):
    sizes = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48)
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_hidden_layers=2))
    assert model.config.max_window_layers > len(model.state_dict())  # transformers' own default
    model.save_pretrained(tmp_path)
    assert type(load_checkpoint(tmp_path)) is Qwen2ForCausalLM


def test_no_folder(folder):
    for path in (folder / "none", folder / "config.json", "bert-base-uncased"):
        with pytest.raises(ValueError, match="is not a folder"):
            load_checkpoint(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "has no config.json"),
        ('{"model_type": ', "cannot be read as JSON"),
        ("[1]", "holds a list"),
        ('{"model_type": "nothing-known", "architectures": ["Nothing"]}', "nothing-known"),
        ('{"model_type": "bert", "architectures": ["BertForNothing"]}', "'BertForNothing' of model_type 'bert' is unk"),
        ('{"model_type": "bert", "architectures": ["AutoModel"]}', "'AutoModel' of model_type 'bert' is unknown"),
        ("{}", "config.json"),
    ],
)
def test_a_config_at_fault(folder, text, match):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        load_checkpoint(folder)


@pytest.mark.parametrize("heads", [0, 3])
def test_heads_that_cannot_be(folder, heads):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "num_attention_heads": heads}))
    with pytest.raises(ValueError, match="does not fit BertForMaskedLM"):
        load_checkpoint(folder)


def test_weights_at_fault(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\xff" * 100):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
            load_checkpoint(folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which is not read"):
        load_checkpoint(folder)
    (folder / "small.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"small\.Q4_1\.gguf is a checkpoint of its own: name that file"):
        load_checkpoint(folder)


def test_a_folder_above_the_checkpoint_is_pointed_to_it(folder, tmp_path):
    above = tmp_path / "above"
    above.mkdir()
    folder.rename(above / "model")
    with pytest.raises(ValueError, match=r"has no model\.safetensors; .*model has one: name that folder"):
        load_checkpoint(above)


def change(folder, edit):
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def test_weights_that_are_not_finite(folder):
    name = "bert.encoder.layer.1.output.dense.weight"
    change(folder, lambda weights: weights[name][3, :2].fill_(torch.nan))
    with pytest.raises(ValueError, match=f"weight {name} has 2 of 1536 values not finite"):
        load_checkpoint(folder)


def test_weights_that_are_missing_or_of_another_shape(folder):
    name = "bert.encoder.layer.1.output.dense.weight"
    change(folder, lambda weights: weights.pop(name))
    with pytest.raises(ValueError, match=f"lacks weights of BertForMaskedLM: {name}"):
        load_checkpoint(folder)
    change(folder, lambda weights: weights.update({name: torch.zeros(3, 3)}))
    with pytest.raises(ValueError, match=f"does not fit BertForMaskedLM.*{name}"):
        load_checkpoint(folder)
