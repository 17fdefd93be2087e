"""Every command with flags that meet in pairs, on three models: its exit code, its error, its files, JSON and numbers.

A row of good values ends with 0, prints JSON that is complete or tables, writes whole files and no others, and has the
numbers of the same call in Python. A row with one bad value ends with 2, one line that names it, and nothing written.
"""

import dataclasses
import itertools
import json
import re

import pairs
import pytest
from architectures import VOCAB, build
from fuzzing import command
from trained_look import look_trained

import outeffhop
from outeffhop._io import to_plain
from outeffhop.lab.data import batches, prepare
from outeffhop.lab.data.samples import random_batches
from outeffhop.lab.data.tokenizer import marking_ids
from outeffhop.lab.diagnosis import DiagnosisReport
from outeffhop.lab.diagnosis.checkpoint_config import CheckpointConfig
from outeffhop.lab.diagnosis.opening import open_checkpoint
from outeffhop.lab.mending import MendReport, mend
from outeffhop.lab.training import DataConfig, Result, RunConfig, TrainConfig, train
from outeffhop.metrics import metric_for
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.outliers import OutlierReport, measure
from outeffhop.quantization import QuantizationReport, Scheme, evaluate

CLASSES = {"llama": "LlamaForCausalLM", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification"}
TASKS = {"llama": "clm", "bert": "mlm", "vit": "classification"}
WRITTEN = {
    "evaluate": ["evaluation.json"],
    "outliers": ["outliers.html", "outliers.json"],
    "quantize": ["quantization.json"],
    "diagnose": ["diagnosis.html", "diagnosis.json"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Two checkpoints of each model, of which the first looks trained, and what else the values name."""
    root = tmp_path_factory.mktemp("pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTEFFHOP_CACHE", str(root / "cache"))
        prepared = prepare("builtin:text", "mlm", vocab_size=VOCAB)
        prepared.tokenizer.save_pretrained(root / "tokenizer")
        (root / "own.txt").write_text("".join(f"line {i} of a text that is short, {i * i}\n" for i in range(3000)))
        for name, kind in CLASSES.items():
            model = build(kind)
            model.save_pretrained(root / f"{name}-other")
            look_trained(model).save_pretrained(root / name)
            if name != "vit":
                for folder in (name, f"{name}-other"):
                    prepared.tokenizer.save_pretrained(root / folder)
            quick = dict(batch_size=2, batches=1, length=16, device="cpu", int8=False)
            outeffhop.diagnose(root / f"{name}-other", out=root / f"{name}-diagnosis", **quick)
        yield root


@pytest.fixture
def names(root):
    def of(model):
        text = model != "vit"
        return {
            "checkpoint": str(root / model),
            "other": str(root / f"{model}-other"),
            "diagnosis": str(root / f"{model}-diagnosis"),
            "tokenizer": str(root / "tokenizer"),
            "data": "builtin:text" if text else "builtin:images",
            "own": str(root / "own.txt") if text else "builtin:images",
            "wrong": "builtin:images" if text else "builtin:text",
            "task": TASKS[model],
            "wrong_task": "classification" if text else "mlm",
        }

    return of


@pytest.fixture
def place(tmp_path, monkeypatch, root):
    """Where each command runs: beside a file, an empty folder, and one that holds something."""
    monkeypatch.setenv("OUTEFFHOP_CACHE", str(root / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def at(number):
        here = tmp_path / str(number)
        (here / "there").mkdir(parents=True)
        (here / "empty").mkdir()
        (here / "there" / "mine").write_text("mine")
        (here / "file").write_text("no folder: [and no YAML")
        (here / "some.yaml").write_text("train: {lr: 2.0e-3}\n")
        monkeypatch.chdir(here)
        return here

    return at


def files(here):
    return {str(p.relative_to(here)): p.read_bytes() for p in here.rglob("*") if p.is_file()}


def folders(here):
    return {str(p.relative_to(here)) for p in here.rglob("*") if p.is_dir()}


def strict(text):
    """JSON as the standard has it: without NaN and Infinity."""

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


# What Python gives


def opened(model, given, own=()):
    fields = {f.name for f in dataclasses.fields(CheckpointConfig)}
    config = CheckpointConfig(**{"checkpoint": model, **{k: v for k, v in given.items() if k in fields}})
    return open_checkpoint(config, builtin=True)


def drawn(prepared, given, default, split="validation"):
    size = given.get("batch_size", default)
    return list(batches(getattr(prepared, split), prepared.eval_collate, size, limit=given["batches"]))


def evaluated(checkpoint, given, here):
    model, _, prepared = opened(checkpoint, given)
    found = metric_for(prepared.task)(model, drawn(prepared, given, 32, given.get("split", "validation")))
    return to_plain(found)


def outliers_of(checkpoint, given, here):
    model, _, prepared = opened(checkpoint, given)
    return measure(
        model,
        drawn(prepared, given, 16),
        given.get("tensors", "paper"),
        special_ids=marking_ids(prepared.tokenizer),
    )


def quantized(checkpoint, given, here):
    model, _, prepared = opened(checkpoint, given)
    scheme = f"{given.get('bits', 'W8A8')} {given.get('scheme', 'paper')}"

    def draw(seed):
        size = given["batch_size"]
        return random_batches(prepared.train, prepared.eval_collate, size, given["calibration_batches"], seed)

    return evaluate(
        model,
        draw,
        drawn(prepared, given, 32),
        prepared.task,
        Scheme.parse(scheme).with_range(given.get("range")),
        given["seeds"],
        fold=given.get("fold", False),
        exclude=given.get("exclude", ()),
    )


def diagnosed(checkpoint, given, here):
    settings = {k: v for k, v in given.items() if k not in ("out", "data", "compare")}
    report = outeffhop.diagnose(checkpoint, given.get("data"), compare=given.get("compare"), int8=False, **settings)
    return dataclasses.replace(report, seconds=0.0)


def mended(checkpoint, given, here):
    settings = {k: v for k, v in given.items() if k not in ("out", "data")}
    report = mend(checkpoint, given["data"], here / "twin", quiet=True, **settings)
    return dataclasses.replace(report, seconds=0.0)


def trained(checkpoint, given, here):
    parts = {part: {} for part in ("train", "samples")}
    own = {}
    for name, value in given.items():
        part, _, inner = name.partition(".")
        (parts[part] if inner else own)[inner or part] = value
    nested = {"train": TrainConfig(**parts["train"]), "samples": DataConfig(**parts["samples"])}
    return train(RunConfig(**{**own, "out": str(here / "twin")}, **nested), quiet=True)


# What must hold


def check_evaluate(said, out, as_json, twin, here):
    if as_json:
        assert said.keys() == {"checkpoint", "model", "method", "data", "split", "samples", "metrics"}
        assert said["metrics"] == twin
    else:
        assert all(f"{float(value):.6g}" in said for value in twin.values())
    if out:
        assert strict((here / out / "evaluation.json").read_text())["metrics"] == twin


def check_outliers(said, out, as_json, twin, here):
    assert OutlierReport.load(here / out / "outliers.json") == twin
    if as_json:
        assert said == to_plain({**twin.summary, "worst": twin.table(10)})


def check_quantize(said, out, as_json, twin, here):
    found = [QuantizationReport.from_json(json.dumps(said))] if as_json else []
    found += [QuantizationReport.load(here / out / "quantization.json")] if out else []
    if not as_json:
        name = next(iter(twin.quantized))
        assert f"{twin.mean(name):.4g} ± {twin.std(name):.2g}" in said
    for report in found:
        if report.saved is not None:
            first = {name: values[0] for name, values in twin.quantized.items()}
            assert report.saved.metric == pytest.approx(first, rel=1e-3)
        assert dataclasses.replace(report, saved=None).to_json() == twin.to_json()


def check_diagnose(said, out, as_json, twin, here):
    report = DiagnosisReport.load(here / out / "diagnosis.json")
    assert dataclasses.replace(report, seconds=0.0).to_json() == twin.to_json()
    assert (here / out / "diagnosis.html").read_text().endswith("</html>\n")
    if as_json:
        assert said == strict((here / out / "diagnosis.json").read_text())


def check_mend(said, out, as_json, twin, here):
    report = MendReport.load(here / out / "mend.json")
    assert dataclasses.replace(report, seconds=0.0).to_json() == twin.to_json()
    assert (here / out / "model" / "model.safetensors").read_bytes() == weights(here / "twin")
    if as_json:
        assert said == strict((here / out / "mend.json").read_text())


def check_train(said, out, as_json, twin, here):
    assert Result.load(here / out / "result.json") == twin
    assert (here / out / "model" / "model.safetensors").read_bytes() == weights(here / "twin")
    if as_json:
        assert said == to_plain(dataclasses.asdict(twin))


def weights(run):
    return (run / "model" / "model.safetensors").read_bytes()


TWINS = {
    "evaluate": (evaluated, check_evaluate),
    "outliers": (outliers_of, check_outliers),
    "quantize": (quantized, check_quantize),
    "diagnose": (diagnosed, check_diagnose),
    "mend": (mended, check_mend),
    "train": (trained, check_train),
}


def check_row(name, model, row, names, here):
    named = names(model)
    words = [*([] if name == "train" else [named["checkpoint"]]), *pairs.words_of(row, named)]
    words += ["--no-int8"] if name == "diagnose" else []
    says = [value.says.format(**named) for value in row.values() if value.says]
    before, there = files(here), folders(here)
    code, out, err = command(name, *words)
    errors = [line for line in err.splitlines() if line.startswith("outeffhop: ") and "warning: " not in line]
    if says:
        assert code == 2, out + err
        assert len(errors) == 1, err
        assert err.splitlines()[-1] == errors[0]
        assert says[0] in errors[0]
        assert (out, files(here), folders(here)) == ("", before, there)
        return
    assert code == 0, err
    assert errors == []
    given = pairs.given_of(row, named)
    folder = given.get("out")
    if name == "diagnose":
        folder = folder or f"diagnosis/{model}"
    check_files(name, folder, given, before, here, compared="compare" in given)
    as_json = row["--json"].words != ()
    twin, check = TWINS[name]
    check(strict(out) if as_json else out, folder, as_json, twin(named["checkpoint"], given, here), here)


def check_files(name, folder, given, before, here, compared):
    """Those of before, and the command's own, of which none is hidden."""
    after = files(here)
    assert {file: after.get(file) for file in before} == before
    new = {file for file in after if file not in before}
    assert not [file for file in new if re.search(r"(^|/)\.|\.tmp", file)]
    if given.pop("save", False):
        assert load_checkpoint(here / "saved").config.quantization_config is not None
        new = {file for file in new if not file.startswith("saved/")}
    if name in WRITTEN:
        own = [*WRITTEN[name], *(["compared.json"] if compared else [])]
        assert new == ({f"{folder}/{file}" for file in own} if folder else set())
    else:
        assert all(file.startswith(f"{folder}/") for file in new)


@pytest.mark.parametrize("name", pairs.TABLES)
def test_some_rows(name, names, place):
    """A cut: all good rows where a row takes a second, none where it takes several, and a few with a bad value."""
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    rows = pairs.singles(name)
    good, bad = ([row for row in rows if pairs.is_bad(row[1]) == wrong] for wrong in (False, True))
    some = {"diagnose": 1, "train": 1, "mend": 0}.get(name, len(good))
    for number, (model, row) in enumerate([*good[:some], *bad[:: 8 if some < 2 else 4]]):
        check_row(name, model, row, names, place(number))


def test_the_tables_name_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name, table in pairs.TABLES.items():
        _, out, _ = command(name, "--help-all")
        flags = set(re.findall(r"^\W+(--[a-z][\w.-]*)", out, re.M))
        assert len(flags) > 10
        left = flags - table.keys() - pairs.LEFT_OUT.keys()
        assert not [flag for flag in left if not flag.startswith(("--train.", "--samples."))], name
        assert table.keys() - flags == {"--unknown"}


@pytest.mark.parametrize("name", ["evaluate", "quantize"])
def test_every_pair_is_in_the_cover(name):
    """Counted anew: any two good values in a good row, any bad one beside any good one, if they go together."""
    rows = [{"model": model, **row} for model, row in pairs.cover(name)]
    held = {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}
    good = {frozenset(pair) for row in rows if not pairs.is_bad(row) for pair in itertools.combinations(row.items(), 2)}
    table = {"model": list(pairs.MODELS), **pairs.TABLES[name]}
    missing = []
    for (flag, values), (other, others) in itertools.combinations(table.items(), 2):
        for value, another in itertools.product(values, others):
            bad = sum(pairs.is_bad({"": each}) for each in (value, another))
            pair = frozenset([(flag, value), (other, another)])
            if bad < 2 and pair not in (held if bad else good) and pairs.goes(name, {flag: value, other: another}):
                missing.append(pair)
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", pairs.TABLES)
def test_each_pair_of_values(name, names, place):
    pytest.importorskip("compressed_tensors", reason="needs outeffhop[deploy]")
    failed = {}
    rows = pairs.cover(name)
    for number, (model, row) in enumerate(rows):
        try:
            check_row(name, model, row, names, place(number))
        except Exception as error:
            failed[f"{model} {list(row.values())}"] = error
    assert not failed, f"{len(failed)} of {len(rows)} rows: " + "\n".join(f"{k}: {v!r}" for k, v in failed.items())
