"""Results read back from damaged files: what was written, or a ValueError that names the file."""

import json
import math

import pytest
from fuzzing import bytes_like, cases, command, one_line, outcome, refused
from hypothesis import given
from hypothesis import strategies as st

from outeffhop.lab.paper import result_file
from outeffhop.lab.paper.experiment import Cell, Experiment, Figure, Result, Settings, Table, Verdict
from outeffhop.lab.paper.result_file import KeptCell, ResultFile
from outeffhop.lab.paper.running import run
from outeffhop.lab.report.experiments_page import write_report
from outeffhop.lab.report.outliers_page import outlier_page
from outeffhop.lab.training import RunConfig, RunFolder
from outeffhop.lab.training.run import Result as RunResult
from outeffhop.outliers import OutlierReport
from outeffhop.outliers.outlier_report import Channel, HeadStats, Position, TensorStats
from outeffhop.quantization import QuantizationReport
from outeffhop.quantization.int8_graph import Operation
from outeffhop.quantization.int8_report import RUNS, Int8Report
from outeffhop.quantization.quantization_report import TensorError

TENSOR = TensorStats(
    "bert.encoder.layer.0.output",
    2,
    8,
    4,
    1.5,
    2.0,
    1.1,
    3.0,
    None,
    1,
    64,
    1,
    (Position(math.nan, 0, 1, 2),),
    (Channel(2, 1, 2.0),),
    True,
)
OUTLIERS = OutlierReport(
    "BertForMaskedLM",
    "outeffhop",
    2,
    ("a", "b"),
    (0, 2),
    (TENSOR,),
    (HeadStats("bert.encoder.layer.0.attention", 8, (0.5, 0.25), None, (0.1, 0.2), (0.9, 0.8)),),
)
QUANTIZED = QuantizationReport(
    "OPTForCausalLM",
    "vanilla",
    "W8A8 paper",
    "paper",
    "clm",
    (0, 1),
    2,
    3,
    {"perplexity": 10.0},
    {"perplexity": (11.0, math.inf)},
    (TensorError("fc2", "output", 10.0, 12.0, None, None, 1.0, 9.0),),
    {"head": "last"},
)
INT8 = Int8Report(
    "BertModel",
    "vanilla",
    "all",
    2,
    "a cpu",
    2,
    {"openvino": "1"},
    {run: {"loss": 1.0} for run in RUNS},
    dict.fromkeys(RUNS, 30.0),
    {"input_ids": (2, 8)},
    dict.fromkeys(RUNS, 1.0),
    {"int8": 100, "fp32": 400},
    (Operation("MatMul", "q", ("i8",), "f32", "int8"),),
)
EXPERIMENT = ResultFile(
    "tiny",
    result=Result(
        "demo",
        "Figure 1",
        "One sentence.",
        [Table("t", ["a", "b"], [["x", 1.0], ["y", None]], {"b": "low"}, "a")],
        [Figure("picture", "Title", "Caption")],
        [Verdict("a claim", "confirmed", "1 < 2")],
        {"seeds": 3},
        ["one"],
    ),
    cells={"one": KeptCell({"seed": 0}, {"date": "2001-02-03"}, {"loss": math.inf})},
)
RUN = RunResult(5, {"loss": 1.0}, 2.0, math.nan, False)


def used(kind, report):
    """Whatever else the package does with a report of this kind."""
    if kind is OutlierReport:
        return report.summary, report.table(), outlier_page(report)
    return str(report)


REPORTS = {
    "outliers": (OutlierReport, OUTLIERS, OUTLIERS.to_json()),
    "quantization": (QuantizationReport, QUANTIZED, QUANTIZED.to_json()),
    "int8": (Int8Report, INT8, INT8.to_json()),
    "experiment": (ResultFile, EXPERIMENT, EXPERIMENT.to_json()),
}


