"""Quantizers, range estimators and outlier metrics on arbitrary tensors: constant, empty, huge, not finite."""

import math

import numpy as np
import pytest
import torch
from fuzzing import cases, outcome, refused
from hypothesis import given
from hypothesis import strategies as st

from outeffhop.outliers.accumulate import TensorSums
from outeffhop.outliers.moments import SIGMAS, batch_stats
from outeffhop.quantization.observers import RANGES, Observer
from outeffhop.quantization.quantizers import GRANULARITIES, Uniform

SEEDS = st.integers(0, 2**16)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
SPECS = st.builds(Uniform, st.integers(2, 16), st.booleans(), st.sampled_from(GRANULARITIES))
VALUES = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.floats(-10, 10, width=32)


@st.composite
def filled(draw, values=VALUES, smallest=1):
    """A tensor [a, b], its elements drawn one by one or constant or of a wide distribution."""
    shape = draw(st.tuples(st.integers(smallest, 4), st.integers(smallest, 8)))
    kind = draw(st.sampled_from(["drawn", "constant", "normal", "outlier"]))
    if kind == "drawn":
        flat = draw(st.lists(values, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
        return torch.tensor(flat, dtype=torch.float32).reshape(shape)
    if kind == "constant":
        return torch.full(shape, draw(values))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(draw(SEEDS)))
    if kind == "outlier" and noise.numel():
        noise[0, 0] = draw(values)
    return noise


@cases(50)
@given(filled(), SPECS, DTYPES)
def test_inside_the_range_the_error_is_half_a_step(x, spec, dtype):
    x = x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
    low, high = spec.minmax(x)
    grid = spec.grid(low, high)
    values = x.float()
    q = grid.quantize(values)
    again = grid.dequantize(q)
    smallest, largest = spec.integers
    assert q.dtype == torch.int32
    assert ((q >= smallest) & (q <= largest)).all()
    assert torch.isfinite(again).all()
    assert torch.equal(grid.fake(values), again)
    step = grid._spread(values)[0].double()
    # the grid covers the range but for the rounding of its zero point, which is half a step at most
    inside = values.abs() <= torch.finfo(torch.float32).max / 2
    error = (again.double() - values.double()).abs()
    assert (error <= step * (0.5 + 0.5 * (not spec.symmetric)) * (1 + 1e-3))[inside].all()
    assert (grid.fake(torch.zeros_like(values)) == 0).all()  # 0 is exact
    assert torch.equal(grid.quantize(again), q)  # a second time changes nothing
    assert torch.equal(grid.fake(again), again)
    assert grid.fake(x).dtype == dtype
    first, last = grid.range
    assert first <= 0 <= last


@cases(25)
@given(filled(), st.integers(2, 16), st.booleans(), st.sampled_from(RANGES), st.sampled_from(["tensor", "channel"]))
def test_observers_stay_within_what_they_saw(x, bits, symmetric, how, granularity):
    spec = Uniform(bits, symmetric, granularity)
    observer = Observer(spec, how)
    observer.observe(x[:0])  # nothing is nothing
    assert observer.low is None
    for part in (x, x, x[:, :1]):
        observer.observe(part)
    low, high = spec.minmax(x)
    slack = 1e-5 * torch.maximum(low.abs(), high.abs())
    assert (observer.low >= torch.minimum(low, torch.zeros(())) - slack).all()
    assert (observer.high <= torch.maximum(high, torch.zeros(())) + slack).all()
    assert torch.isfinite(spec.grid(observer.low, observer.high).fake(x)).all()
    if how == "minmax":
        assert torch.equal(observer.low, low)
        assert torch.equal(observer.high, high)


@cases(15)
@given(filled(), st.sampled_from([math.nan, math.inf, -math.inf]), st.sampled_from(RANGES), st.data())
def test_observers_refuse_what_is_not_finite(x, value, how, data):
    row, column = (data.draw(st.integers(0, n - 1)) for n in x.shape)
    x[row, column] = value
    with pytest.raises(ValueError, match=r"weights\.3 holds NaN or inf"):
        Observer(Uniform(), how).observe(x, "weights.3")


ANYTHING = st.one_of(st.integers(-2, 40), st.floats(), st.booleans(), st.none(), st.text(max_size=3))


@cases(25)
@given(ANYTHING, ANYTHING, ANYTHING, st.floats(), st.floats())
def test_arguments_are_refused_by_name(bits, granularity, how, momentum, percentile):
    spec = outcome(lambda: Uniform(bits, True, granularity), "bits", "granularity")
    assert refused(spec)  # none of these is a granularity
    outcome(lambda: Observer(Uniform(), how, momentum, percentile), "range", "momentum", "percentile")
    outcome(lambda: Observer(Uniform(), "percentile", momentum, percentile), "momentum", "percentile")


@cases(15)
@given(SPECS, st.lists(st.integers(0, 3), max_size=4))
def test_a_tensor_of_any_shape(spec, shape):
    x = torch.ones(shape)

    def use():
        low, high = spec.minmax(x)
        return spec.grid(low, high).fake(x)

    found = outcome(use, "the tensor")
    if not refused(found):
        assert torch.allclose(found, x, rtol=0.5)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_no_elements_and_a_single_number(granularity):
    spec = Uniform(granularity=granularity)
    with pytest.raises(ValueError, match=r"the tensor has shape \(0,\)"):
        spec.minmax(torch.ones(0))
    if granularity != "tensor":
        with pytest.raises(ValueError, match="the tensor is a single number"):
            spec.minmax(torch.ones(()))


def by_definition(x):
    """Kurtosis and inf norm of a sample in numpy's float64."""
    flat = x.double().flatten().numpy()
    centred = flat - flat.mean()
    variance = (centred**2).mean()
    kurtosis = (centred**4).mean() / variance**2 if variance else math.nan
    return np.abs(flat).max(), kurtosis, np.abs(centred) > SIGMAS * math.sqrt(variance)


@cases(37)
@given(filled(st.floats(-1e6, 1e6, width=32)), DTYPES, st.floats(-9, 9))
def test_metrics_by_their_definition(x, dtype, exponent):
    x = x.clamp(-6e4, 6e4).to(dtype)
    if dtype in (torch.float32, torch.float64):
        x = x * 10.0**exponent
    found = batch_stats(x[None])
    inf_norm, kurtosis, far = by_definition(x)
    assert found.inf_norm.tolist() == pytest.approx([inf_norm])
    assert found.values == x.numel()
    assert found.non_finite == 0
    constant = bool((x == x.flatten()[0]).all())
    assert math.isnan(found.kurtosis[0]) == constant
    if not constant:
        # float32 sums about a point near the mean; a spread far below the mean's last digit has no digits left
        spread = float(x.double().std(correction=0)) / max(float(x.double().abs().max()), 1e-300)
        if spread > 1e-3:
            assert found.kurtosis.tolist() == pytest.approx([kurtosis], rel=1e-3)
            assert found.outliers.numel() == pytest.approx(far.sum(), abs=1)


@cases(20)
@given(filled(st.floats(width=32)), st.data())
def test_metrics_of_anything_are_counted_and_kept(x, data):
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=x.shape[0], max_size=x.shape[0])), dtype=torch.bool)
    sums = TensorSums(keep=3)
    sums.add(batch_stats(x[None], keep[None]), 0)
    stats = sums.stats("tensor", True)
    counted = x[keep]
    assert stats.values == counted.numel()
    assert stats.non_finite == int((~counted.isfinite()).sum())
    assert stats.samples == int(keep.any())
    assert len(stats.positions) <= 3
    if counted.numel() and counted.isfinite().all():
        assert stats.max_abs == float(counted.abs().max())
    if counted.isnan().any():
        assert math.isnan(stats.max_abs)
