"""Checkpoints, tokenizers, kept tokens and run folders damaged at random: a right answer or an error with the file."""

import json
import shutil

import pytest
import torch
from fuzzing import bytes_like, cases, command, one_line, outcome, refused
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from outeffhop.lab.data import prepare
from outeffhop.lab.data.disk_cache import DiskCache
from outeffhop.lab.data.tokenizer import load_tokenizer, train_tokenizer
from outeffhop.lab.training import RunConfig, RunFolder
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint

BERT = dict(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=2, vocab_size=300)
STANHOP = dict(e_layers=1, d_model=8, d_ff=8, num_heads=2, in_len=8, out_len=4, num_series=7)
TEXTS = ["A few words to learn merges from, and a few more words.\n"] * 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    presets.build("bert", "tiny", "outeffhop", **BERT).save_pretrained(folder)
    return folder


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def whole(checkpoint):
    return contents(checkpoint)


def restore(folder, whole):
    for file in folder.iterdir():
        if file.name not in whole:
            file.unlink()
    for name, content in whole.items():
        (folder / name).write_bytes(content)


SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size", "architectures"]
FIELDS = [*SIZES, "outeffhop", "model_type", "pad_token_id", "hidden_act", "dtype", "attn_implementation", "id2label"]
VALUES = st.one_of(
    st.none(),
    st.integers(-3, 40),
    st.sampled_from(
        [10**6, 10**9, 10**18, 10**30, "", "gelu", "bert", "float64", "vanilla", "gated", [], ["BertModel"]]
    ),
    st.floats(),
    st.text(max_size=5),
    st.dictionaries(st.sampled_from(["method", "annealing"]), st.sampled_from(["gated", "vanilla", "x", 3, True])),
)


@cases(20)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2))
def test_a_config_of_any_values(checkpoint, whole, changes):
    restore(checkpoint, whole)
    (checkpoint / "config.json").write_text(json.dumps(json.loads(whole["config.json"]) | changes))
    found = outcome(lambda: load_checkpoint(checkpoint), str(checkpoint))
    if not refused(found):  # then every weight of the file's layers is in it
        state = {name.removeprefix("bert."): tensor for name, tensor in found.state_dict().items()}
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            if "layer." in name:
                assert torch.equal(state[name.removeprefix("bert.")].float(), tensor)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@cases(15)
@given(data=st.data())
def test_a_damaged_checkpoint(checkpoint, whole, name, data):
    restore(checkpoint, whole)
    (checkpoint / name).write_bytes(
        data.draw(bytes_like(whole[name][:4000]) | bytes_like(whole[name]), label="damaged")
    )
    found = outcome(lambda: load_checkpoint(checkpoint), str(checkpoint))
    if not refused(found):
        assert all(bool(p.isfinite().all()) for p in found.parameters())


@cases(10)
@given(
    st.one_of(
        bytes_like(b'{"metadata": {}, "weight_map": {"a": "model.safetensors"}}'),
        st.dictionaries(st.text(max_size=3), VALUES, max_size=2).map(lambda v: json.dumps({"weight_map": v}).encode()),
        VALUES.map(lambda v: json.dumps({"weight_map": v}).encode()),
    )
)
def test_an_index_of_any_bytes(checkpoint, whole, content):
    restore(checkpoint, whole)
    (checkpoint / "model.safetensors.index.json").write_bytes(content)
    outcome(lambda: load_checkpoint(checkpoint), str(checkpoint))


@pytest.fixture(scope="module")
def sharded(checkpoint, whole, tmp_path_factory):
    """The same without a model.safetensors, which transformers would read before any index."""
    restore(checkpoint, whole)
    folder = tmp_path_factory.mktemp("sharded")
    load_checkpoint(checkpoint).save_pretrained(folder, max_shard_size="20KB")
    assert not (folder / "model.safetensors").exists()
    return folder, contents(folder)


