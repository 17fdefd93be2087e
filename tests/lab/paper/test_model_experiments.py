"""The experiments that train: what they measure is what the saved models give, and verdicts follow the numbers."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch

from outeffhop.lab.data import prepare
from outeffhop.lab.paper import Settings, drawing, published, run
from outeffhop.lab.paper import training_runs as shared
from outeffhop.lab.paper.beyond_result import Candidate, at_equal_perplexity, fold_verdict, lower_verdict
from outeffhop.lab.paper.convergence import speed_verdicts
from outeffhop.lab.paper.cost import memory_verdict, time_verdict
from outeffhop.lab.paper.host_memory import host_memory, resident_gb
from outeffhop.lab.paper.ranking import shown as number_shown
from outeffhop.lab.paper.ranking import surplus
from outeffhop.lab.paper.registry import find
from outeffhop.lab.paper.result_file import ResultFile
from outeffhop.lab.paper.table2 import rank, top_two, top_two_verdict
from outeffhop.lab.report.experiments_page import write_report
from outeffhop.lab.training.trainer import RunTrainer
from outeffhop.models import presets
from outeffhop.models.checkpoint import load_checkpoint
from outeffhop.outliers import measure
from outeffhop.quantization import Calibration, Scheme, fold_layernorm, freeze, simulate

PAIR = ("opt-vanilla-0", "opt-outeffhop-0")


def only(name, *keys):
    """An experiment with some of its cells."""
    experiment = find(name)
    chosen = lambda settings: [c for c in experiment.cells(settings) if not keys or c.key in keys]  # noqa: E731
    return dataclasses.replace(experiment, cells=chosen)


def quick(out):
    return Settings(out=Path(out), seeds=1, quick=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small only wait for a second one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTEFFHOP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def table1(cache, tmp_path_factory):
    """OPT with two methods, trained and measured."""
    out = tmp_path_factory.mktemp("table1")
    return out, run(only("table1", *PAIR), quick(out), tell=lambda _: None)


def cell(out, key, name="table1"):
    return ResultFile.load(Path(out) / f"{name}.json").cells[key].found


def perplexity(model, given):
    with torch.no_grad():
        return math.exp(float(model(**given).loss))


@pytest.mark.parametrize("key", PAIR)
def test_numbers_are_those_of_the_saved_model(table1, key):
    out, _ = table1
    folder = out / "table1" / "runs" / f"tiny-quick-{key[:-2]}-4steps-seed0" / "model"
    model, found = load_checkpoint(folder), cell(out, key)
    prepared = prepare("builtin:text", "clm", tokenizer=folder, length=32)
    size = len(prepared.validation)
    given = prepared.eval_collate([prepared.validation[i * size // 32] for i in range(32)])
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(0))[:32]
    calibration = prepared.eval_collate([prepared.train[int(i)] for i in order])

    quantized = simulate(model, scheme=Scheme.parse("W8A8").with_range("percentile"))
    with Calibration(quantized), torch.no_grad():
        quantized(**calibration)
    freeze(quantized)

    report = measure(model, [given])
    assert found["metrics"]["perplexity"] == pytest.approx(perplexity(model, given), rel=1e-6)
    assert found["w8a8"]["perplexity"] == pytest.approx([perplexity(quantized, given)], rel=1e-6)
    assert found["w8a8"]["perplexity"][0] != found["metrics"]["perplexity"]
    assert found["inf_norm"] == pytest.approx(report.max_inf_norm)
    assert found["kurtosis"] == pytest.approx(report.avg_kurtosis)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert found["train_samples"] == len(prepared.train)


def test_table1_shows_what_is_measured_and_leaves_the_rest_empty(table1):
    out, result = table1
    # a model of which nothing is measured has neither table nor row nor verdict
    assert [table.title for table in ResultFile.load(out / "table1.json").result.tables[1:]] == ["OPT"]
    assert [row[:2] for row in result.tables[0].rows] == [["OPT", m] for m in ("vanilla", "clipped", "gated")]
    opt = {row[0]: row[1:] for row in result.tables[1].rows}
    assert opt["outeffhop"][0] == f"{cell(out, PAIR[1])['kurtosis']:.4g}"
    assert opt["gated"][:5] == [None] * 5
    assert opt["gated"][5:9] == list(published.TABLE1["opt", "gated"])
    assert (out / "table1" / "methods.png").is_file()
    assert [v.verdict for v in result.verdicts[:3]] == ["not measured"] * 3  # one of twelve pairs
    said = [(v.claim.partition(":")[0], v.verdict, v.seeds) for v in result.verdicts[3:]]
    missing = [("OPT, clipped", "not measured", None), ("OPT, gated", "not measured", None)]
    assert said == [("OPT, vanilla", "not seen", 1)] * 3 + missing
    assert cell(out, PAIR[1])["split"] == "validation"
    samples = cell(out, PAIR[1])["train_samples"]
    assert result.conditions["OPT"].endswith(f"of {samples:,} training samples, measured on the validation split")


def test_vit_is_also_measured_in_8_bit_floating_point(cache, tmp_path):
    result = run(only("table1", "vit-vanilla-0"), quick(tmp_path), tell=lambda _: None)
    found = cell(tmp_path, "vit-vanilla-0")
    folder = tmp_path / "table1" / "runs" / "tiny-quick-vit-vanilla-4steps-seed0" / "model"
    model = load_checkpoint(folder)
    prepared = prepare("builtin:images", "classification")
    given = prepared.eval_collate([prepared.test[i * len(prepared.test) // 32] for i in range(32)])
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(0))[:32]
    quantized = simulate(model, scheme=Scheme.parse("W8A8 fp8"))
    with Calibration(quantized), torch.no_grad():
        quantized(**prepared.eval_collate([prepared.train[int(i)] for i in order]))
    freeze(quantized)
    with torch.no_grad():
        right = (quantized(**given).logits.argmax(-1) == given["labels"]).double().mean()
    assert found["fp8"]["accuracy"] == pytest.approx([float(right)])
    columns, row = result.tables[1].columns, result.tables[1].rows[0]
    assert row[columns.index("FP8 top-1 accuracy")] == f"{100 * float(right):.4g}"


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from test_model_experiments import PAIR, only, quick, run
from outeffhop.lab.training.trainer import RunTrainer
step, calls = RunTrainer.training_step, iter(range(1, 100))
def counted(*args, **kwargs):
    if next(calls) == 7:  # the second run, after its checkpoint of step 2
        os.kill(os.getpid(), signal.SIGKILL)
    return step(*args, **kwargs)
RunTrainer.training_step = counted
run(only("table1", *PAIR), quick(sys.argv[2]))
"""


