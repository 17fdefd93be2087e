"""HopfieldMemory at every β, size and model: numbers that obey the theory, or an error that names the argument."""

import math
import os
import stat

import pytest
import torch
from fuzzing import bytes_like, cases, outcome, refused
from hypothesis import given
from hypothesis import strategies as st

from outeffhop.memory import HopfieldMemory, NoOp

MODELS = [
    "dense",
    "outeffhop",
    "outeffhop(n=4)",
    "sparse",
    "gsh(alpha=1.3)",
    "gsh",
    "polynomial",
    "polynomial(order=4)",
]
CLIPPED = ["clipped", "clipped-outeffhop", "clipped(alpha=2)"]
BETAS = st.floats(-6, 6).map(lambda e: 10.0**e)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
SEEDS = st.integers(0, 2**16)


def memory_of(size, d, beta, model, dtype, seed, spread=1.0, no_op=None):
    generator = torch.Generator().manual_seed(seed)
    patterns = (spread * torch.randn(size, d, generator=generator, dtype=torch.float64)).to(dtype)
    queries = (spread * torch.randn(3, d, generator=generator, dtype=torch.float64)).to(dtype)
    return HopfieldMemory(patterns, beta, model, no_op), queries


@cases(37)
@given(
    st.sampled_from([1, 1, 2, 5, 40]),
    st.integers(1, 9),
    BETAS,
    st.sampled_from(MODELS),
    DTYPES,
    SEEDS,
    st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_retrieval_stays_in_the_hull_and_lowers_the_energy(size, d, beta, model, dtype, seed, spread):
    memory, x = memory_of(size, d, beta, model, dtype, seed, spread)
    found = memory.retrieve(x, steps=3, trace=True)
    largest = memory.stored.double().norm(dim=1).max()
    assert torch.isfinite(found.state).all()
    assert (found.state.double().norm(dim=1) <= largest * 1.02 + 1e-6).all()  # weights sum to at most 1
    assert ((found.no_op >= 0) & (found.no_op <= 1 + 1e-5)).all()
    assert not torch.isnan(found.energy).any()
    if dtype in (torch.float64, torch.float32):
        # what rounding of the terms of H may add: psi/β is as large as ⟨ξ, x⟩, the constant as log(M)/β
        size_of_terms = largest**2 + float(x.double().norm(dim=1).max()) ** 2 + math.log(size + 4) / beta + 1.0
        slack = float(size_of_terms) * (1e-10 if dtype == torch.float64 else 2e-5)
        steps = found.energy.double().diff(dim=0)
        assert (steps[torch.isfinite(steps)] <= slack).all()
        if not model.startswith("polynomial"):
            assert (found.energy.double() >= -slack).all()


@cases(25)
@given(st.integers(1, 30), st.integers(1, 8), BETAS, st.sampled_from(MODELS + CLIPPED), SEEDS)
def test_one_update_is_weights_times_patterns(size, d, beta, model, seed):
    memory, x = memory_of(size, d, beta, model, torch.float64, seed)
    weights = memory.association(x)
    assert weights.shape == (3, size)
    assert torch.isfinite(weights).all()
    assert (weights.abs().sum(-1) <= (1 + 1e-9) * (size if "clipped" in model else 1)).all()
    assert torch.allclose(memory.retrieve(x).state, weights @ memory.patterns, atol=1e-8)


@cases(15)
@given(st.integers(1, 12), st.integers(1, 6), BETAS, SEEDS, st.booleans(), st.data())
def test_outliers_are_so_many_no_op_patterns(size, d, beta, seed, distinct, data):
    chosen = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    no_op = NoOp.assign(size, torch.tensor(chosen), distinct=distinct)
    found = outcome(lambda: memory_of(size, d, beta, "outeffhop", torch.float64, seed, no_op=no_op), "no_op")
    assert refused(found) == all(chosen)
    if refused(found):
        return
    memory, x = found
    count = sum(chosen) if distinct else 1
    assert memory.n == count
    scores = beta * x @ memory.patterns.T
    column = torch.full((3, 1), math.log(count) if count else -math.inf, dtype=torch.float64)
    weights = torch.softmax(torch.cat([scores, column], 1), 1)
    result = memory.retrieve(x)
    assert torch.allclose(result.state, weights[:, :-1] @ memory.patterns, atol=1e-9)
    assert torch.allclose(result.no_op, weights[:, -1], atol=1e-9)


@cases(15)
@given(
    st.integers(0, 8),
    st.integers(0, 4),
    st.floats(),
    st.floats(),
    st.sampled_from(["cosine", "dot", "nothing"]),
    SEEDS,
)
def test_classification_by_similarity(size, d, threshold, share, measure, seed):
    patterns = torch.randn(size, d, generator=torch.Generator().manual_seed(seed))
    found = outcome(
        lambda: NoOp.by_similarity(patterns, threshold, share=share, measure=measure),
        "patterns",
        "share",
        "measure",
        "threshold",
    )
    if not refused(found):
        assert found.outliers.shape == (size,)
        assert 0 <= found.count <= size


COUNTS = st.integers(-3, 3)
SHAPES = st.lists(st.integers(0, 4), max_size=3)


@cases(37)
@given(
    SHAPES,
    SHAPES,
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]),
    st.floats(),
    st.sampled_from([*MODELS, *CLIPPED, "gated", "outeffhop(n=0)", "nothing", "", "("]),
    st.one_of(COUNTS, st.none()),
    st.floats(),
    COUNTS,
    st.booleans(),
    st.sampled_from([0.0, math.nan, math.inf, 1e30]),
)
def test_whatever_is_given_is_answered_or_refused(
    patterns, queries, dtype, beta, model, steps, tol, max_steps, trace, value
):
    def use():
        stored = torch.ones(patterns).to(dtype)
        if stored.numel() and stored.is_floating_point():
            stored.view(-1)[0] = value
        memory = HopfieldMemory(stored, beta, model)
        return memory.retrieve(torch.ones(queries), steps, tol=tol, max_steps=max_steps, trace=trace)

    names = ("patterns", "beta", "method", "x ", "steps", "tol", "max_steps")
    found = outcome(use, *names)
    if not refused(found):
        assert found.state.shape == tuple(queries)