@cases(20)
@given(st.data())
def test_a_damaged_index_and_damaged_shards(sharded, whole, checkpoint, data):
    folder, parts = sharded
    restore(folder, parts)
    name = data.draw(st.sampled_from(sorted(n for n in parts if n.startswith("model"))))
    content = parts[name]
    if name.endswith("index.json") and data.draw(st.booleans()):
        index = json.loads(content)
        weight = data.draw(st.sampled_from(sorted(index["weight_map"])))
        index["weight_map"][weight] = data.draw(VALUES | st.sampled_from(sorted(parts)))
        damaged = json.dumps(index).encode()
    else:
        damaged = data.draw(bytes_like(content[:4000]) | bytes_like(content), label="damaged")
    (folder / name).write_bytes(damaged)
    found = outcome(lambda: load_checkpoint(folder), str(folder))
    if not refused(found) and name.endswith("index.json"):  # then no weight is another than was saved
        restore(checkpoint, whole)
        truth = load_checkpoint(checkpoint).state_dict()
        assert all(torch.equal(tensor, truth[key]) for key, tensor in found.state_dict().items())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(TEXTS), 300).save_pretrained(folder)
    return folder, contents(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@cases(15)
@given(data=st.data())
def test_a_damaged_tokenizer(tokenizer, tmp_path_factory, name, data):
    folder, whole = tokenizer
    restore(folder, whole)
    content = whole[name]
    (folder / name).write_bytes(data.draw(bytes_like(content) | bytes_like(content[:2000]), label="damaged"))
    found = outcome(lambda: load_tokenizer(folder), str(folder))
    if not refused(found):
        ids = found("A few words")["input_ids"]
        assert all(0 <= i <= max(found.get_vocab().values()) for i in ids)


@cases(10)
@given(st.data())
def test_a_tokenizer_with_other_ids(tokenizer, tmp_path_factory, data):
    folder, whole = tokenizer
    restore(folder, whole)
    content = json.loads(whole["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    word = data.draw(st.sampled_from(sorted(vocabulary)))
    vocabulary[word] = data.draw(st.sampled_from([301, 400, 65536, 2**31, -1, 1.5, "x", None]))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    text = tmp_path_factory.getbasetemp() / "words.txt"
    text.write_text("".join(TEXTS) * 20)
    cache = tmp_path_factory.getbasetemp() / "cache"
    found = outcome(
        lambda: prepare(str(text), "mlm", tokenizer=str(folder), length=16, cache_dir=cache), str(folder), "tokenizer"
    )
    if not refused(found):
        batch = found.collate([found.train[0], found.train[1]])
        assert int(batch["input_ids"].max()) < found.changes["vocab_size"]


@pytest.mark.parametrize("names", [("vocab.txt",), ("vocab.json", "merges.txt")])
@cases(10)
@given(data=st.data())
def test_a_vocabulary_of_any_bytes(tmp_path_factory, names, data):
    folder = tmp_path_factory.getbasetemp() / names[0]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    like = {
        "vocab.txt": b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n##s\n",
        "vocab.json": b'{"<s>": 0, "</s>": 1, "<unk>": 2, "<pad>": 3, "<mask>": 4, "a": 5, "b": 6, "ab": 7}',
        "merges.txt": b"#version: 0.2\na b\n",
    }
    for name in names:
        (folder / name).write_bytes(data.draw(bytes_like(like[name]) | st.just(like[name]), label=name))
    found = outcome(lambda: load_tokenizer(folder), str(folder))
    if not refused(found):
        assert isinstance(found("a b")["input_ids"], list)


@pytest.mark.parametrize("name", ["manifest.json", "content.bin"])
@cases(15)
@given(data=st.data())
def test_damaged_tokens_are_made_again(tmp_path_factory, name, data):
    store = DiskCache(tmp_path_factory.getbasetemp() / "store")

    def build(folder):
        (folder / "content.bin").write_bytes(b"0123456789" * 5)
        return {"tokens": 50}

    entry, said = store.get("tokens", {"of": "this"}, build)
    damaged = data.draw(bytes_like((entry / name).read_bytes()), label="damaged")
    (entry / name).write_bytes(damaged)
    entry, again = store.get("tokens", {"of": "this"}, build)
    assert (entry / "content.bin").read_bytes() == b"0123456789" * 5
    assert again == said
    shutil.rmtree(store.folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with two checkpoints and a finished model, as training would leave it."""
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "a")
    folder.create(RunConfig(model="stanhop", method="vanilla", data="builtin:series"))
    torch.manual_seed(0)
    model = presets.build("stanhop", "tiny", "vanilla", **STANHOP)
    for step in (1, 2):
        side = folder.side_folder(step)
        model.save_pretrained(side)
        (side / "progress.json").write_text('{"lines": 0}')
        folder.accept(side, step, keep=2)
    return folder


@cases(15)
@given(st.data())
def test_a_damaged_checkpoint_is_passed_over(run, data):
    place = run.checkpoints / "checkpoint-2"
    name = data.draw(st.sampled_from(sorted(p.name for p in place.iterdir())))
    content = (place / name).read_bytes()
    damaged = data.draw(bytes_like(content), label="damaged")
    (place / name).write_bytes(damaged)
    try:
        last = outcome(run.last_checkpoint)
    finally:
        (place / name).write_bytes(content)
    if name != "manifest.json":
        assert last.name == ("checkpoint-2" if damaged == content else "checkpoint-1")


@cases(6)
@given(st.data())
def test_a_run_with_a_damaged_checkpoint_is_evaluated_or_refused(run, data):
    place = run.checkpoints / "checkpoint-2"
    name = data.draw(st.sampled_from(["config.json", "model.safetensors"]))
    content = (place / name).read_bytes()
    (place / name).write_bytes(data.draw(bytes_like(content), label="damaged"))
    try:
        code, out, err = command("evaluate", run.path, "--batches", 1, "--batch-size", 4)
    finally:
        (place / name).write_bytes(content)
    assert code == 0  # by the checkpoint before
    assert "mse" in out
    assert "is skipped" in err or not err


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@cases(6)
@given(data=st.data())
def test_a_damaged_model_by_the_command_line(run, tmp_path_factory, name, data):
    place = tmp_path_factory.getbasetemp() / "model"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(run.checkpoints / "checkpoint-1", place)
    content = (place / name).read_bytes()
    (place / name).write_bytes(data.draw(bytes_like(content[:3000]) | bytes_like(content), label="damaged"))
    code, _, err = command("evaluate", place, "--data", "builtin:series", "--batches", 1, "--batch-size", 4)
    if code:
        one_line(err, str(place), "builtin:series")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_hidden_layers": 1}, "has layers that its config.json does not ask for"),
        ({"num_hidden_layers": 10**8}, "num_hidden_layers=100000000, but there are only"),
        ({"num_attention_heads": 0}, "does not fit"),
        ({"pad_token_id": 10**6}, "does not fit"),
        ({"hidden_size": None}, "hidden_size"),
        ({"dtype": "float77"}, "float77"),
        ({"id2label": 3}, "config.json"),
        ({"architectures": 3}, "architectures=3 is not a list"),
    ],
)
def test_a_config_that_lies_about_its_weights(checkpoint, whole, changes, match):
    restore(checkpoint, whole)
    (checkpoint / "config.json").write_text(json.dumps(json.loads(whole["config.json"]) | changes))
    with pytest.raises(ValueError, match=match) as raised:
        load_checkpoint(checkpoint)
    assert str(checkpoint) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_an_id_left_out(tokenizer):
    folder, whole = tokenizer
    restore(folder, whole)
    content = json.loads(whole["tokenizer.json"])
    vocabulary = content["model"]["vocab"]
    vocabulary["a"] = 310
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(folder)("a")["input_ids"] == [1, 310, 2]
    vocabulary["a"] = 65536  # a model would have to know all ids below it
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="ids up to 65536: is it damaged"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("no JSON")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(folder)
