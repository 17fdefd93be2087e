"""What comes from outside is read and shown, never run: files, configs, checkpoints, names."""

import json
import pickle
from html.parser import HTMLParser
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from forbidden import forbidden
from safetensors.torch import load_file, save_file

import outeffhop
from outeffhop.cli.main import main
from outeffhop.lab.data import load_bags, prepare
from outeffhop.lab.data.tokenizer import load_tokenizer
from outeffhop.lab.paper import drawing
from outeffhop.lab.paper.experiment import Cell, Figure, Result, Table, Verdict
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.report import outlier_page, write_report
from outeffhop.lab.training import RunConfig, RunFolder, TrainConfig, resume, train
from outeffhop.lab.training.config import from_yaml
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.outliers.outlier_report import Channel, HeadStats, OutlierReport, TensorStats

SOURCE = Path(outeffhop.__file__).parent
SIZES = dict(e_layers=1, d_model=16, d_ff=32, num_heads=2)


# Calls that are never made


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_forbidden_call(path):
    assert forbidden(path.read_text()) == []


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib as j",
        "import shelve",
        "import torch\ntorch.load('a')",
        "from torch import load\nload('a')",
        "import torch as t\nt.load('a', weights_only=True)",
        "import numpy as np\nnp.load('a')",
        "import numpy\nnumpy.load('a', allow_pickle=True)",
        "import numpy as np\nnp.load('a', allow_pickle=some)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(text)",
        "import pandas\npandas.read_pickle('a')",
        "frame.read_pickle('a')",
        "eval('1')",
        "exec(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import os\nos.system('ls')",
        "import tarfile",
        "from zipfile import ZipFile\nZipFile('a').extractall('b')",
        "import shutil\nshutil.unpack_archive('a')",
        "from transformers import AutoModel\nAutoModel.from_pretrained(a, local_files_only=True)",
        "from transformers import AutoConfig\nAutoConfig.from_pretrained(a, trust_remote_code=False)",
        "from transformers import AutoModel as A\nA.from_pretrained(a, local_files_only=True, trust_remote_code=True)",
        "kind.from_pretrained(a, local_files_only=True)",
        "kind.from_pretrained(a, local_files_only=True, use_safetensors=False)",
    ],
)
def test_a_forbidden_call_is_found(planted):
    assert forbidden(f"def f():\n    pass\n{planted}\n")


def test_what_is_allowed_is_not_found():
    assert not forbidden(
        "import re, yaml, numpy as np\nfrom safetensors.torch import load_file\n"
        "yaml.safe_load(t)\nnp.load(f, allow_pickle=False)\nre.compile('a')\nmodel.eval()\nload_file(f)\n"
        "kind.from_pretrained(f, local_files_only=True, use_safetensors=True)\n"
    )


# Pickles that lie where others would read them


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return Path.touch, (Path(self.target),)


