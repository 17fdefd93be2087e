"""Without the extra ``lab``: the library works, and what needs the extra names it."""

import subprocess
import sys

import pytest

LAB = ("accelerate", "datasets", "kornia", "matplotlib", "PIL", "scipy", "sklearn")
WITHOUT = f"""
import importlib.util, sys, warnings
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {LAB}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
find = importlib.util.find_spec  # how transformers asks what is installed
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in {LAB} else find(name, package)
import outeffhop, torch
from outeffhop.cli.main import main
"""


def run(code, folder):
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, cwd=folder)
    return done.returncode, done.stdout, done.stderr


def test_the_library_works(tmp_path):
    code = """
from transformers import AutoModelForMaskedLM, BertConfig
config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
model = AutoModelForMaskedLM.from_config(config, attn_implementation="outeffhop").eval()
batches = [{"input_ids": torch.randint(30, (2, 8)), "labels": torch.randint(30, (2, 8))} for _ in range(2)]
assert outeffhop.outliers.measure(model, batches).samples == 4
assert outeffhop.quantization.evaluate(model, lambda seed: batches, batches, seeds=1).quantized
outeffhop.convert(model, "gated-outeffhop").save_pretrained("model")
assert outeffhop.model_summary(AutoModelForMaskedLM.from_pretrained("model")).method == "gated-outeffhop"
assert outeffhop.HopfieldMemory(torch.randn(5, 8)).retrieve(torch.randn(3, 8)).state.shape == (3, 8)
assert outeffhop.memory.theory.separation(torch.randn(5, 8)).shape == (5,)
for command in (["methods"], ["presets"], ["doctor"]):
    assert main(command) == 0
"""
    status, _, err = run(code, tmp_path)
    assert status == 0, err


@pytest.mark.parametrize(
    ("command", "package"),
    [
        pytest.param(["train", "--data", "builtin:text", "--out", "run"], "accelerate", marks=pytest.mark.slow),
        pytest.param(["data", "builtin:images"], "scikit-learn", marks=pytest.mark.slow),
        (["reproduce", "energy", "--quick", "--out", "results"], "matplotlib"),
    ],
)
def test_a_missing_extra_is_named(command, package, tmp_path):
    code, out, err = run(f"sys.exit(main({command}))", tmp_path)
    assert (code, out) == (2, "")
    assert f"needs {package}: pip install 'outeffhop[lab]'" in err.splitlines()[-1]
    assert "Traceback" not in err