def test_a_killed_experiment_goes_on_where_it_stopped(table1, tmp_path, monkeypatch):
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    killed = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    assert cell(tmp_path, PAIR[0])
    step, calls = RunTrainer.training_step, []

    def counted(*args, **kwargs):
        calls.append(1)
        return step(*args, **kwargs)

    monkeypatch.setattr(RunTrainer, "training_step", counted)
    run(only("table1", *PAIR), quick(tmp_path), tell=lambda _: None)
    assert len(calls) == 2  # of eight
    again, whole = cell(tmp_path, PAIR[1]), cell(table1[0], PAIR[1])
    assert again["metrics"] == pytest.approx(whole["metrics"], rel=1e-5)


def test_training_outliers_come_from_the_runs_of_table1(table1):
    out, _ = table1
    runs = {path: path.stat().st_mtime_ns for path in (out / "table1" / "runs").glob("*/result.json")}
    result = run(only("training-outliers", *PAIR), quick(out), tell=lambda _: None)
    assert {path: path.stat().st_mtime_ns for path in (out / "table1" / "runs").glob("*/result.json")} == runs
    lines = (out / "table1" / "runs" / "tiny-quick-opt-vanilla-4steps-seed0" / "metrics.jsonl").read_text().splitlines()
    norms = [line["max_inf_norm"] for line in map(json.loads, lines) if "tensors" in line]
    found = cell(out, PAIR[0], "training-outliers")
    assert found["max_inf_norm"] == norms
    assert found["steps"] == [2, 4]
    assert max(values[-1] for values in found["tensors"].values()) == norms[-1]
    assert next(row[4] for row in result.tables[0].rows) == f"{norms[-1]:.4g}"
    assert all((out / "training-outliers" / f"{f.name}.png").is_file() for f in result.figures)