@cases(10)
@given(st.sampled_from(MODELS), DTYPES, SEEDS)
def test_an_infinite_or_missing_query_does_not_disturb_the_others(model, dtype, seed):
    memory, x = memory_of(5, 4, 2.0, model, dtype, seed)
    alone = memory.retrieve(x[:1], steps=None, max_steps=50).state
    spoiled = torch.cat([x[:1], torch.full_like(x[:1], math.nan), x[1:]])
    found = memory.retrieve(spoiled, steps=None, max_steps=50)
    assert torch.allclose(found.state[:1], alone, atol=1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-5)
    assert not found.converged[1]
    assert memory.retrieve(x[:0]).state.shape == (0, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    memory = HopfieldMemory(torch.eye(4), 8.0, "outeffhop", NoOp.assign(4, [1]))
    memory.save(folder / "good.safetensors")
    return folder, (folder / "good.safetensors").read_bytes(), memory


@cases(62)
@given(st.data())
def test_a_damaged_file_is_refused(saved, data):
    folder, content, memory = saved
    file = folder / "damaged.safetensors"
    damaged = data.draw(bytes_like(content))
    file.write_bytes(damaged)
    found = outcome(lambda: HopfieldMemory.load(file), str(file))
    if not refused(found):  # nothing was touched that counts
        assert torch.equal(found.stored, memory.stored)
        assert (found.beta, str(found.method), found.n) == (memory.beta, str(memory.method), memory.n)


def test_no_flipped_bit_is_taken_for_a_pattern(saved):
    folder, content, _ = saved
    file = folder / "flipped.safetensors"
    for at in range(len(content) - 68, len(content)):  # sixteen numbers and four outlier flags
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ValueError, match="flipped"):
            HopfieldMemory.load(file)


def test_a_memory_takes_no_devices_place(tmp_path):
    """A pipe here; for root, /dev/null would be a plain file from then on."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device or a pipe"):
        HopfieldMemory(torch.eye(3), 1.0).save(tmp_path / "pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_memory_that_cannot_be_written_says_where():
    with pytest.raises(OSError, match="path='/proc/x' could not be written"):
        HopfieldMemory(torch.eye(3), 1.0).save("/proc/x")
