"""HopfieldMemory against plain float64 code written here, and the properties that make it a memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outeffhop.memory import HopfieldMemory, NoOp, hopfield_memory
from outeffhop.methods import Method
from outeffhop.ops import explain

MODELS = ("vanilla", "outeffhop", "outeffhop(n=6.5)", "sparse", "gsh", "gsh(alpha=1.2)", "gsh(alpha=3)", "polynomial")
FIVE = ("vanilla", "outeffhop", "sparse", "gsh", "polynomial")
CLIPPED = ("clipped", "clipped-outeffhop", "clipped(alpha=2)")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def entmax_reference(z: Tensor, alpha: float) -> Tensor:
    """Weights [((α − 1)z − τ)₊]^(1/(α − 1)), with τ by bisection until float64 can tell no more."""
    z = (alpha - 1) * z
    low, high = z.max() - 1, z.max().clone()
    for _ in range(200):
        tau = (low + high) / 2
        total = ((z - tau).clamp(min=0) ** (1 / (alpha - 1))).sum()
        low, high = (tau, high) if total >= 1 else (low, tau)
    return (z - low).clamp(min=0) ** (1 / (alpha - 1))


def tsallis(p: Tensor, alpha: float) -> Tensor:
    return (p - p**alpha).sum() / (alpha * (alpha - 1))


def reference(name: str, patterns: Tensor, x: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """T(x) and H(x) of one query [d], as the formulas are printed."""
    normalizer = Method.parse(name).normalizer
    z = beta * patterns @ x
    count, m = len(patterns), patterns.norm(dim=1).max()
    if name.startswith("polynomial"):
        power = z ** (normalizer.order - 1)
        overlap = ((patterns @ x) ** normalizer.order).sum() ** (1 / normalizer.order)
        return (power / power.abs().sum()) @ patterns, -torch.log(overlap / x.norm())
    if name.startswith(("sparse", "gsh")):
        alpha = normalizer.start
        p = entmax_reference(z, alpha)
        conjugate = p @ z + tsallis(p, alpha)
        if alpha == 2.0:  # the form Hu et al. print
            conjugate = 0.5 * z @ z - 0.5 * (p - z) @ (p - z) + 0.5
        at_zero = tsallis(torch.full_like(z, 1 / count), alpha)
    else:
        p = z.exp() / (normalizer.n + z.exp().sum())
        conjugate = torch.log(normalizer.n + z.exp().sum())
        at_zero = math.log(normalizer.n + count)
    return p @ patterns, -conjugate / beta + 0.5 * x @ x + at_zero / beta + 0.5 * m**2


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", MODELS)
def test_matches_the_formulas(name: str, beta: float) -> None:
    patterns, x = torch.randn(17, 5, dtype=torch.float64), torch.randn(3, 7, 5, dtype=torch.float64)
    memory = HopfieldMemory(patterns, beta, name)
    result, energy = memory.retrieve(x), memory.energy(x)
    for i in range(3):
        for j in range(7):
            state, value = reference(name, patterns, x[i, j], beta)
            torch.testing.assert_close(result.state[i, j], state, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(energy[i, j], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_steps_are_repeated_updates(name: str) -> None:
    memory = HopfieldMemory(torch.randn(9, 4, dtype=torch.float64), 2.0, name)
    x = torch.randn(5, 4, dtype=torch.float64)
    thrice = memory.retrieve(x, 3)
    one_by_one = memory.retrieve(memory.retrieve(memory.retrieve(x).state).state)
    assert torch.equal(thrice.state, one_by_one.state)
    assert torch.equal(thrice.no_op, one_by_one.no_op)
    assert thrice.steps.tolist() == [3] * 5
    torch.testing.assert_close(memory.association(x) @ memory.patterns, memory.retrieve(x).state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    patterns, x = torch.randn(33, 8).to(dtype), torch.randn(6, 8).to(dtype)
    result = HopfieldMemory(patterns, 0.7, name).retrieve(x, trace=name not in CLIPPED)
    exact = HopfieldMemory(patterns.double(), 0.7, name).retrieve(x.double(), trace=name not in CLIPPED)
    eps = torch.finfo(dtype).eps
    assert result.state.dtype == dtype
    torch.testing.assert_close(result.state.double(), exact.state, rtol=8 * eps, atol=8 * eps)
    if result.energy is not None and exact.energy is not None:
        assert result.energy.dtype == torch.float32
        torch.testing.assert_close(result.energy[0].double(), exact.energy[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_gpu_agrees_with_cpu(name: str, dtype: torch.dtype) -> None:
    memory = HopfieldMemory(
        torch.randn(300, 24).to(dtype), 0.4, name, NoOp.assign(300, [7, 11]) if "n=" not in name else None
    )
    x, trace = torch.randn(5, 13, 24).to(dtype), name not in CLIPPED
    here, rest = memory.retrieve(x, 2, trace=trace), memory.retrieve(x, None, tol=1e-2).steps
    there = memory.to("cuda").retrieve(x.cuda(), 2, trace=trace)
    tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(there.state.cpu(), here.state, **tolerance)
    torch.testing.assert_close(there.no_op.cpu(), here.no_op, **tolerance)
    if here.energy is not None and there.energy is not None:
        torch.testing.assert_close(there.energy.cpu(), here.energy, **tolerance)
    on_gpu = memory.retrieve(x.cuda().requires_grad_(), None, tol=1e-2)
    assert on_gpu.state.isfinite().all()
    if dtype == torch.float64:
        assert torch.equal(on_gpu.steps.cpu(), rest)


memories = {
    "seed": st.integers(0, 10_000),
    "size": st.integers(1, 20),
    "d": st.integers(1, 6),
    "beta": st.floats(-2, 2).map(lambda e: 10.0**e),
    "scale": st.floats(-1, 1).map(lambda e: 10.0**e),
}


@pytest.mark.parametrize("name", [*FIVE, "outeffhop(n=20)", "gsh(alpha=1.1)", "polynomial(order=4)"])
@settings(max_examples=30, deadline=None, derandomize=True)
@given(**memories)
def test_energy_never_increases(name: str, seed: int, size: int, d: int, beta: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    patterns = scale * torch.randn(size, d, dtype=torch.float64, generator=generator)
    x = 2 * scale * torch.randn(8, d, dtype=torch.float64, generator=generator)
    memory = HopfieldMemory(patterns, beta, name)
    energy = memory.retrieve(x, 12, trace=True).energy
    assert energy is not None
    assert energy.shape == (13, 8)
    # H is a difference of terms as large as ‖x‖² and m²: their rounding is all that is forgiven
    slack = 1e-12 * (1 + patterns.square().sum(1).max() + x.square().sum(1).max())
    assert (energy[1:] <= energy[:-1] + slack).all()
    if "polynomial" not in name:
        assert (energy >= -slack).all()  # what the constant is for


@settings(max_examples=30, deadline=None, derandomize=True)
@given(**memories)
def test_outeffhop_is_dense_times_gamma(seed: int, size: int, d: int, beta: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    patterns = scale * torch.randn(size, d, dtype=torch.float64, generator=generator)
    x = scale * torch.randn(8, d, dtype=torch.float64, generator=generator)
    out = HopfieldMemory(patterns, beta).retrieve(x)
    dense = HopfieldMemory(patterns, beta, "dense").retrieve(x)
    scores = beta * x @ patterns.T
    gamma = torch.sigmoid(torch.logsumexp(scores, -1))
    torch.testing.assert_close(1 - out.no_op, gamma, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.state, gamma[:, None] * dense.state, rtol=1e-9, atol=1e-12)
    assert (dense.no_op == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_scores_of_ten_thousand(name: str, sign: int, dtype: torch.dtype) -> None:
    patterns = torch.randn(12, 6).abs().to(dtype) + 1
    patterns = patterns * (100 / patterns.norm(dim=1, keepdim=True))
    x = (sign * patterns[:4]).clone().requires_grad_()
    memory = HopfieldMemory(patterns, 1.0, name)
    result = memory.retrieve(x, 3, trace=name not in CLIPPED)
    assert result.state.isfinite().all()
    grad = result.state.float().sum()
    if result.energy is not None:
        assert result.energy.isfinite().all()
        assert (result.energy[1:] <= result.energy[:-1] + 1e-3).all()
        grad = grad + result.energy.sum()
    assert torch.autograd.grad(grad, x)[0].isfinite().all()


@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_large_scores_keep_their_digits(name: str) -> None:
    patterns = 8192 + torch.arange(40).reshape(-1, 1) / 16  # the scores are these, exact in float32
    x = torch.ones(1)
    weights = HopfieldMemory(patterns, 1.0, name).association(x)
    exact = HopfieldMemory(patterns.double(), 1.0, name).association(x.double())
    torch.testing.assert_close(weights.double(), exact, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_gradient_in_the_query(name: str) -> None:
    patterns = torch.randn(7, 3, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    memory = HopfieldMemory(patterns, 1.5, name)
    assert torch.autograd.gradcheck(lambda q: memory.retrieve(q, 2).state, x)
    if name not in CLIPPED:
        assert torch.autograd.gradcheck(memory.energy, x)
        assert torch.autograd.gradcheck(lambda q: memory.retrieve(q, None, tol=1e-2, trace=True).energy, x)
    if name not in (*CLIPPED, "polynomial"):
        # T is the convex-concave procedure: ∇H(x) = x − T(x)
        (grad,) = torch.autograd.grad(memory.energy(x).sum(), x)
        torch.testing.assert_close(grad, (x - memory.retrieve(x).state).detach())


@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_a_query_does_not_see_the_others(name: str) -> None:
    memory = HopfieldMemory(torch.randn(23, 6, dtype=torch.float64), 1.1, name)
    x = torch.randn(4, 5, 6, dtype=torch.float64) * torch.logspace(-1, 1, 5, dtype=torch.float64)[:, None]
    trace = name not in CLIPPED
    together = memory.retrieve(x, None, tol=1e-2, trace=trace)
    assert len(together.steps.unique()) > 1, "all stop at once: this would test nothing"
    for i in range(4):
        for j in range(5):
            alone = memory.retrieve(x[i, j], None, tol=1e-2, trace=trace)
            assert alone.steps == together.steps[i, j]
            assert alone.converged == together.converged[i, j]
            torch.testing.assert_close(alone.state, together.state[i, j], rtol=1e-9, atol=1e-11)
            torch.testing.assert_close(alone.no_op, together.no_op[i, j], rtol=1e-9, atol=1e-12)
            if alone.energy is not None and together.energy is not None:
                padded = torch.cat([alone.energy, alone.energy[-1:].expand(len(together.energy) - len(alone.energy))])
                torch.testing.assert_close(padded, together.energy[:, i, j], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_converged_queries_rest(name: str) -> None:
    memory = HopfieldMemory(torch.randn(20, 5, dtype=torch.float64), 0.8, name)
    tol = 1e-6
    result = memory.retrieve(torch.randn(40, 5, dtype=torch.float64), None, tol=tol)
    assert result.converged.all()
    moved = (memory.retrieve(result.state).state - result.state).norm(dim=-1)
    assert (moved <= tol * result.state.norm(dim=-1).clamp(min=1)).all()
    # and the one step before was not at rest yet
    before = memory.retrieve(torch.zeros(1, 5, dtype=torch.float64) + 0.3, None, tol=tol)
    assert not memory.retrieve(torch.zeros(1, 5, dtype=torch.float64) + 0.3, int(before.steps) - 1, tol=tol).converged


def test_max_steps_and_queries_that_never_rest() -> None:
    memory = HopfieldMemory(torch.randn(20, 5), 0.5)
    x = torch.randn(6, 5)
    result = memory.retrieve(x, None, tol=0.0, max_steps=3)
    assert result.steps.tolist() == [3] * 6
    assert not result.converged.any()
    x[2] = math.nan
    result = memory.retrieve(x, None)
    assert result.converged.tolist() == [True, True, False, True, True, True]
    assert result.steps[2] == 1


def test_max_steps_alone_updates_until_at_rest() -> None:
    memory, x = HopfieldMemory(torch.randn(20, 5), 0.5), torch.randn(6, 5)
    result = memory.retrieve(x, tol=0.0, max_steps=5)
    assert result.steps.tolist() == [5] * 6
    assert torch.equal(result.state, memory.retrieve(x, 5).state)
    loose = memory.retrieve(x, tol=0.5, max_steps=50)
    assert loose.converged.all()
    assert torch.equal(loose.steps, memory.retrieve(x, None, tol=0.5).steps)
    with pytest.raises(ValueError, match=r"steps=2 and max_steps=5: give steps for exactly"):
        memory.retrieve(x, 2, max_steps=5)


def test_only_unfinished_queries_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = hopfield_memory.fused_update

    def counting(x: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        seen.append(len(x))
        return plain(x, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hopfield_memory, "fused_update", counting)
    memory = HopfieldMemory(torch.eye(8), 8.0)
    steps = memory.retrieve(torch.cat([torch.eye(8), torch.rand(8, 8)]), None).steps
    assert seen == [int((steps > done).sum()) for done in range(int(steps.max()))]
    assert seen[-1] < seen[0]


@pytest.mark.parametrize("name", [*MODELS, *CLIPPED])
def test_order_of_patterns_does_not_matter(name: str) -> None:
    patterns, x = torch.randn(30, 6, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
    shuffled = patterns[torch.randperm(30)]
    one, two = (HopfieldMemory(p, 1.2, name).retrieve(x, 4, trace=name not in CLIPPED) for p in (patterns, shuffled))
    torch.testing.assert_close(one.state, two.state, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(one.energy, two.energy, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["sparse", "gsh", "polynomial", "clipped-outeffhop"])
def test_blocks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HopfieldMemory(torch.randn(30, 6, dtype=torch.float64), 1.2, name)
    x = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    whole = memory.retrieve(x, 2)
    (whole_grad,) = torch.autograd.grad(whole.state.sum(), x)
    largest = 0
    weights = HopfieldMemory._weights

    def watched(self: HopfieldMemory, x: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal largest
        result = weights(self, x)
        largest = max(largest, result[1].numel())
        return result

    monkeypatch.setattr(hopfield_memory, "_BLOCK", 100)
    monkeypatch.setattr(HopfieldMemory, "_weights", watched)
    blocks = memory.retrieve(x, 2)
    assert largest <= 100
    torch.testing.assert_close(blocks.state, whole.state)
    torch.testing.assert_close(blocks.no_op, whole.no_op)
    torch.testing.assert_close(torch.autograd.grad(blocks.state.sum(), x)[0], whole_grad)


def test_memory_is_linear() -> None:
    patterns, x = torch.randn(200, 64), torch.randn(50, 64)
    chosen = explain(x, patterns, patterns, scale=1.0, sink=0.0, return_lse=True).chosen
    assert chosen not in ("eager", "padded")
    # 2,048 × 40,000 scores would take 328 MB; what retrieval adds at its peak is measured in a process of its own
    code = """
