"""kill −9 while results are written: a file is whole, or the one that was there before, or not there at all.

Training, tokenising and measuring are killed in tests/lab/training/test_resume.py,
tests/lab/data/test_data_tokens.py and tests/lab/paper/test_framework.py.
"""

import json

import pytest
import torch
from PIL import Image

from outeffhop.models import presets
from outeffhop.outliers import OutlierReport
from outeffhop.quantization import QuantizationReport

KILLED = -9
SIZES = dict(e_layers=1, d_model=16, d_ff=32, num_heads=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checkpoint")
    presets.build("stanhop", "tiny", "outeffhop", num_series=7, **SIZES).save_pretrained(folder)
    return folder


def quantize(checkpoint, out):
    cut = ["--seeds", 1, "--batches", 1, "--calibration-batches", 1, "--batch-size", 4]
    return ["command", "quantize", checkpoint, "--data", "builtin:series", "--device", "cpu", "--out", out, *cut]


def outliers(checkpoint, out):
    cut = ["--batches", 1, "--batch-size", 4]
    return ["command", "outliers", checkpoint, "--data", "builtin:series", "--device", "cpu", "--out", out, *cut]


def reproduce(out):
    return ["command", "reproduce", "energy", "--quick", "--device", "cpu", "--out", out]


@pytest.mark.parametrize(("moment", "earlier"), [("half", None), ("rename", "mine"), ("renamed", "mine")])
def test_quantize(moment, earlier, checkpoint, server, tmp_path):
    file = tmp_path / "out" / "quantization.json"
    if earlier is not None:
        file.parent.mkdir()
        file.write_text(earlier)
    codes, said = server.run(["trap", moment, 1], quantize(checkpoint, file.parent))
    assert codes == [KILLED], said
    if moment == "renamed":
        assert QuantizationReport.load(file).task == "forecasting"
    else:
        assert (file.read_text() if file.exists() else None) == earlier
        assert [p.suffix for p in file.parent.iterdir() if p != file] == [".tmp"]  # the trap was in the right place
    if moment == "half":
        assert server.run(quantize(checkpoint, file.parent))[0] == [0]
        assert QuantizationReport.load(file).task == "forecasting"


def test_the_page_of_outliers(checkpoint, server, tmp_path):
    """Two files, of which the page comes second: the old page stays, and the numbers are new and whole."""
    assert server.run(outliers(checkpoint, tmp_path))[0] == [0]
    page = (tmp_path / "outliers.html").read_bytes()
    assert page.endswith(b"</html>\n")
    (tmp_path / "outliers.json").write_text("old")
    assert server.run(["trap", "half", 1], outliers(checkpoint, tmp_path))[0] == [KILLED]
    assert (tmp_path / "outliers.json").read_text() == "old"
    codes, said = server.run(["trap", "half", 2], outliers(checkpoint, tmp_path))
    assert codes == [KILLED], said
    assert (tmp_path / "outliers.html").read_bytes() == page
    assert OutlierReport.load(tmp_path / "outliers.json").samples == 4


def check_whole(out):
    """Every file that can be seen: JSON that parses, figures that load, a page that ends."""
    for path in out.rglob("*"):
        if not path.is_file() or path.name.startswith(".") or path.suffix == ".lock":
            continue
        if path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".png":
            Image.open(path).load()
        else:
            assert path.read_text().endswith("</html>\n")


def test_the_report_of_experiments(server, tmp_path):
    """Killed in a cell, in a figure, in the result, one after the other; then it ends as any other, also its page."""
    assert server.run(reproduce(tmp_path / "whole"))[0] == [0]
    out, seen = tmp_path / "killed", set()
    # counts are of each attempt: a cell that is there is not written again
    for moment, count, begun in (
        ("half", 5, ".energy.json.*.tmp"),
        ("rename", 11, "energy/.energy.png.*.tmp"),
        ("half", 3, ".energy.json.*.tmp"),
    ):
        codes, said = server.run(["trap", moment, count], reproduce(out))
        assert codes == [KILLED], said
        check_whole(out)
        new = {*out.glob(begun)} - seen
        assert len(new) == 1  # the trap was in the right place
        seen |= new
        assert json.loads((out / "energy.json").read_text())["result"] is None
        assert not (out / "report.html").exists()
    assert server.run(reproduce(out))[0] == [0]
    check_whole(out)
    for path in (tmp_path / "whole").rglob("*"):
        assert path.is_dir() or path.read_bytes() == (out / path.relative_to(tmp_path / "whole")).read_bytes()
    page = (out / "report.html").read_bytes()
    assert server.run(["trap", "half", 4], reproduce(out))[0] == [KILLED]
    assert (out / "report.html").read_bytes() == page