@pytest.fixture
def bomb(tmp_path):
    """The bytes of one, and whether it has gone off; the test begins by seeing that it can."""
    target = tmp_path / "gone-off"
    content = pickle.dumps(Bomb(target))
    pickle.loads(content)
    assert target.exists()
    target.unlink()
    yield content
    assert not target.exists()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has a step to go."""
    out = tmp_path_factory.mktemp("security") / "run"
    settings = dict(max_steps=2, save_steps=1, batch_size=4, eval_batches=1, outlier_batches=1, log_steps=1)
    settings = TrainConfig(device="cpu", **settings)
    train(RunConfig("stanhop", data="builtin:series", out=str(out), changes=SIZES, train=settings), quiet=True)
    (out / "result.json").unlink()
    return out


PICKLES = ("pytorch_model.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "training_args.bin")


def test_pickles_beside_a_run_are_not_read(run, bomb):
    for folder in (run / "checkpoints" / "checkpoint-2", run / "checkpoints" / "checkpoint-1", run / "model"):
        for name in PICKLES:
            (folder / name).write_bytes(bomb)
    assert resume(run, quiet=True).steps == 2
    load_checkpoint(run / "model")


def test_a_pickle_in_the_place_of_weights(run, bomb, tmp_path):
    """Also where the manifest vouches for it."""
    folder = RunFolder(tmp_path / "run")
    folder.create(RunFolder(run).config())
    side = folder.side_folder(1)
    for path in (run / "checkpoints" / "checkpoint-1").iterdir():
        if path.is_file() and path.name not in ("model.safetensors", "manifest.json", *PICKLES):
            (side / path.name).write_bytes(path.read_bytes())
    (side / "pytorch_model.bin").write_bytes(bomb)
    folder.accept(side, 1, 2)
    with pytest.raises((ValueError, OSError), match=r"model\.safetensors"):
        resume(folder.path, quiet=True)
    with pytest.raises(ValueError, match="is a pickle, which is not read"):
        load_checkpoint(folder.checkpoints / "checkpoint-1")
    (side.parent / "checkpoint-1" / "model.safetensors").write_bytes(bomb)
    with pytest.raises(ValueError, match="is damaged"):
        load_checkpoint(folder.checkpoints / "checkpoint-1")


def test_arrays_of_objects(bomb, tmp_path):
    objects = np.empty(20, object)
    objects[:] = [Bomb(tmp_path / "gone-off")] * 20
    np.savez(tmp_path / "images.npz", x=objects, y=np.zeros(20, int))
    np.savez(tmp_path / "bags.npz", X=objects, bag=np.ones(20), y=np.zeros(1))
    with pytest.raises(ValueError, match=r"images\.npz cannot be read: .*allow_pickle"):
        prepare(str(tmp_path / "images.npz"), "classification")
    with pytest.raises(ValueError, match=r"bags\.npz cannot be read: .*allow_pickle"):
        load_bags(tmp_path / "bags.npz")


def test_yaml_builds_no_objects(tmp_path, capsys):
    file = tmp_path / "config.yaml"
    for tag in ("!!python/object/apply:os.mkdir", "!!python/object/new:os.mkdir", "!!python/name:os.mkdir"):
        file.write_text(f"model: {tag} [{tmp_path / 'gone-off'}]\n")
        assert main(["train", "--config", str(file), "--data", "builtin:text", "--out", str(tmp_path / "run")]) == 2
        assert "is not YAML" in capsys.readouterr().err
    assert not (tmp_path / "gone-off").exists()


def test_yaml_that_grows_when_it_is_read(tmp_path):
    """Each line ten times the one before: the message must not spell it out."""
    lines = ["l0: &l0 [1]", *(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12))]
    file = tmp_path / "config.yaml"
    for place in ("train: {lr: *l11}", "model: *l11", "train: *l11", "changes: {hidden_size: *l11}"):
        file.write_text("\n".join([*lines, place]))
        with pytest.raises(ValueError, match=r"config\.yaml"):
            from_yaml(file)
    nested = "\n".join([*lines, "a: *l11"]).replace("\n", "\n  ")
    file.write_text(f"changes:\n  {nested}")
    with pytest.raises(ValueError, match=r"config\.yaml") as raised:
        from_yaml(file)
    assert len(str(raised.value)) < 1000


# Code that comes with a checkpoint

CODE = """
from pathlib import Path
Path({target!r}).touch()
from transformers import BertConfig, BertForMaskedLM

class OwnConfig(BertConfig):
    model_type = "own"

class OwnForMaskedLM(BertForMaskedLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "own_code.OwnConfig", "AutoModelForMaskedLM": "own_code.OwnForMaskedLM"}


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A BERT with its tokenizer, whose config names code of its own; and whether that ran."""
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(tmp_path / "cache"))
    # where transformers copies such code to before it runs it
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    prepared = prepare("builtin:text", "mlm", length=16, vocab_size=300)
    presets.build("bert", "tiny", "vanilla", **sizes, **prepared.changes).save_pretrained(folder)
    prepared.tokenizer.save_pretrained(folder)
    (folder / "own_code.py").write_text(CODE.format(target=str(tmp_path / "ran")))
    change(folder / "config.json", auto_map=AUTO_MAP, model_type="own", architectures=["OwnForMaskedLM"])
    return folder


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("command", ["outliers", "quantize", "evaluate"])
def test_code_of_a_checkpoint_is_refused(command, own_code, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody may be asked"))
    out = tmp_path / "out"
    for changes in ({}, {"model_type": "bert"}, {"model_type": "bert", "architectures": ["BertForMaskedLM"]}):
        change(own_code / "config.json", **changes)  # also where transformers knows the rest of it
        assert main([command, str(own_code), "--data", "builtin:text", "--out", str(out)]) == 2
        printed = capsys.readouterr().err
        assert "own_code.OwnConfig" in printed
        assert "--trust-remote-code" in printed
    assert not (tmp_path / "ran").exists()
    assert not out.exists()


def test_code_of_a_checkpoint_runs_where_it_is_asked_for(own_code, tmp_path, capsys):
    cut = ["--batch-size", "2", "--batches", "1", "--length", "16", "--device", "cpu", "--json"]
    assert main(["evaluate", str(own_code), "--data", "builtin:text", "--trust-remote-code", *cut]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "OwnForMaskedLM"
    assert (tmp_path / "ran").exists()


def test_code_is_refused_where_a_run_goes_on_from_it(own_code, tmp_path, capsys):
    command = ["train", "--model", "bert", "--data", "builtin:text", "--init", str(own_code)]
    assert main([*command, "--out", str(tmp_path / "run")]) == 2
    assert "names code in its own folder, 'own_code.OwnConfig', which is not run" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoConfig": "someone/else--own_code.OwnConfig"}},
        {"attn_implementation": "someone/kernel"},
        {"text_config": {"_attn_implementation": "someone/kernel@main:attention"}},
        {"attn_implementation": {"": "sdpa", "text_config": "someone/kernel"}},
    ],
)
def test_code_from_elsewhere_is_refused_even_if_trusted(changes, own_code, tmp_path):
    content = json.loads((own_code / "config.json").read_text())
    del content["auto_map"]
    (own_code / "config.json").write_text(json.dumps(content | {"model_type": "bert"} | changes))
    for trust in (False, True):
        with pytest.raises(ValueError, match=r"config\.json asks for code from elsewhere, 'someone/.*never fetched"):
            load_checkpoint(own_code, trust_remote_code=trust)


def test_code_of_a_tokenizer_is_refused(own_code, tmp_path):
    change(own_code / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own_code.Slow", "own_code.Fast"]})
    with pytest.raises(ValueError, match=r"tokenizer_config\.json names code in its own folder, 'own_code\.Slow'"):
        load_tokenizer(own_code)
    assert not (tmp_path / "ran").exists()


def test_a_hub_name_reads_no_file_of_this_machine(tmp_path, monkeypatch):
    """To datasets, "text" means every file here, and "a/b" a folder where there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "secret.csv").write_text("text\nmine\n")
    (tmp_path / "secret.txt").write_text("mine\n" * 100)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("it was asked"))
    for name in ("text", "csv", "pandas", "a/b", "../" + tmp_path.name, "."):
        with pytest.raises(ValueError, match="does not name a dataset of the hub: give local files"):
            prepare(f"hub:{name}", "clm")


