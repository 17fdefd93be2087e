"""What an installed package must do, in an environment that has nothing but it. Run by test_wheel.py."""

import sys
from importlib.resources import files
from pathlib import Path

import torch

import outeffhop
from outeffhop.cli.main import main

installed = Path(outeffhop.__file__).resolve()
assert installed.is_relative_to(Path(sys.prefix).resolve()), f"imported from {installed}"
assert files("outeffhop").joinpath("py.typed").is_file()

query = torch.randn(2, 4, 33, 16, requires_grad=True)
out = outeffhop.attention(query, query, query, is_causal=True)
out.sum().backward()
exact = outeffhop.attention(query, query, query, is_causal=True, backend="eager")
assert torch.allclose(out, exact, atol=1e-5)
assert torch.isfinite(query.grad).all()

for command in (
    ["doctor"],
    ["methods"],
    [
        *("train", "--model", "opt", "--data", "builtin:text", "--out", "run", "--samples.length", "32"),
        *("--train.max-steps", "2", "--train.eval-batches", "1", "--samples.cache-dir", "tokens"),
    ],
    ["quantize", "run", "--out", "run", "--batches", "1", "--calibration-batches", "1", "--seeds", "1"],
):
    assert main(command) == 0, command
assert "Simulated `W8A8 paper`" in Path("run/model/README.md").read_text()
print("all is well")