import resource, torch
from outeffhop.memory import HopfieldMemory
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
memory, x = HopfieldMemory(torch.randn(40_000, 16)), torch.randn(2048, 16)
memory.retrieve(x[:8], 2, trace=True)
before = peak()
memory.retrieve(x, 2, trace=True)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kilobytes = int(done.stdout) / (1024 if sys.platform == "darwin" else 1)
    assert kilobytes < 60_000


def test_add_and_remove() -> None:
    patterns, x = torch.randn(10, 4), torch.randn(3, 4)
    memory = HopfieldMemory(patterns[:6])
    assert memory.add(patterns[6:]) is memory
    assert len(memory) == 10
    assert torch.equal(memory.retrieve(x).state, HopfieldMemory(patterns).retrieve(x).state)
    assert memory.remove([0, -1, 3]) is memory
    left = patterns[[1, 2, 4, 5, 6, 7, 8]]
    assert torch.equal(memory.stored, left)
    assert torch.equal(memory.retrieve(x, trace=True).energy, HopfieldMemory(left).retrieve(x, trace=True).energy)
    assert len(memory.remove(2)) == 6
    assert len(memory.remove([])) == 6
    for wrong in ([6], [-7], list(range(6))):
        with pytest.raises(ValueError, match="indices"):
            memory.remove(wrong)
    with pytest.raises(TypeError, match=r"indices has dtype .*integers"):
        memory.remove(torch.tensor([0.0]))
    with pytest.raises(ValueError, match="size 3"):
        memory.add(torch.randn(2, 3))
    assert len(memory) == 6