# Paths stay in their folder


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", ".hidden", "", "a\0b", "a\nb", "-x"])
def test_names_of_files_are_names_alone(name):
    with pytest.raises(ValueError, match=r"letters, digits, dots, dashes and underscores"):
        Cell(name)
    with pytest.raises(ValueError, match=r"letters, digits, dots, dashes and underscores"):
        Figure(name, "title", "caption")
    assert Cell("vanilla-n4.5_a-seed0").key


def test_a_result_cannot_show_a_picture_of_another_folder(tmp_path):
    figure, _ = drawing.new()
    drawing.save(figure, tmp_path, "secret")
    (tmp_path / "results").mkdir()
    kept = json.loads(ResultFile("tiny", result=Result("table1", "Table 1", "about")).to_json())
    kept["result"]["figures"] = [{"name": "../../secret", "title": "t", "caption": "c"}]
    (tmp_path / "results" / "table1.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=r"table1\.json.*name='\.\./\.\./secret'"):
        write_report(tmp_path / "results")


def test_an_index_cannot_name_weights_of_another_folder(tmp_path):
    model = presets.build("stanhop", "tiny", "outeffhop", **SIZES)
    model.save_pretrained(tmp_path / "a", max_shard_size="10KB")
    index = tmp_path / "a" / "model.safetensors.index.json"
    load_checkpoint(tmp_path / "a")
    content = json.loads(index.read_text())
    first = next(iter(content["weight_map"].values()))
    for other in (f"../b/{first}", str(tmp_path / "b" / first)):
        moved = {k: other if v == first else v for k, v in content["weight_map"].items()}
        (tmp_path / "b").mkdir(exist_ok=True)
        save_file(load_file(tmp_path / "a" / first), tmp_path / "b" / first)
        index.write_text(json.dumps(content | {"weight_map": moved}))
        with pytest.raises(ValueError, match="only files in its own folder are read"):
            load_checkpoint(tmp_path / "a")


def test_a_config_cannot_name_other_weights(run, bomb, tmp_path):
    """transformers has a field for that, by which it would read a pickle, and an index that was not looked at."""
    model = load_checkpoint(run / "model")
    folder = tmp_path / "a"
    model.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "adapter_model.bin")
    shards = dict.fromkeys(load_file(folder / "model.safetensors"), "../b/model.safetensors")
    (folder / "x.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    model.save_pretrained(tmp_path / "b")
    names = ("adapter_model.bin", "x.safetensors.index.json", "../b/model.safetensors", "b.safetensors", 3, [], None)
    for name in names:
        change(folder / "config.json", transformers_weights=name)
        with pytest.raises(ValueError, match=r"config\.json: transformers_weights=.* only .* are read"):
            load_checkpoint(folder)
    change(folder / "config.json", transformers_weights="model.safetensors")
    load_checkpoint(folder)


# Pages show names, whatever they are

EVIL = [
    "<script>alert('1 & 2')</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "</title></style></svg><script>1</script>",
    "<!-- --> ]]> <![CDATA[",
    "&lt;b&gt; &#60;b>",
    "javascript:alert(1)",
    "{{7*7}} ${7*7} \x00\x1b[31m",
]


class Page(HTMLParser):
    """Tags with their attributes' names, in order; and all text, also of attributes."""

    def __init__(self, text):
        super().__init__()
        self.shape, self.words = [], []
        self.broken = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag == "wbr":  # where a long name may be broken, which depends on its letters
            self.broken = True
            return
        self.broken = False
        self.shape.append((tag, [name for name, _ in attrs]))
        self.words += [value for _, value in attrs if value]

    def handle_endtag(self, tag):
        self.shape.append(f"/{tag}")

    def handle_data(self, data):
        if self.broken:
            self.words[-1] += data
        elif data.strip():
            self.words.append(data)
        self.broken = False

    def handle_comment(self, data):
        self.shape.append("comment")

    def handle_decl(self, data):
        self.shape.append(data)

    unknown_decl = handle_pi = handle_comment


def outliers_of(word):
    """A report with the word wherever there is text, also where names make layers of a heat map."""

    def tensor(name):
        return TensorStats(name, 1, 1, 8, 3.0, 3.0, 3.0, 3.0, 3.0, 1, 8, 1, (), (Channel(5, 1, 2.0),), True)

    # the last is of one layer alone, and leaves a hole in the map
    names = [*(f"{word}.layers.{i}.{word}" for i in range(2)), word, f"{word}.layers.0.alone{word}"]
    tensors = [tensor(name) for name in names]
    heads = [HeadStats(f"{word}.layers.{i}.x{word}", 4, (0.25,), (0.5,), (0.1,), (0.75,)) for i in range(2)]
    return outlier_page(OutlierReport(word, word, 1, "paper", (1,), tuple(tensors), tuple(heads)), word)


def experiments_of(word, folder):
    for name in ("table1", "other"):
        figure, _ = drawing.new(1, 1)
        drawing.save(figure, folder / name, "curve")
        table = Table(f"a{word}", ["g", f"a{word}"], [["x", f"a{word}"], ["y", f"a{word}"]], {}, "g", word)
        result = Result(
            name if name == "table1" else f"other{word}",
            word,
            word,
            [table],
            [Figure("curve", word, word)],
            [Verdict(word, "not seen", word), Verdict(word, "confirmed", word)],
            {"scale": word, f"k{word}": word},
        )
        (folder / f"{name}.json").write_text(ResultFile("tiny", result=result).to_json())
    return write_report(folder).read_text()


@pytest.mark.parametrize("word", EVIL)
@pytest.mark.parametrize("kind", ["outliers", "experiments"])
def test_a_page_has_the_shape_it_has_with_plain_names(kind, word, tmp_path):
    """Tag for tag and attribute for attribute: whatever a name holds is text."""
    if kind == "outliers":
        shown, plain = outliers_of(word), outliers_of("plain")
    else:
        shown, plain = experiments_of(word, tmp_path / "a"), experiments_of("plain", tmp_path / "b")
    ours, theirs = Page(shown), Page(plain)
    assert ours.shape == theirs.shape
    assert len(ours.words) == len(theirs.words)
    seen = sum(word in text for text in ours.words)
    assert seen == sum("plain" in text for text in theirs.words) > 10
    assert not {tag for tag, *_ in ours.shape} & {"script", "iframe", "object", "base", "form"}
    assert not [name for tag in ours.shape if isinstance(tag, tuple) for name in tag[1] if name.startswith("on")]


def test_the_shape_tells_a_page_that_does_not_escape():
    for word in EVIL[:4]:
        assert Page(f"<p class='a'>{word}</p>").shape != Page("<p class='a'>plain</p>").shape or "'" in word
    assert Page("<p class='' onmouseover='alert(1)'>").shape != Page("<p class='plain'>").shape


def test_a_path_with_braces_or_markup_is_shown_as_it_is(tmp_path, monkeypatch):
    """On a terminal, where a bar shows what is tokenised."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    file = tmp_path / "[bold]{0}{task.nothing}.txt"
    file.write_text("some words of text\n" * 400)
    assert len(prepare(str(file), "clm", length=16, vocab_size=300, cache_dir=tmp_path / "cache").train)


def test_names_of_runs_on_a_terminal(tmp_path, capsys, monkeypatch):
    """rich reads [/] as markup, and would fail on it."""
    folder = RunFolder(tmp_path / "[/][red]run{0}")
    folder.create(RunConfig(data="builtin:series", model="stanhop"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["runs", str(tmp_path)]) == 0
    assert "[/][red]run{0}" in capsys.readouterr().out


def test_without_git_a_run_is_trained_all_the_same(run, monkeypatch, tmp_path):
    """What is on PATH decides nothing but whether the revision is noted."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resume(run, quiet=True).steps == 2
    assert json.loads((run / "env.json").read_text())["git"] is None
