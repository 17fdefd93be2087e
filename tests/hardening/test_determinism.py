"""The same seed gives the same numbers, byte for byte, in another process: on a CPU, with as many threads.

That a killed run ends with the numbers of one that was not is in tests/lab/training/test_resume.py; that worker
processes change nothing, in tests/lab/training/test_train.py and tests/lab/paper/test_framework.py.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from everything import DATA, everything, train_one


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    """The same, in this process and in one with another hash seed and another cache of tokens."""
    root = tmp_path_factory.mktemp("twice")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "PYTHONHASHSEED": "123",
        "OMP_NUM_THREADS": "1",
    }
    code = "import everything; everything.main()"
    other = subprocess.Popen(
        [sys.executable, "-c", code, root / "b"], env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    threads = torch.get_num_threads()
    try:
        everything(root / "a")
    finally:
        torch.set_num_threads(threads)
        said, _ = other.communicate()
    assert other.returncode == 0, said
    return root / "a", root / "b"


def content(path, root):
    """A file's, but for when and where it was made, and how fast."""
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [{k: v for k, v in line.items() if not k.endswith("_per_second")} for line in lines]
    if path.suffix in (".json", ".yaml", ".html", ".md"):
        text = path.read_text().replace(str(root.parent / f"{root.name}-cache"), "CACHE").replace(str(root), "ROOT")
        text = re.sub(r'"date": "[\d-]*"', '"date": ""', text)
        return "\n".join(line for line in text.splitlines() if not re.match(r' *"began"|\| started \|', line))
    return path.read_bytes()


def files(root):
    """All but manifests, which hash what is compared here."""
    found = [p for p in root.rglob("*") if p.is_file() and p.name not in ("manifest.json", "run.lock")]
    return {str(p.relative_to(root)): p for p in found}


def test_every_file_is_the_same(twice):
    first, second = twice
    ours, theirs = files(first), files(second)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if content(ours[name], first) != content(theirs[name], second)]
    assert different == []


@pytest.mark.parametrize(
    "name",
    [
        *(f"{model}/{file}" for model in DATA for file in ("model/model.safetensors", "metrics.jsonl", "result.json")),
        *(f"{model}/checkpoints/checkpoint-3/optimizer.safetensors" for model in DATA),
        "measured/quantization.json",
        "measured/outliers.json",
        "measured/outliers.html",
        "results/energy.json",
        "results/energy/energy.png",
        "results/report.html",
        "retrieved.json",
    ],
)
def test_what_is_compared_is_there(name, twice):
    assert content(files(twice[0])[name], twice[0])


def test_another_seed_gives_other_numbers(twice, tmp_path):
    """Or the comparison would prove nothing."""
    train_one("stanhop", tmp_path / "stanhop", tmp_path, seed=1)
    for name in ("model/model.safetensors", "metrics.jsonl", "result.json"):
        ours, theirs = twice[0] / "stanhop" / name, tmp_path / "stanhop" / name
        assert content(ours, twice[0]) != content(theirs, tmp_path)
