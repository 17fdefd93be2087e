"""The examples run and leave the pictures they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["retrieve_digits", "energy_landscape"])
def test_figures(name, tmp_path):
    out = tmp_path / f"{name}.png"
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--out", str(out)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "OutEffHop" in printed
    assert list(tmp_path.iterdir()) == [out]


def test_demo(tmp_path):
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--quick", "--out", "shown"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    for words in ("OPT, trained here", "vanilla", "loss by W8A8", "Polynomial", "With figures: shown/report.html"):
        assert words in printed
    page = (tmp_path / "shown" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "these numbers mean nothing" in page
    assert [path.name for path in tmp_path.iterdir()] == ["shown"]
    # what is there is not done again
    assert (
        "training OPT" not in subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stderr
    )