@pytest.mark.filterwarnings("error")
def test_layers_are_named_where_vanilla_is_not_measured(tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(drawing, "save", lambda figure, folder, name: drawn.update({name: figure}))
    curve = {"steps": [1, 2], "max_inf_norm": [1.0, 2.0], "tensors": {f"layers.{i}.fc2": [1.0, 2.0] for i in range(4)}}
    conclude = find("training-outliers").conclude
    conclude({"opt-outeffhop-0": curve}, quick(tmp_path), tmp_path)
    said = [text.get_text() for text in drawn["layers"].legends[0].get_texts()]
    assert said == ["layer 1", "layer 2", "solid: vanilla", "dashed: outeffhop"]
    conclude({"opt-gated-0": curve}, quick(tmp_path), tmp_path)  # of which these two figures have nothing
    assert [text.get_text() for text in drawn["layers"].axes[0].texts] == ["not measured"]


W4A8 = ("W4A8", "W4A8, folded")
BEYOND = ("outeffhop-0", "gated-outeffhop-gate-element-predictor-features-qk_norm-rms-0")


def test_beyond_measures_saved_models_rounded_four_ways(table1):
    out, _ = table1
    result = run(only("beyond", *BEYOND), quick(out), tell=lambda _: None)
    found = [cell(out, key, "beyond") for key in BEYOND]
    before = cell(out, PAIR[1])  # the paper's method is Table 1's run
    assert found[0]["rounded"]["W8A8"] == before["w8a8"]["perplexity"]
    assert not list((out / "beyond" / "runs").glob("*-opt-outeffhop-4steps*"))
    folder = next((out / "beyond" / "runs").glob("tiny-quick-opt-gated-outeffhop-gate-element-*")) / "model"
    model = load_checkpoint(folder)
    prepared = prepare("builtin:text", "clm", tokenizer=folder, length=32)
    size = len(prepared.validation)
    given = prepared.eval_collate([prepared.validation[i * size // 32] for i in range(32)])
    order = torch.randperm(len(prepared.train), generator=torch.Generator().manual_seed(0))[:32]
    calibration = prepared.eval_collate([prepared.train[int(i)] for i in order])
    folded, _ = fold_layernorm(model, given)
    quantized = simulate(folded, scheme=Scheme.parse("W4A8").with_range("percentile"))
    with Calibration(quantized), torch.no_grad():
        quantized(**calibration)
    expected = perplexity(freeze(quantized), given)
    assert found[1]["rounded"]["W4A8, folded"] == pytest.approx([expected], rel=1e-6)
    assert len({tuple(values) for values in found[1]["rounded"].values()}) == 4
    shown, lost = (next(row for row in table.rows if "element" in row[0]) for table in result.tables[2:])
    assert shown[1] == f"{found[1]['metrics']['perplexity']:.4g}"
    assert lost[4] == number_shown(expected - found[1]["metrics"]["perplexity"], 3)
    assert [row[0] for row in result.tables[0].rows] == ["W8A8"] * 3 + ["W4A8"] * 3
    assert result.tables[1].rows[3][3] == f"{min(mean(v['rounded'][w]) for v in found for w in W4A8):.4g}"
    assert (out / "beyond" / "losses.png").is_file()
    *_, options = run(only("table1", *PAIR), quick(out), tell=lambda _: None).tables
    assert options.title == "OPT with options beyond the paper"
    (row,) = options.rows  # the paper's own method stands in its table alone
    assert row[0] == "gated-outeffhop(gate=element, predictor=features, qk_norm=rms)"
    assert row[4] == f"{found[1]['rounded']['W8A8'][0]:.4g}"
    assert "Beyond the paper" in write_report(out).read_text()


def test_beyond_trains_with_the_penalty(table1):
    out, _ = table1
    keys = ("vanilla-penalty-0", "gated-outeffhop-gate-element-predictor-features-penalty-0")
    result = run(only("beyond", *keys), quick(out), tell=lambda _: None)
    runs = sorted(path.name for path in (out / "beyond" / "runs").glob("*penalty*"))
    assert runs == [
        "tiny-quick-opt-gated-outeffhop-gate-element-predictor-features-penalty-4steps-seed0",
        "tiny-quick-opt-vanilla-penalty-4steps-seed0",
    ]
    for name in runs:
        lines = (out / "beyond" / "runs" / name / "metrics.jsonl").read_text().splitlines()
        assert any("outlier_penalty" in line for line in lines)
    named = ["vanilla, penalty 0.1", "gated-outeffhop(gate=element, predictor=features), penalty 0.1"]
    for table in result.tables[2:]:
        assert [row[0] for row in table.rows] == named
    assert all(cell(out, key, "beyond")["rounded"].keys() == {"W8A8", "W8A8, folded", *W4A8} for key in keys)
    assert result.verdicts[0].verdict == "not measured"  # without the penalty nothing is measured here


def test_convergence_compares_three_different_layers(cache, tmp_path):
    result = run(only("convergence"), quick(tmp_path), tell=lambda _: None)
    curves = [
        [loss for _, loss in cell(tmp_path, f"{m}-0", "convergence")["loss"]]
        for m in ("vanilla", "sparse", "outeffhop")
    ]
    assert len({tuple(curve) for curve in curves}) == 3
    assert (tmp_path / "convergence" / "curves.png").is_file()
    assert [row[:2] for row in result.tables[0].rows] == [["digits", m] for m in ("dense", "sparse", "outeffhop")]
    assert [v.verdict for v in result.verdicts] == ["not seen"] * 2  # one run of each


def test_cifar100_is_a_choice_of_convergence(tmp_path):
    settings = Settings(scale="small", out=tmp_path, data=tmp_path, seeds=1)
    assert [c.key for c in find("convergence").cells(settings)] == ["vanilla-0", "sparse-0", "outeffhop-0"]
    (tmp_path / "cifar100").mkdir()
    keys = [c.key for c in find("convergence").cells(settings)]
    assert keys[3:] == ["cifar100-vanilla-0", "cifar100-sparse-0", "cifar100-outeffhop-0"]
    curves = {"loss": [[1, 2.0]], "accuracy": [[1, 50.0]], "batch": 8, "lr": 1e-3, "precision": "fp32"}
    without = dataclasses.replace(settings, data=None)  # the folder is needed only to measure
    result = find("convergence").conclude(dict.fromkeys(keys, curves), without, tmp_path)
    assert [row[0] for row in result.tables[0].rows] == ["cifar10"] * 3 + ["cifar100"] * 3
    assert [v.claim.split(":")[1] for v in result.verdicts] == [" cifar10"] * 2 + [" cifar100"] * 2


def test_table2_forecasts_with_four_layers(cache, tmp_path):
    keys = [f"synthetic-24-{method}-0" for method in published.FORECASTERS]
    result = run(only("table2", *keys), quick(tmp_path), tell=lambda _: None)
    found = [cell(tmp_path, key, "table2") for key in keys]
    assert [row[2] for row in result.tables[0].rows] == [f"{f['metrics']['mse']:.4g}" for f in found]
    better = sum(f["kurtosis"] < found[3]["kurtosis"] for f in found)
    assert result.tables[1].rows[0][3] == better + 1
    assert f"of {2}" in result.verdicts[0].numbers


def test_cost_times_both_methods_and_keeps_main_memory_over_time(tmp_path):
    result = run(only("cost", "vit"), quick(tmp_path), tell=lambda _: None)
    found = cell(tmp_path, "vit", "cost")
    assert {method: len(times) for method, times in found["seconds"].items()} == {"vanilla": 3, "outeffhop": 3}
    table = result.tables[0]
    assert [row[:2] for row in table.rows] == [["ViT", "vanilla"], ["ViT", "outeffhop"]]
    assert table.rows[0][5] == "not measured"  # the memory of a CPU
    for row, host in zip(table.rows, found["host"].values(), strict=True):
        assert len(host["seconds"]) == len(host["gb"]) > 1
        assert host["seconds"] == sorted(host["seconds"])
        assert 0.05 < host["mean_gb"] <= host["peak_gb"]  # a process with torch has more than 50 MB
        assert row[table.columns.index("RAM, mean GB")] == round(host["mean_gb"], 3)
    assert [figure.name for figure in result.figures] == ["time", "host-memory"]
    assert (tmp_path / "cost" / "host-memory.png").exists()
    assert result.verdicts[1].verdict in ("confirmed", "contradicted")


@pytest.mark.slow
def test_main_memory_is_of_the_process_that_trains():
    ballast = torch.ones(200_000_000)  # 0.8 GB in this process
    host = host_memory("stanhop", "vanilla", Settings(quick=True), 2)
    assert resident_gb() - host["mean_gb"] > 0.3
    del ballast


def test_a_cost_without_main_memory_is_kept(tmp_path):
    seconds = {"vanilla": [1.0, 1.0], "outeffhop": [1.0, 1.1]}
    kept = {"seconds": seconds, "memory_gb": {"vanilla": 1.0, "outeffhop": 1.0}, "batch": 4, "precision": "bf16"}
    result = find("cost").conclude({"opt": {**kept, "threads": 1}}, Settings(out=tmp_path), tmp_path)
    assert result.tables[0].rows[0][6:8] == [None, None]
    assert [figure.name for figure in result.figures] == ["time"]
    assert result.verdicts[1].verdict == "not measured"


@pytest.mark.parametrize(("new", "word"), [(1.05, "confirmed"), (1.3, "contradicted")])
def test_the_verdict_on_main_memory(new, word):
    host = {"vanilla": {"mean_gb": 2.0, "peak_gb": 2.0}, "outeffhop": {"mean_gb": 2.0 * new, "peak_gb": 9.0}}
    assert memory_verdict({"opt": {"host": host}}).verdict == word


def test_a_cost_is_of_its_device(tmp_path):
    cells = {device: find("cost").cells(Settings(out=tmp_path, device=device)) for device in ("cpu", "cuda")}
    assert all(cpu.values != gpu.values for cpu, gpu in zip(*cells.values(), strict=True))


# made-up numbers


def of_opt(kurtosis=10.0, perplexity=5.0, w8a8=(5.1, 5.2, 5.3), **others):
    """What a cell of Table 1, OPT, finds."""
    values = {"kurtosis": kurtosis, "inf_norm": 2 * kurtosis, "metrics": {"perplexity": perplexity}}
    values |= {"w8a8": {"perplexity": list(w8a8)}, "parameters": 1000, "steps": 4, "data": "text", "lr": 1e-3}
    return {**values, "batch": 8, "precision": "fp32", **others}


def concluded(found, tmp_path, name="table1", seeds=3):
    return find(name).conclude(found, dataclasses.replace(quick(tmp_path), seeds=seeds), tmp_path)


def test_table1_is_drawn_where_numbers_are_not_finite(tmp_path):
    broken = of_opt(math.nan, w8a8=[math.inf] * 3)
    found = {
        "opt-vanilla-0": of_opt(),
        "opt-vanilla-1": broken,
        "opt-outeffhop-0": of_opt(),
        "opt-outeffhop-1": of_opt(),
    }
    result = concluded(found, tmp_path)
    vanilla = next(row for row in result.tables[1].rows if row[0] == "vanilla")
    assert vanilla[1:5] == ["nan", "nan", "5 ± 0", "inf"]
    assert (tmp_path / "methods.png").is_file()


def test_conditions_are_of_every_cell(tmp_path):
    found = {"opt-vanilla-0": of_opt(), "opt-outeffhop-0": of_opt(precision="bf16")}
    said = "text: batches of 8, lr 0.001, fp32; text: batches of 8, lr 0.001, bf16"
    assert concluded(found, tmp_path).conditions["OPT"].startswith(said)
    rounded = {f"W{n}A8{f}": [5.5] for n in (8, 4) for f in ("", ", folded")}
    found = {f"vanilla-{i}": of_opt(rounded=rounded) for i in range(2)}
    assert concluded(found, tmp_path, "beyond").conditions["seeds"] == 2
    found["outeffhop-0"] = of_opt(rounded=rounded, precision="bf16")
    conditions = concluded(found, tmp_path, "beyond").conditions
    assert conditions["seeds"] == "1 to 2"
    assert conditions["OPT"] == "text: 4 steps of 8, lr 0.001, fp32; text: 4 steps of 8, lr 0.001, bf16"
    curves = {"loss": [[1, 2.0]], "accuracy": [[1, 50.0]], "batch": 8, "lr": 1e-3, "precision": "fp32"}
    assert concluded({"vanilla-0": curves}, tmp_path, "convergence").conditions["seeds"] == 1
    metrics = {"mse": 0.5, "mae": 0.5}
    found = {f"synthetic-24-vanilla-{i}": of_opt(metrics=metrics, samples=64 + i) for i in range(2)}
    said = concluded(found, tmp_path, "table2").conditions
    assert (said["seeds"], said["learning rate"], said["batch"]) == (2, "0.001", "8")
    assert said["split"] == "test, 64, 65 windows evenly spread over it"


def candidates(**losses):
    """outeffhop, its folded form, and a new method, whose perplexity is theirs or given after its losses."""
    names = {"old": ("outeffhop", False), "folded": ("outeffhop", True), "new": ("outeffhop(qk_norm=rms)", False)}
    return [
        Candidate(*names[name], *(values if isinstance(values, tuple) else ([10.0, 10.0], values)))
        for name, values in losses.items()
    ]


def test_only_equal_perplexities_compete():
    found = candidates(old=[0.3, 0.5], folded=[0.1, 0.2], new=([10.21, 10.21], [0.0, 0.0]))
    assert [str(c) for c in at_equal_perplexity(found)] == ["outeffhop, folded", "outeffhop"]
    found = candidates(old=[math.inf, 0.5], new=([10.19, 10.2], [0.0, 0.0]))
    assert [str(c) for c in at_equal_perplexity(found)] == ["outeffhop(qk_norm=rms)"]
    assert at_equal_perplexity([]) == []


def test_no_verdict_while_rivals_are_missing():
    verdict = lower_verdict("W8A8", candidates(old=[0.5, 0.51], new=[0.1, 0.11]), ["gated-outeffhop"])
    assert verdict.verdict == "not measured"
    assert "gated-outeffhop" in verdict.numbers


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ([0.1, 0.11], "confirmed"),
        ([1.0, 1.01], "contradicted"),
        ([0.3, 0.6], "not seen"),
        (([20.0, 20.0], [0.1, 0.1]), "not measured"),
        (([5.0, 5.0], [0.1, 0.1]), "not measured"),
    ],
)
def test_lower_verdict_is_of_the_best_on_both_sides(new, said):
    verdict = lower_verdict("W8A8", candidates(old=[0.5, 0.51], new=new))
    assert verdict.verdict == said
    assert said == "not measured" or "outeffhop(qk_norm=rms) loses" in verdict.numbers


@pytest.mark.parametrize(
    ("folded", "said"),
    [
        ([0.1, 0.11], "confirmed"),
        ([1.0, 1.01], "contradicted"),
        ([0.3, 0.7], "not seen"),
        ([math.inf] * 2, "not measured"),
    ],
)
def test_fold_verdict_is_of_pairs(folded, said):
    assert fold_verdict("W4A8", candidates(old=[0.5, 0.51], folded=folded)).verdict == said
    assert fold_verdict("W4A8", candidates(old=[0.5, 0.51])).verdict == "not measured"


def made(**kurtosis):
    return {("a", 24, m.replace("_", "-")): {"kurtosis": v, "inf_norm": -v, "mse": 1.0} for m, v in kurtosis.items()}


def test_ranks_of_made_up_forecasts():
    means = made(vanilla=1.0, sparse=2.0, gsh=4.0, outeffhop=3.0)
    assert rank(means, "a", 24, "kurtosis") == 3
    assert rank(means, "a", 24, "inf_norm") == 2
    assert rank(means, "a", 24, "mse") == 1  # equal numbers share the best rank
    assert top_two(means) == (1, 2)
    means["a", 24, "outeffhop"]["mse"] = math.nan
    assert rank(means, "a", 24, "mse") is None  # and not the best, because nothing is below it
    del means["a", 24, "gsh"]
    assert rank(means, "a", 24, "kurtosis") is None
    assert top_two(means) == (0, 0)


def test_surplus_is_beyond_two_standard_errors():
    assert surplus([3.0, 5.0], [1.0, 1.0]) == 3.0  # the standard error is 1
    assert surplus([1.0, 1.0], [3.0, 5.0]) == -3.0
    assert surplus([3.0, 5.0], [2.0, 2.0]) == 0.0
    assert surplus([3.0], [2.5]) == 0.5


@pytest.mark.parametrize(
    ("good", "of", "said"),
    [(25, 30, "confirmed"), (24, 30, "not seen"), (15, 30, "contradicted"), (0, 0, "not measured")],
)
def test_top_two_verdict(good, of, said):
    assert top_two_verdict(good, of, seeds=2).verdict == said


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ([60, 61], ["confirmed", "confirmed"]),
        ([51.9, 52.1], ["confirmed", "not seen"]),
        ([40, 41], ["contradicted", "contradicted"]),
        ([60], ["not seen", "not seen"]),
    ],
)
def test_speed_is_compared_with_each_rival(own, said):
    found = speed_verdicts("cifar10", {"vanilla": [50, 51], "sparse": [52, 53], "outeffhop": own})
    assert [v.verdict for v in found] == said
    missing = speed_verdicts("cifar10", {"vanilla": [50, 51], "outeffhop": own})[1]
    assert missing.verdict == "not measured"


