"""A checkpoint by whatever name a user has for it: a folder, a sentence encoder, a GGUF file, a name on the hub."""

import json
import shutil

import huggingface_hub
import pytest
import torch
from tiny import config
from transformers import BertModel, LlamaConfig, LlamaForCausalLM

from outeffhop.lab.data import prepare
from outeffhop.lab.data.tokenizer import load_tokenizer
from outeffhop.models import finding, load_checkpoint
from outeffhop.models.finding import find_checkpoint


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    BertModel(config("bert")).save_pretrained(folder)
    return folder


def test_a_folder_is_itself(bert):
    assert find_checkpoint(bert) == bert
    assert find_checkpoint(str(bert)) == bert


def test_the_transformer_of_a_sentence_encoder(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "0_Transformer")
    parts = [{"idx": 0, "path": "0_Transformer"}, {"idx": 1, "path": "1_Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(parts))
    assert find_checkpoint(tmp_path) == tmp_path / "0_Transformer"
    assert isinstance(load_checkpoint(find_checkpoint(tmp_path)), BertModel)


def test_what_is_not_a_checkpoint(tmp_path):
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ValueError, match="is neither a folder nor a GGUF file"):
        find_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(ValueError, match="is not a folder: give that of a run"):
        find_checkpoint(tmp_path / "nothing")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"several GGUF files: give the path of one of a\.gguf, b\.gguf"):
        find_checkpoint(tmp_path)


def test_a_name_on_the_hub(bert, monkeypatch):
    asked = []

    def snapshot(name, **patterns):
        asked.append((name, patterns["allow_patterns"]))
        return str(bert)

    monkeypatch.setattr(finding, "snapshot_download", snapshot)
    assert find_checkpoint("owner/name") == find_checkpoint("hub:owner/name") == bert
    assert find_checkpoint("owner/name", trust_remote_code=True) == bert
    assert [name for name, _ in asked] == ["owner/name"] * 3
    assert ["*.py" in patterns for _, patterns in asked] == [False, False, True]
    assert not any(
        "bin" in pattern or "pt" in pattern for _, patterns in asked for pattern in patterns if "txt" not in pattern
    )


def test_a_hub_that_does_not_answer(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'owner/name' is not a folder here, and the hub did not give"):
        find_checkpoint("owner/name")


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny Llama as llama.cpp would store it, in float32."""
    gguf = pytest.importorskip("gguf", reason="needs outeffhop[gguf]")
    root = tmp_path_factory.mktemp("gguf")
    tokenizer = prepare("builtin:text", "clm", vocab_size=300, cache_dir=root / "cache").tokenizer
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=64)).eval()
    writer = gguf.GGUFWriter(root / "tiny.gguf", "llama")
    for name, value in dict(
        context_length=64, embedding_length=32, block_count=2, feed_forward_length=48, head_count=4, head_count_kv=4
    ).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(tokenizer))
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if word in tokenizer.all_special_tokens else 1 for word in words])
    writer.add_token_merges([" ".join(m) for m in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, value in model.state_dict().items():
        found = names.get_name(name, try_suffixes=(".weight",))
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # its rotary positions take pairs that lie side by side
            value = value.view(4, 2, 4, 32).transpose(1, 2).reshape(32, 32)
        writer.add_tensor(found, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return root / "tiny.gguf", model, tokenizer


def test_a_gguf_file(gguf_file, tmp_path):
    file, truth, tokenizer = gguf_file
    assert find_checkpoint(file) == find_checkpoint(file.parent) == file
    model = load_checkpoint(file)
    assert isinstance(model, LlamaForCausalLM)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, truth(ids).logits)
    model.save_pretrained(tmp_path)  # it is a floating-point model like any other
    with torch.no_grad():
        torch.testing.assert_close(load_checkpoint(tmp_path)(ids).logits, truth(ids).logits)
    assert load_checkpoint(file, dtype="bfloat16").dtype == torch.bfloat16
    text = "The quick brown fox, and what it said."
    assert load_tokenizer(file)(text)["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_damaged_gguf_file(gguf_file, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(gguf_file[0].read_bytes()[:200])
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        load_checkpoint(tmp_path / "cut.gguf")