@pytest.mark.parametrize("name", REPORTS)
@cases(20)
@given(data=st.data())
def test_a_damaged_report(name, tmp_path, data):
    kind, _, text = REPORTS[name]
    file = tmp_path / f"{name}.json"
    file.write_bytes(data.draw(bytes_like(text.encode()), label="damaged"))
    found = outcome(lambda: kind.load(file), str(file))
    if not refused(found):
        outcome(lambda: used(kind, found) if kind is not Int8Report else found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just("nan"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def replaced(value, data):
    """The same JSON with one part of it exchanged for another, or taken away."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value)))
        if not data.draw(st.integers(0, 5)):
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: replaced(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.integers(0, 3)):
        at = data.draw(st.integers(0, len(value) - 1))
        return [*value[:at], replaced(value[at], data), *value[at + 1 :]]
    return data.draw(JSON)


@pytest.mark.parametrize("name", REPORTS)
@cases(30)
@given(data=st.data())
def test_a_report_with_something_else_in_it(name, tmp_path, data):
    kind, _, text = REPORTS[name]
    file = tmp_path / f"{name}.json"
    content = replaced(json.loads(text), data)
    if kind is ResultFile and isinstance(content, dict):  # or nothing that differs would be read
        content["sha256"] = result_file._digest({k: v for k, v in content.items() if k != "sha256"})
    file.write_text(json.dumps(content))
    found = outcome(lambda: kind.load(file), str(file))
    if not refused(found):
        assert isinstance(found, kind)
        if kind is not Int8Report:  # its __str__ looks up runs by name
            used(kind, found)
        if kind is ResultFile and found.result is not None:
            (tmp_path / "out").mkdir(exist_ok=True)
            (tmp_path / "out" / "demo.json").write_text(found.to_json())
            write_report(tmp_path / "out")


@pytest.mark.parametrize("name", REPORTS)
def test_whole_reports_come_back(name, tmp_path):
    kind, report, text = REPORTS[name]
    file = tmp_path / "report.json"
    file.write_text(text)
    again = kind.load(file)
    assert again.to_json() == text
    assert str(again)[:40] == str(report)[:40]


LINES = [
    {"step": i, "loss": 2.0 / i, "eval_loss": 1.0, "eval_perplexity": 3.0, "max_inf_norm": "nan"} for i in range(1, 5)
]


@pytest.fixture
def runs(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.create(RunConfig(data="builtin:text"))
    for line in LINES:
        folder.append(line)
    folder.write_json("result.json", {**RUN.__dict__})
    QUANTIZED.save(folder.path / "quantization.json")
    return folder


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "quantization.json", "config.yaml"])
@cases(5)
@given(data=st.data())
def test_a_damaged_run_among_runs(runs, name, data):
    file = runs.path / name
    whole = (runs.path / f"{name}.whole") if (runs.path / f"{name}.whole").exists() else None
    content = file.read_bytes() if whole is None else whole.read_bytes()
    (runs.path / f"{name}.whole").write_bytes(content)
    parts = [bytes_like(content)]
    if name != "config.yaml":
        parts.append(JSON.map(lambda v: json.dumps(v).encode() + b"\n"))
    file.write_bytes(data.draw(st.one_of(parts), label="damaged"))
    code, out, err = command("runs", runs.path.parent)
    assert code == 0  # one damaged run does not hide the others
    assert "unreadable" in out or not err
    if err:
        one_line(err, name)
    assert command("runs", runs.path.parent, "--json")[0] == 0


@cases(30)
@given(st.data())
def test_damaged_metrics_lose_no_line_in_silence(tmp_path, data):
    folder = RunFolder(tmp_path)
    content = "".join(json.dumps(line) + "\n" for line in LINES).encode()
    folder.metrics_file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    found = folder.metrics()
    assert found == LINES[: len(found)]  # a kill cuts the last line at most
    assert len(found) >= folder.metrics_file.read_bytes().count(b"\n")
    at = data.draw(st.integers(0, len(content) - 1))
    folder.metrics_file.write_bytes(content[:at] + b"\x00" + content[at + 1 :])
    found = outcome(folder.metrics, "metrics.jsonl")
    assert refused(found) or len(found) >= 3


def _cells(settings):
    return [Cell("one", {"x": 1})]


def _measure(cell, settings):
    return {"value": 0.25, "spread": math.nan, "list": [1, 2]}


def _conclude(found, settings, folder):
    return Result(
        "energy",
        "Figure 1",
        "About.",
        conditions={"value": found["one"]["value"], "spread": found["one"]["spread"] + 1},
    )


@cases(20)
@given(st.data())
def test_damaged_cells_are_refused_or_measured_again(tmp_path, data):
    experiment = Experiment("energy", "Figure 1", "About.", _cells, _measure, _conclude)
    settings = Settings(out=tmp_path)
    first = run(experiment, settings, lambda line: None)
    file = tmp_path / "energy.json"
    again = run(experiment, settings, lambda line: None)  # from the file: NaN is a number there as well
    assert repr(again.conditions) == repr(first.conditions)
    file.write_bytes(data.draw(bytes_like(file.read_bytes()) | JSON.map(lambda v: json.dumps(v).encode())))
    found = outcome(lambda: run(experiment, settings, lambda line: None), str(file))
    assert refused(found) or repr(found.conditions) == repr(first.conditions)
    file.unlink()


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("text", ["[" * 100_000, "9" * 5000, "[]", "3", '"x"', "null", "\xff"])
def test_json_that_is_no_report(name, text, tmp_path):
    file = tmp_path / "report.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"report\.json"):
        REPORTS[name][0].load(file)


def test_a_model_called_nan_keeps_its_name(tmp_path):
    file = tmp_path / "report.json"
    file.write_text(QUANTIZED.to_json().replace("OPTForCausalLM", "nan"))
    assert QuantizationReport.load(file).model == "nan"
    assert QuantizationReport.load(file).quantized["perplexity"] == (11.0, math.inf)
