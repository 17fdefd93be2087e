"""What the install with the extra ``lab`` must do besides. Run by test_wheel.py."""

from pathlib import Path

from outeffhop.cli.main import main

for command in (
    [
        *("train", "--model", "opt", "--data", "builtin:text", "--out", "run", "--samples.length", "32"),
        *("--train.max-steps", "2", "--train.eval-batches", "1", "--samples.cache-dir", "tokens"),
    ],
    ["quantize", "run", "--out", "run", "--batches", "1", "--calibration-batches", "1", "--seeds", "1"],
    ["outliers", "run", "--out", "report", "--batches", "1"],
    ["reproduce", "energy", "--quick", "--out", "results"],
):
    assert main(command) == 0, command
assert "Simulated `W8A8 paper`" in Path("run/model/README.md").read_text()
print("all is well")
