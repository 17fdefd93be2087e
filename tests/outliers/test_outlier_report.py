"""Reports: to JSON and back, where a tensor stands, comparisons; and ranks that agree with one process."""

import json
import math
from dataclasses import replace

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from outeffhop import outliers
from outeffhop.outliers import OutlierReport
from outeffhop.outliers.outlier_report import TensorStats


def bert():
    torch.manual_seed(0)
    config, auto = tiny.MODELS["bert"]
    return auto.from_config(config()).eval()


def report_of(broken=False):
    model = bert()
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight *= 100
        if broken:
            model.bert.encoder.layer[1].output.dense.bias[2] = math.inf
    return outliers.measure(model, [tiny.inputs("bert", 4)])


def test_to_json_and_back(tmp_path):
    report = report_of()
    assert OutlierReport.from_json(report.to_json()) == report
    report.save(tmp_path / "new" / "outliers.json")
    assert OutlierReport.load(tmp_path / "new" / "outliers.json") == report
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["outliers.json"]


def test_json_stays_json_when_numbers_are_not_finite():
    report = report_of(broken=True)

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    content = json.loads(report.to_json(), parse_constant=refuse)
    assert content["summary"]["max_inf_norm"] in ("nan", "inf")
    again = OutlierReport.from_json(report.to_json())
    assert again.non_finite == report.non_finite != {}
    assert again.to_json() == report.to_json()
    assert not math.isfinite(again.max_inf_norm)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 7}'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError, match="not a valid OutlierReport"):
        OutlierReport.from_json(text)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "outliers.json"
    path.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        report_of().save(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("bert.encoder.layer.3.output.dense", ("bert.encoder.layer", 3, "output.dense")),
        ("layer.10.output.LayerNorm:input", ("layer", 10, "output.LayerNorm:input")),
        ("model.layers.0", ("model.layers", 0, "")),
        ("decoder.2.sthm.time_mlp.0", ("decoder", 2, "sthm.time_mlp.0")),
        ("0", ("", 0, "")),
        ("model.decoder.final_layer_norm", ("", None, "model.decoder.final_layer_norm")),
        ("transformer.h2o.fc2", ("", None, "transformer.h2o.fc2")),
    ],
)
def test_place(name, place):
    assert replace(report_of_one(), name=name).place == place


def report_of_one():
    return TensorStats("x", 1, 1, 1, 1.0, 1.0, 1.0, 3.0, 3.0, 0, 1, 0, (), (), True)


def test_table_and_comparison():
    report = report_of()
    rows = report.table(2)
    assert len(rows) == 2
    assert rows[0]["inf_norm"] >= rows[1]["inf_norm"]
    calm = outliers.measure(bert(), [tiny.inputs("bert", 4)])
    first, second = outliers.compare({"wild": report, "calm": calm})
    assert (first["name"], second["name"]) == ("wild", "calm")
    assert first["max_inf_norm_ratio"] == 1.0
    assert second["max_inf_norm_ratio"] == calm.max_inf_norm / report.max_inf_norm < 0.5
    assert json.loads(json.dumps([first, second])) == [first, second]
    with pytest.raises(ValueError, match="reports is empty"):
        outliers.compare({})


# samples of each rank; one may have none
SHARES = [(2, 3), (0, 5)]


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        inputs = tiny.inputs("bert", 5)["input_ids"]
        for shares in SHARES:
            mine = inputs.split(shares)[rank]
            report = outliers.measure(bert().double(), [{"input_ids": row[None]} for row in mine])
            report.save(f"{folder}/{shares[0]}-{rank}.json")
        with pytest.raises((ValueError, IndexError), match="rank 1: IndexError" if rank == 0 else "index out of range"):
            outliers.measure(bert(), [{"input_ids": inputs + 10_000 * rank}])
    finally:
        dist.destroy_process_group()


def test_ranks_agree_with_one_process(tmp_path):
    mp.spawn(work, (str(tmp_path),), nprocs=2)
    inputs = tiny.inputs("bert", 5)["input_ids"]
    alone = outliers.measure(bert().double(), [{"input_ids": row[None]} for row in inputs])
    for shares in SHARES:
        found = [OutlierReport.load(tmp_path / f"{shares[0]}-{rank}.json") for rank in (0, 1)]
        assert found[0] == found[1]
        assert found[0].samples == 5
        for x, y in zip(found[0].tensors, alone.tensors, strict=True):
            assert (x.positions, x.channels, x.outliers) == (y.positions, y.channels, y.outliers)
            assert (x.inf_norm, x.kurtosis) == pytest.approx((y.inf_norm, y.kurtosis), rel=1e-13)
        for x, y in zip(found[0].attention, alone.attention, strict=True):
            assert x.first_token == pytest.approx(y.first_token, rel=1e-13)
