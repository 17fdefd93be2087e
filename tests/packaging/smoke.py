"""What the base install must do, in an environment that has nothing else. Run by test_wheel.py."""

import contextlib
import io
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import torch

import outeffhop
from outeffhop.cli.main import main

installed = Path(outeffhop.__file__).resolve()
assert installed.is_relative_to(Path(sys.prefix).resolve()), f"imported from {installed}"
assert files("outeffhop").joinpath("py.typed").is_file()
for package in ("sklearn", "matplotlib", "datasets", "kornia", "scipy", "accelerate"):
    assert find_spec(package) is None, f"{package} came with the base install"

query = torch.randn(2, 4, 33, 16, requires_grad=True)
out = outeffhop.attention(query, query, query, is_causal=True)
out.sum().backward()
exact = outeffhop.attention(query, query, query, is_causal=True, backend="eager")
assert torch.allclose(out, exact, atol=1e-5)
assert torch.isfinite(query.grad).all()

from transformers import AutoModelForMaskedLM, BertConfig  # noqa: E402

config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=30)
model = AutoModelForMaskedLM.from_config(config, attn_implementation="outeffhop").eval()
batches = [{"input_ids": torch.randint(30, (2, 8)), "labels": torch.randint(30, (2, 8))} for _ in range(2)]
assert outeffhop.outliers.measure(model, batches).samples == 4
outeffhop.convert(model, "gated-outeffhop").save_pretrained("model")
assert outeffhop.model_summary(AutoModelForMaskedLM.from_pretrained("model")).method == "gated-outeffhop"
assert outeffhop.quantization.evaluate(model, lambda seed: batches, batches, seeds=1).quantized
assert outeffhop.nn.OutEffHop(16, 2)(torch.randn(2, 5, 16))[0].shape == (2, 5, 16)
assert outeffhop.HopfieldMemory(torch.randn(5, 8)).retrieve(torch.randn(3, 8)).state.shape == (3, 8)

for command in (["doctor"], ["methods"], ["presets"], ["train", "--help"]):
    with contextlib.suppress(SystemExit):
        assert main(command) == 0, command
said = io.StringIO()
with contextlib.redirect_stderr(said):
    assert main(["train", "--model", "opt", "--data", "builtin:text", "--out", "run"]) == 2
assert "pip install 'outeffhop[lab]'" in said.getvalue(), said.getvalue()
print("all is well")
