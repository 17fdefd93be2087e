"""The mathematical part of the package imports PyTorch and little else: no compiler, no transformers, no plots."""

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "transformers", "scipy", "sklearn", "matplotlib")


@pytest.mark.parametrize("name", ["functional", "methods", "ops", "state", "nn", "memory"])
def test_importing_loads_nothing_heavy(name):
    code = f"import sys, outeffhop.{name}; print([m for m in {HEAVY} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