def test_the_memory_keeps_its_own_copy() -> None:
    patterns = torch.randn(5, 3)
    memory = HopfieldMemory(patterns)
    patterns.zero_()
    assert (memory.patterns != 0).all()
    mask = torch.tensor([True, False, False, False, False])
    memory = HopfieldMemory(torch.randn(5, 3), no_op=NoOp(mask))
    mask[1] = True
    assert memory.indices.tolist() == [1, 2, 3, 4]
    assert len(memory.outliers) == 1


def test_to() -> None:
    memory = HopfieldMemory(torch.tensor([[1e30, 0.0], [0.0, 1.0]]), no_op=NoOp.assign(2, [1]))
    with pytest.raises(ValueError, match="infinity"):
        memory.to(torch.float16)
    assert memory.stored.dtype == torch.float32
    assert memory.to(torch.float64) is memory
    assert memory.patterns.dtype == torch.float64
    assert memory.to(device="cpu", dtype=torch.float32).patterns.dtype == torch.float32
    assert memory.to("cpu", torch.bfloat16).outliers.dtype == torch.bfloat16
    assert "2 patterns of size 2, 1 of them outliers; outeffhop, beta=1; bfloat16 on cpu" in repr(memory)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("no_op", [None, NoOp.assign(9, [1, 4]), NoOp.assign(9, [2], distinct=True)])
