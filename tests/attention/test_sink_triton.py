"""The Triton kernel: its numbers by Triton's interpreter, which needs no GPU, and its safety where warps race."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import outeffhop as oh
from tests.attention.reference import DEVICES

BY_HAND = """
import math, torch
from outeffhop.attention import sink, sink_triton

torch.manual_seed(0)
for shape, padded in (((2, 3, 5, 7), 5), ((1, 2, 33, 64), 64), ((2, 2, 40, 128), 40)):
    heads, length = shape[1:3]
    for s in (0.0, -1.5, torch.randn(heads)):
        out, lse = torch.randn(shape), 3 * torch.randn(*shape[:2], padded)
        lse[0, 0, 0] = -math.inf
        given = lse.clone()
        wanted_out, wanted_lse = sink.apply_sink(out.double(), lse.double(), s)
        got_out, got_lse = sink_triton.apply_sink(out.clone(), lse, s)
        torch.testing.assert_close(got_out.double(), wanted_out, atol=2e-6, rtol=0)
        torch.testing.assert_close(got_lse.double(), wanted_lse, atol=1e-6, rtol=0)
        assert torch.equal(lse, given), "written while others may still read it"
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: CPU builds of PyTorch have none")
def test_kernel_by_interpreter():
    done = subprocess.run(
        [sys.executable, "-c", BY_HAND], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_busy_gpu_changes_nothing(dtype):
    """Warps are held up at any point: every row must come out as on an idle GPU."""
    random = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(8, 8, 512, 64, device="cuda", dtype=dtype, generator=random) for _ in range(3))
    alone = oh.attention(q, k, v, sink=0.0, is_causal=True)
    load = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(beside):
            for _ in range(4):
                load = (load @ load).clamp(-1, 1)
        assert torch.equal(oh.attention(q, k, v, sink=0.0, is_causal=True), alone)