@pytest.mark.parametrize(("seconds", "said"), [([1.0, 1.05], "confirmed"), ([1.0, 2.0, 3.0], "contradicted")])
def test_time_verdict(seconds, said):
    assert time_verdict({"opt": {"vanilla": [1.0, 1.0], "outeffhop": seconds}}).verdict == said


def test_the_papers_numbers_agree_with_its_claims():
    assert published.top_two() == published.CLAIMED_TOP_TWO
    both = (
        [published.TABLE2["ETTh1", 24, m] for m in ("vanilla", "outeffhop")],
        [published.TABLE1["stanhop", m] for m in ("vanilla", "outeffhop")],
    )
    assert [(f.kurtosis, f.inf_norm) for f in both[0]] == [(o.kurtosis, o.inf_norm) for o in both[1]]


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_larger_scales_name_the_data_they_need(scale):
    settings = Settings(scale=scale)
    for name in ("table1", "table2", "training-outliers", "convergence", "beyond"):
        experiment = find(name)
        assert experiment.needs(settings)
        with pytest.raises(ValueError, match="--data FOLDER"):
            run(experiment, settings)
        assert all(cell.key for cell in experiment.cells(settings))
    assert not find("cost").needs(settings)


@pytest.mark.parametrize(
    ("name", "only", "needed"),
    [
        ("table1", "*", ["cifar10", "ett", "prose"]),
        ("table1", "stanhop-*", ["ett"]),
        ("training-outliers", "vit-vanilla-0", ["cifar10"]),
        ("table2", "*", ["ett", "wth"]),
        ("table2", "ETTh1-24-*", ["ett"]),
        ("table2", "WTH-*", ["wth"]),
        ("memory-capacity", "*", ["mnist", "cifar10"]),
        ("noise-robustness", "mnist-*", ["mnist"]),
    ],
)
def test_cells_asked_for_need_their_own_data_alone(name, only, needed):
    assert find(name).needs(Settings(scale="small", only=(only,))) == needed


