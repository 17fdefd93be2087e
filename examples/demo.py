"""What the package does, in half a minute on any machine.

Until training is part of it, the demo shows the idea, the backends found here, and what attention
with a no-op costs against vanilla attention.
"""

import subprocess
import sys
from pathlib import Path

import torch

import outeffhop
from outeffhop.cli.main import main as command


def main() -> None:
    print("1. A head that finds nothing of interest. All scores are -10:")
    nothing = torch.tensor([-10.0, -10.0, -10.0])
    print(f"   softmax  {[round(p, 5) for p in torch.softmax(nothing, -1).tolist()]}  attends all the same")
    print(f"   softmax1 {[round(p, 5) for p in outeffhop.softmax1(nothing).tolist()]}  attends to nothing")
    outlier = torch.tensor([100.0, -10.0, -10.0])
    print("   To attend to (almost) nothing, softmax must grow an outlier on a junk token, [100, -10, -10]:")
    print(f"   softmax  {[float(f'{p:.1g}') for p in torch.softmax(outlier.double(), -1).tolist()]}\n")

    print("2. What is installed here, and which backends serve attention:")
    command(["doctor"])

    print("\n3. What softmax1 costs here, as a ratio to vanilla attention in the same run")
    print("   (a short form of benchmarks/attention.py; small calls on a busy machine are noisy):", flush=True)
    benchmark = Path(__file__).parent.parent / "benchmarks" / "attention.py"
    subprocess.run([sys.executable, str(benchmark), "--quick", "--seconds", "0.5"], check=True)

    print("\nNext: docs/quickstart.md trains a small model, measures its outliers and quantizes it.")


if __name__ == "__main__":
    main()