def test_save_and_load(no_op: NoOp | None, dtype: torch.dtype, tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "memory.safetensors")
    memory = HopfieldMemory(torch.randn(9, 4).to(dtype), 1 / 3, "gsh(alpha=1.3)", no_op)
    memory.save(path)
    back = HopfieldMemory.load(path)
    assert torch.equal(back.stored, memory.stored)
    assert back.stored.dtype == dtype
    assert (back.beta, back.method) == (memory.beta, memory.method)
    assert (back.no_op is None) == (no_op is None)
    if back.no_op is not None and no_op is not None:
        assert torch.equal(back.no_op.outliers, no_op.outliers)
        assert back.no_op.distinct == no_op.distinct
    x = torch.randn(5, 4).to(dtype)
    assert torch.equal(back.retrieve(x, 3).state, memory.retrieve(x, 3).state)
    assert os.listdir(tmp_path) == ["memory.safetensors"]


def test_a_failed_save_leaves_the_old_file(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.path.join(tmp_path, "memory.safetensors")
    old = HopfieldMemory(torch.randn(3, 2))
    old.save(path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outeffhop.memory.saved.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        HopfieldMemory(torch.randn(5, 2)).save(path)
    assert torch.equal(HopfieldMemory.load(path).stored, old.stored)
    assert os.listdir(tmp_path) == ["memory.safetensors"]
    with pytest.raises(ValueError, match="is a folder"):
        old.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"the folder '.*nowhere' does not exist"):
        old.save(os.path.join(tmp_path, "nowhere", "memory.safetensors"))


def test_a_damaged_file_is_named(tmp_path: os.PathLike[str]) -> None:
    from safetensors.torch import save_file

    path = os.path.join(tmp_path, "memory.safetensors")
    HopfieldMemory(torch.randn(30, 2)).save(path)
    whole = Path(path).read_bytes()
    format_ = {"format": "outeffhop.memory.1", "beta": "1.0", "method": "outeffhop"}
    row = {"patterns": torch.ones(2, 2)}

    def write(content: bytes) -> None:
        Path(path).write_bytes(content)

    damages = {
        "empty": lambda: write(b""),
        "text": lambda: write(b"these are not patterns"),
        "cut off": lambda: write(whole[:-9]),
        "header": lambda: write(whole[:8] + b"#" + whole[9:]),
        "another kind": lambda: save_file(row, path),
        "no patterns": lambda: save_file({"x": torch.ones(2, 2)}, path, format_),
        "NaN": lambda: save_file({"patterns": torch.full((2, 2), math.nan)}, path, format_),
        "no beta": lambda: save_file(row, path, {k: v for k, v in format_.items() if k != "beta"}),
        "beta": lambda: save_file(row, path, {**format_, "beta": "warm"}),
        "method": lambda: save_file(row, path, {**format_, "method": "nonsense"}),
        "outliers": lambda: save_file(
            {**row, "outliers": torch.zeros(3).bool()}, path, {**format_, "distinct": "True"}
        ),
    }
    for damage in damages.values():
        damage()
        with pytest.raises(ValueError, match=r"memory\.safetensors is not a memory"):
            HopfieldMemory.load(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        HopfieldMemory.load(os.path.join(tmp_path, "nowhere"))


def test_a_whole_file_is_not_blamed_for_the_device(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "memory.safetensors")
    HopfieldMemory(torch.randn(3, 2)).save(path)
    with pytest.raises(RuntimeError, match=r"device type.*: nowhere"):
        HopfieldMemory.load(path, device="nowhere")
    assert HopfieldMemory.load(path, device=torch.device("cpu")).stored.shape == (3, 2)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (dict(patterns=torch.ones(3)), ValueError, r"patterns has shape \(3,\)"),
        (dict(patterns=torch.ones(0, 3)), ValueError, "at least one pattern"),
        (dict(patterns=torch.ones(3, 0)), ValueError, r"patterns has shape \(3, 0\)"),
        (dict(patterns=torch.ones(3, 2).long()), TypeError, "int64.*float"),
        (dict(patterns=[[1.0]]), TypeError, "patterns is a list"),
        (dict(patterns=torch.tensor([[1.0], [math.nan], [math.inf]])), ValueError, "2 of 3 rows.*row 1"),
        (dict(beta=0.0), ValueError, r"beta=0\.0"),
        (dict(beta=-1), ValueError, r"beta=-1\.0"),
        (dict(beta=math.nan), ValueError, "beta=nan"),
        (dict(beta=math.inf), ValueError, "beta=inf"),
        (dict(method="gated"), ValueError, "has a gate"),
        (dict(method="outeffhop(qk_norm=rms)"), ValueError, "leave qk_norm out"),
        (dict(method="outefhop"), ValueError, "did you mean"),
        (dict(no_op=NoOp.assign(4, [0])), ValueError, "classifies 4 patterns and there are 3"),
        (dict(no_op=NoOp.assign(3, [0, 1, 2])), ValueError, "all 3 patterns"),
        (dict(no_op=NoOp.assign(3, [0]), method="outeffhop(n=4)"), ValueError, "4 and 1"),
        (dict(no_op=torch.tensor([True, False, False])), TypeError, r"no_op is a Tensor: .*NoOp\.assign"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        HopfieldMemory(**{"patterns": torch.ones(3, 2), **arguments})  # type: ignore[arg-type]


def test_bad_queries() -> None:
    memory = HopfieldMemory(torch.randn(5, 3))
    for call in (memory.retrieve, memory.energy, memory.association):
        with pytest.raises(ValueError, match=r"x has shape \(2, 4\).*\[\.\.\., 3\]"):
            call(torch.ones(2, 4))
        with pytest.raises(TypeError, match="float64"):
            call(torch.ones(2, 3, dtype=torch.float64))
    for wrong in (dict(steps=0), dict(max_steps=0), dict(tol=-1.0), dict(tol=math.nan)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            memory.retrieve(torch.ones(3), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CLIPPED)
def test_clipped_methods_have_no_energy(name: str) -> None:
    memory = HopfieldMemory(torch.randn(5, 3), method=name)
    with pytest.raises(ValueError, match=r"has no energy: .*clipped"):
        memory.energy(torch.ones(3))
    with pytest.raises(ValueError, match=r"has no energy: .*clipped"):
        memory.retrieve(torch.ones(3), trace=True)


def test_no_overlap_and_no_queries() -> None:
    memory = HopfieldMemory(torch.tensor([[1.0, 0.0], [2.0, 0.0]]), method="polynomial")
    result = memory.retrieve(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 2, trace=True)
    assert (result.state == 0).all()
    assert (result.energy == math.inf).all()
    for name in [*MODELS, *CLIPPED]:
        empty = HopfieldMemory(torch.randn(5, 3), method=name).retrieve(torch.randn(2, 0, 3), None)
        assert empty.state.shape == (2, 0, 3)
        assert empty.no_op.shape == empty.steps.shape == (2, 0)
        if name not in CLIPPED:
            traced = HopfieldMemory(torch.randn(5, 3), method=name).retrieve(torch.randn(2, 0, 3), 2, trace=True)
            assert traced.energy is not None
            assert traced.energy.shape[1:] == (2, 0)


def test_whole_numbers_of_numpy_are_whole_numbers() -> None:
    memory, x = HopfieldMemory(torch.randn(5, 3)), torch.randn(4, 3)
    result = memory.retrieve(x, np.int64(2), tol=np.float32(1e-3))  # type: ignore[arg-type]
    assert torch.equal(result.state, memory.retrieve(x, 2).state)
    result = memory.retrieve(x, tol=0.0, max_steps=np.int64(9))  # type: ignore[arg-type]
    assert torch.equal(result.state, memory.retrieve(x, None, tol=0.0, max_steps=9).state)


def test_what_is_learned_elsewhere_keeps_its_start_value() -> None:
    patterns, x = torch.randn(5, 3), torch.randn(4, 3)
    for learned, fixed in (("outeffhop(sink=learned)", "outeffhop"), ("gsh", "gsh(alpha=1.5)")):
        one, two = (HopfieldMemory(patterns, method=m).retrieve(x).state for m in (learned, fixed))
        assert torch.equal(one, two)
