"""The wheel holds the package and nothing else, and works where nothing else is."""

import email
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import outeffhop

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """sdist and wheel, the wheel made from the sdist, as `python -m build` does."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_is_the_package(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = wheel.namelist()
    info = f"outeffhop-{outeffhop.__version__}.dist-info/"
    package = {name for name in names if not name.startswith(info)}
    source = ROOT / "src"
    wanted = {str(p.relative_to(source)) for p in source.rglob("*") if p.suffix in (".py", ".md", ".typed")}
    assert package == {name for name in wanted if name.startswith("outeffhop/")}
    assert f"{info}licenses/LICENSE" in names


def test_the_wheel_says_what_it_is(built):
    with zipfile.ZipFile(built[0]) as wheel:
        info = f"outeffhop-{outeffhop.__version__}.dist-info"
        about = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        scripts = wheel.read(f"{info}/entry_points.txt").decode()
    assert about["Name"] == "outeffhop"
    assert about["Version"] == outeffhop.__version__
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about["Description-Content-Type"] == "text/markdown"
    assert "# OutEffHop" in about.get_payload()
    needed = {line.split(">")[0] for line in about.get_all("Requires-Dist") if "extra ==" not in line}
    assert {"torch", "transformers", "safetensors", "entmax", "numpy"} <= needed
    assert not needed & {"accelerate", "datasets", "kornia", "matplotlib", "scikit-learn", "scipy", "openvino"}
    assert "outeffhop = outeffhop.cli.main:main" in scripts


def test_the_sdist_holds_no_results(built):
    with tarfile.open(built[1]) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames()]
    assert {"pyproject.toml", "constraints.txt", "LICENSE", "src/outeffhop/__init__.py", "Makefile"} <= set(names)
    folders = {"/".join(name.split("/")[1:-1]) for name in names}  # below the sdist's own
    assert not [f for f in folders if f.startswith(("results", "benchmarks/results"))]
    assert not [name for name in names if name.endswith((".whl", ".safetensors", ".npz"))]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # packages of a gigabyte are unpacked
def test_it_works_in_an_empty_environment(built, tmp_path):
    place = tmp_path / "empty"
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "COVERAGE_PROCESS_CONFIG")}
    (tmp_path / "elsewhere").mkdir()
    for command in (
        [*pip, "torch==2.13.0"],  # first and alone, as the Makefile does
        [*pip, "--constraint", str(ROOT / "constraints.txt"), str(built[0])],
        [python, str(Path(__file__).parent / "smoke.py")],
        [str(place / "bin" / "outeffhop"), "--help"],
        [*pip, "--constraint", str(ROOT / "constraints.txt"), f"{built[0]}[lab]"],
        [python, str(Path(__file__).parent / "smoke_lab.py")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "elsewhere", env=environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if command[-1].endswith(".py"):
            assert done.stdout.endswith("all is well\n")
