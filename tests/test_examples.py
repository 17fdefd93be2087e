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
    command = [sys.executable, str(EXAMPLES / "demo.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    for words in ("attends to nothing", "chosen", "ours (", "docs/quickstart.md"):
        assert words in printed
    assert not list(tmp_path.iterdir())
