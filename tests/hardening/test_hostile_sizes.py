"""Files that ask for more memory than they fill: refused by one line, within 1.5 GB of address space."""

import copy
import io
import json
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
import transformers
from architectures import CAUSAL, CLASSIFIERS, MASKED, SEQ2SEQ
from PIL import Image
from safetensors.torch import save_file

from outeffhop.lab.data import prepare
from outeffhop.memory import HopfieldMemory
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint

MEMORY = 3 << 29
KINDS = MASKED | CAUSAL | CLASSIFIERS | SEQ2SEQ
STANHOP = dict(e_layers=1, d_model=16, d_ff=32, num_heads=2, num_series=7)


def saved(name, folder):
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    kind(kind.config_class(**KINDS[name])).save_pretrained(folder)
    load_checkpoint(folder)
    return folder


def evaluate(folder):
    return ["command", "evaluate", folder, "--data", "builtin:text", "--batches", 1, "--device", "cpu"]


def check_refused(server, *steps):
    """Every command ends with 2 and says one line; none runs out of memory."""
    codes, said = server.run(["memory", MEMORY], *steps)
    lines = said.splitlines()
    assert codes == [2] * len(lines), said
    assert all(line.startswith("outeffhop: ") for line in lines), said
    assert not [line for line in lines if "memory" in line.lower() or "allocate" in line.lower()]
    return lines


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("BertForMaskedLM", {"vocab_size": 10**9}, r"asks for a model of 3\d{10} numbers, such as"),
        ("BertForMaskedLM", {"num_labels": 10**9}, "num_labels=1000000000, but there are only 42 tensors"),
        ("GPT2LMHeadModel", {"n_layer": 10**9}, "n_layer=1000000000, but there are only 28 tensors"),
        ("GPT2LMHeadModel", {"n_inner": 10**6}, "asks for a model of"),
        ("MixtralForCausalLM", {"num_local_experts": 10**8}, "num_local_experts=100000000, but there are only"),
    ],
)
def test_a_config_larger_than_its_weights(name, changes, said, server, tmp_path):
    file = saved(name, tmp_path / "model") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    (line,) = check_refused(server, evaluate(file.parent))
    assert line.startswith(f"outeffhop: {file}")
    with pytest.raises(ValueError, match=said):
        load_checkpoint(file.parent)


def test_a_config_to_begin_from(server, tmp_path):
    """There are no weights to hold it against, but no model has so many layers or labels."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "num_labels": 10**9, "n_layer": 10**9}))
    run = ["command", "train", "--model", tmp_path, "--task", "clm", "--data", "builtin:text", "--dry-run"]
    (line,) = check_refused(server, run)
    assert "num_labels=1000000000, but at most 131072 are made" in line


def numbers(node, path=()):
    """Where there are whole numbers in a config."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if isinstance(value, int) and not isinstance(value, bool):
            yield (*path, key)
        elif isinstance(value, dict | list):
            yield from numbers(value, (*path, key))


def changed(content, path, value):
    content = copy.deepcopy(content)
    node = content
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return json.dumps(content)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_number_of_each_config(name, server, tmp_path):
    """Made a million and a thousand millions: a model that is as it was, or a refusal, in little memory."""
    file = saved(name, tmp_path / "model") / "config.json"
    content = json.loads(file.read_text())
    tried = [(path, value) for path in [*numbers(content), ("num_labels",)] for value in (10**6, 10**9)]
    steps = [[["write", file, changed(content, *each)], ["load", file.parent]] for each in tried]
    codes, said = server.run(["memory", MEMORY], *(step for both in steps for step in both))
    assert len(codes) == len(tried), said
    assert set(codes) <= {0, 2}, said
    assert "memory" not in said.lower(), said


def test_a_header_of_weights_that_lies(server, tmp_path):
    """safetensors holds shapes and offsets against the file's length."""
    torch.manual_seed(0)
    presets.build("stanhop", "tiny", "outeffhop", **STANHOP).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    large = {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * 10**12]}
    text = json.dumps(header | {name: large}).encode()
    for content in (
        struct.pack("<Q", 10**15) + whole[8:],
        struct.pack("<Q", len(text)) + text + whole[8 + length :],
    ):
        file.write_bytes(content)
        (line,) = check_refused(server, evaluate(tmp_path))
        assert f"{file} is damaged or cut short" in line


