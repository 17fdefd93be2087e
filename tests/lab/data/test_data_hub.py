"""Datasets of the hub, through datasets themselves that the tests make, and without a network."""

from fnmatch import fnmatch

import datasets
import huggingface_hub
import numpy as np
import pytest
from PIL import Image

from outeffhop.lab.data import prepare
from outeffhop.lab.data.corpus import load_text, pieces
from outeffhop.lab.data.hub import load
from outeffhop.lab.data.preparing import kind_of
from outeffhop.lab.data.specs import parse
from outeffhop.lab.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture
def hub(monkeypatch):
    """A hub with what the test puts into it, by (name, config)."""
    shelf = {}

    def load_dataset(name, config=None, **others):
        assert not others, "no option may reach the hub, least of all trust_remote_code"
        if (name, config) not in shelf:
            raise datasets.exceptions.DatasetNotFoundError(f"Dataset '{name}' doesn't exist on the Hub")
        return datasets.DatasetDict(shelf[name, config])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return shelf


def texts(spec, split="train"):
    return list(pieces(load_text(parse(spec)).splits[split]()))


def rows(values):
    return datasets.Dataset.from_dict({"text": values})


def test_names_and_configs(hub):
    three = {split: rows([split + "\n", ""]) for split in ("train", "validation", "test")}
    hub["owner/name", None] = hub["wikitext", "wikitext-2-v1"] = hub["owner/name", "config"] = three
    for spec in ("hub:owner/name", "hub:wikitext/wikitext-2-v1", "hub:owner/name/config"):
        assert texts(spec, "validation") == [("validation", True)]
    with pytest.raises(ValueError, match="too many parts"):
        load(parse("hub:a/b/c/d"))


def test_rows_of_one_line_are_lines_and_others_are_documents(hub):
    hub["lines", None] = {"train": rows(["", " = Title = \n", "", " text \n"] * 20)}
    assert len(texts("hub:lines")) == 1
    hub["articles", None] = {split: rows(["a\nb", "c"]) for split in ("train", "validation", "test")}
    assert texts("hub:articles") == [("a\nb", True), ("c", True)]


def test_rows_without_text(hub):
    hub["gaps", None] = {split: rows(["a\nb", None, "c"]) for split in ("train", "validation", "test")}
    assert texts("hub:gaps") == [("a\nb", True), ("c", True)]


def test_the_same_text_gives_the_same_blocks_whichever_way_it_came(hub, tmp_path):
    lines = [f"line {i} of some text\n" for i in range(400)]
    hub["some", None] = {"train": rows(lines)}
    (tmp_path / "some.txt").write_text("".join(lines))
    settings = dict(vocab_size=300, length=32, cache_dir=tmp_path / "cache")
    ways = [prepare(spec, "mlm", **settings) for spec in ("hub:some", str(tmp_path / "some.txt"))]
    for split in ("train", "validation", "test"):
        ours, theirs = (list(getattr(way, split)) for way in ways)
        assert len(ours) == len(theirs) > 0
        assert all(a["input_ids"].equal(b["input_ids"]) for a, b in zip(ours, theirs, strict=True))


def test_pictures_with_labels(hub):
    images = np.random.default_rng(0).integers(0, 256, (30, 5, 5, 3), dtype=np.uint8)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    table = {"img": [Image.fromarray(image) for image in images], "label": [i % 2 for i in range(30)]}
    hidden = {"img": table["img"][:3], "label": [-1] * 3}
    hub["owner/pets", None] = {
        "train": datasets.Dataset.from_dict(table, features=features),
        "test": datasets.Dataset.from_dict(hidden, features=features),
    }
    data = prepare("hub:owner/pets", "classification", mean=(0.0,) * 3, std=(1.0,) * 3)
    assert (len(data.train), len(data.validation), len(data.test)) == (24, 3, 3)
    assert data.about["classes"] == ["cat", "dog"]
    found = {(s["pixel_values"] * 255).round().byte().permute(1, 2, 0).numpy().tobytes() for s in data.train}
    assert found <= {image.tobytes() for image in images}
    grey_first = {"img": [Image.new("L", (5, 5)), *table["img"][1:]], "label": table["label"]}
    hub["owner/grey", None] = {"train": datasets.Dataset.from_dict(grey_first, features=features)}
    assert prepare("hub:owner/grey", "classification").changes["num_channels"] == 3
    hub["owner/none", None] = {"train": datasets.Dataset.from_dict({"img": [], "label": []}, features=features)}
    with pytest.raises(ValueError, match="no train split with images"):
        prepare("hub:owner/none", "classification")
    hub["owner/imagenet-1k", None] = hub["owner/pets", None]
    imagenet = prepare("hub:owner/imagenet-1k", "classification")
    assert imagenet.about["preprocessing"]["mean"] == [0.485, 0.456, 0.406]