def test_every_small_run_can_be_configured(tmp_path):
    settings = Settings(scale="small", out=tmp_path, data=tmp_path)
    for model in presets.MODELS:
        config = shared.run_config(settings, model, "gated-outeffhop", 1)
        assert config.preset == "small"
        assert config.train.seed == 1
        assert {name: getattr(config.train, name) for name in shared.SHORT["small"][model]} == shared.SHORT["small"][
            model
        ]
    assert len({c.key for c in find("table2").cells(settings)}) == 3 * 15 * 4


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_whole_tiny_table1(tmp_path):
    result = run(find("table1"), Settings(out=tmp_path, seeds=1))
    assert all(None not in row for table in result.tables for row in table.rows)
    assert all(v.verdict != "not measured" for v in result.verdicts)
    for key in ("opt-vanilla-0", "opt-outeffhop-0"):  # it has learned: uniform guesses have 1024
        assert cell(tmp_path, key)["metrics"]["perplexity"] < 100


@pytest.mark.parametrize(
    ("model", "method", "trained"),
    [
        ("bert", "clipped", "clipped"),  # γ = −0.025, which is the default
        ("bert", "gated-outeffhop", "gated-outeffhop(predictor=mlp)"),
        ("opt", "clipped", "clipped(alpha=12)"),
        ("opt", "gated", "gated"),
        ("opt", "outeffhop(sink=learned)", "outeffhop(sink=learned)"),
        ("vit", "clipped-outeffhop", "clipped-outeffhop(gamma=-1e-05)"),
        ("stanhop", "clipped", "clipped(gamma=-0.1, zeta=1.1)"),
    ],
)
def test_experiments_train_with_the_papers_parameters(model, method, trained, tmp_path):
    assert shared.run_config(quick(tmp_path), model, method, 0).method == trained