def test_a_memory_that_lies(tmp_path):
    file = tmp_path / "memory.safetensors"
    HopfieldMemory(torch.randn(8, 4)).save(file)
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b"[8,4]", b"[8,9]"))
    with pytest.raises(ValueError, match="is not a memory saved by"):
        HopfieldMemory.load(file)
    save_file({"patterns": torch.zeros(0, 4)}, file, {"format": "outeffhop.memory.1", "beta": "1e999"})
    with pytest.raises(ValueError, match="is not a memory saved by"):
        HopfieldMemory.load(file)


def test_a_model_that_is_too_large_for_the_machine(server, tmp_path):
    """Asked for by the user, not by a file: an error of one line and nothing half written."""
    sizes = ["--changes", "hidden_size", 4096, "word_embed_proj_dim", 4096, "ffn_dim", 200_000]
    run = ["command", "train", "--data", "builtin:text", "--out", tmp_path / "run", "--train.device", "cpu", *sizes]
    codes, said = server.run(["memory", MEMORY], run)
    assert codes == [2], said
    assert [line.startswith("outeffhop: ") for line in said.splitlines() if "no-op" not in line] == [True], said
    assert "ffn_dim=200000" in said
    assert "can't allocate memory" in said
    assert not (tmp_path / "run" / "config.yaml").exists()


# Data


def npz(folder, shape, method=zipfile.ZIP_DEFLATED):
    images, labels = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(images, dict(descr="|u1", fortran_order=False, shape=shape))
    np.save(labels, np.arange(20) % 2)
    file = folder / "train.npz"
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x.npy", images.getvalue() + bytes(1280))
        archive.writestr("y.npy", labels.getvalue())
    return file


def png(folder, width, height):
    """One black pixel, whose header says there are more."""
    made = io.BytesIO()
    Image.new("RGB", (1, 1)).save(made, "PNG")
    content = bytearray(made.getvalue())
    content[16:24] = struct.pack(">II", width, height)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    for name in ("a", "b"):
        (folder / "train" / name).mkdir(parents=True)
        (folder / "train" / name / "1.png").write_bytes(content)
    return folder


def idx(folder, *shape):
    (folder / "train-images-idx3-ubyte").write_bytes(
        b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + bytes(64)
    )
    (folder / "train-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 1) + b"\0")
    return folder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda f: npz(f, (10**9, 10, 10)), "x.npy says shape (1000000000, 10, 10) of uint8, but 1280 bytes follow"),
        (lambda f: npz(f, (20, 8, 8), zipfile.ZIP_LZMA), "x.npy is compressed in another way"),
        (lambda f: png(f, 10**5, 10**5), "cannot be read as an image"),
        (lambda f: idx(f, 10**9, 10**3, 10**3), "its header says (1000000000, 1000, 1000), but 64 bytes follow"),
    ],
    ids=["npz", "npz in LZMA", "png", "idx"],
)
def test_data_that_lies(make, said, server, tmp_path):
    made = make(tmp_path)
    (line,) = check_refused(server, ["command", "train", "--model", "vit", "--data", made, "--dry-run"])
    assert said in line


def test_a_copy_that_tells_the_truth(tmp_path):
    """What is refused above is read as soon as the header is right."""
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8), np.uint8)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "train.npz", x=images, y=np.arange(20) % 2)
        assert len(prepare(str(tmp_path / "train.npz"), "classification").train) == 16


# GGUF


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    gguf = pytest.importorskip("gguf", reason="needs outeffhop[gguf]")
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    sizes = dict(context_length=64, embedding_length=32, block_count=2, feed_forward_length=48)
    for name, value in (sizes | dict(head_count=4, head_count_kv=4, vocab_size=300)).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("block_count", 10**9, "layers=1000000000, but there are only 1 tensors"),
        ("embedding_length", 10**9, "asks for a model of"),
        ("vocab_size", 10**9, "asks for a model of"),
    ],
)
def test_a_gguf_file_that_lies(key, value, said, gguf_file, server, tmp_path):
    content = bytearray(gguf_file.read_bytes())
    at = content.index(key.encode()) + len(key) + 4
    struct.pack_into("<I", content, at, value)
    (tmp_path / "model.gguf").write_bytes(content)
    (line,) = check_refused(server, evaluate(tmp_path / "model.gguf"))
    assert said in line


def test_a_gguf_file_without_its_weights(gguf_file, tmp_path):
    """They would be random. Five layers are few enough to look for their weights."""
    content = bytearray(gguf_file.read_bytes())
    struct.pack_into("<I", content, content.index(b"block_count") + len("block_count") + 4, 5)
    (tmp_path / gguf_file.name).write_bytes(content)
    with pytest.raises(ValueError, match=r"lacks weights of LlamaForCausalLM: .* and \d+ more; they would be random"):
        load_checkpoint(tmp_path / gguf_file.name)