def test_series(hub):
    table = {"date": [f"t{i}" for i in range(400)], "x": np.arange(400.0), "y": np.ones(400)}
    hub["owner/series", None] = {"train": datasets.Dataset.from_dict(table)}
    data = prepare("hub:owner/series", "forecasting", in_len=10, out_len=5)
    assert data.about["series"] == ["x", "y"]
    assert len(data.train) == 280 - 14
    hub["owner/full", None] = {"full": datasets.Dataset.from_dict(table)}
    with pytest.raises(ValueError, match="has splits full: it needs one of train, validation, test"):
        prepare("hub:owner/full", "forecasting")
    hub["owner/cities", None] = {"train": datasets.Dataset.from_dict(table | {"city": ["here"] * 400})}
    with pytest.raises(ValueError, match="'hub:owner/cities': column 'city' does not hold numbers"):
        prepare("hub:owner/cities", "forecasting")
    with pytest.raises(ValueError, match="contains series, but task 'clm' needs text"):
        prepare("hub:owner/series", "clm")
    hub["owner/odd", None] = {"train": datasets.Dataset.from_dict({"a": ["x"], "b": ["y"]})}
    with pytest.raises(ValueError, match="has columns a, b: it needs a text column"):
        prepare("hub:owner/odd", "clm")


def test_a_name_that_is_not_there(hub):
    with pytest.raises(ValueError, match=r"'hub:nothing' could not be loaded .*doesn't exist.*give its path"):
        prepare("hub:nothing", "clm")


def test_without_a_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'hub:nobody/nothing' could not be loaded from the hub.*give its path"):
        prepare("hub:nobody/nothing", "clm")


def test_joined_texts_have_every_split_of_those_that_have_it(hub):
    hub["books", None] = {"train": rows(["one\n", "two\n"])}
    hub["wiki", "en"] = {split: rows([f"{split}\nof wiki"]) for split in ("train", "validation", "test")}
    corpus = load_text(parse("hub:books+wiki/en"))
    found = {split: list(pieces(corpus.splits[split]())) for split in corpus.splits}
    assert found["train"] == [("one\ntwo", True), ("train\nof wiki", True)]
    assert found["validation"] == [("validation\nof wiki", True)]
    assert kind_of(parse("hub:books+wiki/en")) == "text"
    assert corpus.digest != load_text(parse("hub:wiki/en")).digest


@pytest.mark.parametrize("spec", ["hub:books+", "hub:+books", "hub:a++b"])
def test_a_join_without_a_name_is_refused(spec):
    with pytest.raises(ValueError, match="does not name a dataset"):
        parse(spec)


def test_only_text_is_joined(hub):
    hub["books", None] = {"train": rows(["one\n"])}
    dates = {"date": ["2020-01-01", "2020-01-02"], "load": [1.0, 2.0]}
    hub["numbers", None] = {"train": datasets.Dataset.from_dict(dates)}
    with pytest.raises(ValueError, match="only text can be joined"):
        kind_of(parse("hub:books+numbers"))


def test_a_tokenizer_of_the_hub(tmp_path, monkeypatch):
    """Only the files of a tokenizer are asked for, and they are read like any local ones."""
    trained = train_tokenizer(iter(["some text", "more of it"]), 300)
    trained.save_pretrained(tmp_path / "known")
    asked = []

    def download(name, *, allow_patterns):
        asked.extend(allow_patterns)
        if name != "owner/known":
            raise OSError("no such model")
        return str(tmp_path / "known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_tokenizer("hub:owner/known").get_vocab() == trained.get_vocab()
    assert not any(fnmatch(file, pattern) for file in ("model.safetensors", "x.py", "x.bin") for pattern in asked)
    with pytest.raises(ValueError, match=r"tokenizer='hub:unknown' could not be loaded from the hub \(no such model\)"):
        load_tokenizer("hub:unknown")
