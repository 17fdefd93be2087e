"""Grids: their integers, their error, and what odd tensors do to them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outeffhop.quantization.quantizers import Grid, Uniform

BITS = (2, 3, 4, 8, 12, 16)


def tensor(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def grid_of(x, **spec) -> Grid:
    uniform = Uniform(**spec)
    return uniform.grid(*uniform.minmax(x))


def each(grid, x):
    """Scale of every element of x."""
    return grid.dequantize(grid.zero_point.new_zeros(x.shape).add(1) + grid._spread(x)[1])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
def test_error_is_at_most_half_a_step_and_rounding_twice_changes_nothing(bits, symmetric, granularity):
    x = tensor(5, 7, 9) + 0.3
    grid = grid_of(x, bits=bits, symmetric=symmetric, granularity=granularity, axis=1)
    once = grid.fake(x)
    torch.testing.assert_close(grid.fake(once), once, rtol=0, atol=0)
    assert ((once - x).abs() <= each(grid, x) * (0.5 + 1e-4)).all()
    assert len(grid.scale) == {"tensor": 1, "channel": 7, "token": 35}[granularity]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_integers_and_simulation_agree(bits, symmetric):
    x = tensor(4, 33, scale=3.0)
    for granularity in ("tensor", "channel", "token"):
        grid = grid_of(x, bits=bits, symmetric=symmetric, granularity=granularity)
        q = grid.quantize(x)
        smallest, largest = grid.spec.integers
        assert q.dtype == torch.int32
        assert smallest <= int(q.min())
        assert int(q.max()) <= largest
        assert len(q.unique()) <= 2**bits
        torch.testing.assert_close(grid.dequantize(q), grid.fake(x), rtol=0, atol=0)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("offset", [-40.0, -1.0, 0.0, 1.0, 40.0])
def test_zero_is_exact(symmetric, offset):
    x = tensor(64) + offset
    grid = grid_of(x, symmetric=symmetric)
    assert grid.fake(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    low, high = grid.range
    assert low <= 0.0 <= high
    assert low <= float(x.min()) + grid.scale.item()
    assert high >= float(x.max()) - grid.scale.item()


def test_the_range_of_a_symmetric_grid_is_symmetric_and_of_an_asymmetric_one_tight():
    x = torch.tensor([-1.0, 3.0])
    assert grid_of(x, symmetric=True).range == pytest.approx((-3.0, 3.0))
    low, high = grid_of(x, symmetric=False).range
    assert high - low == pytest.approx(4.0)
    assert low == pytest.approx(-1.0, abs=4 / 255)


def test_values_outside_the_range_take_its_ends():
    grid = Uniform(bits=8).grid(torch.tensor([-1.0]), torch.tensor([1.0]))
    low, high = grid.range
    assert grid.fake(torch.tensor([-50.0, 50.0])).tolist() == pytest.approx([low, high])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("value", [0.0, 5.0, -5.0, 1e-42, 1e-30, -3e38, 3.4e38])
def test_constant_tensors_keep_their_value(symmetric, value):
    x = torch.full((4, 4), value)
    grid = grid_of(x, symmetric=symmetric)
    out = grid.fake(x)
    assert torch.isfinite(out).all()
    if abs(value) > 1e-38 and abs(value) < 1e38:
        torch.testing.assert_close(out, x, rtol=1e-5, atol=0)
    elif abs(value) <= 1e-38:  # a denormal: half of the smallest step
        assert (out - x).abs().max() <= grid.scale.item() / 2


@given(
    low=st.floats(-(2.0**100), 2.0**100, width=32),
    high=st.floats(-(2.0**100), 2.0**100, width=32),
    bits=st.integers(2, 16),
    symmetric=st.booleans(),
)
def test_any_range_makes_a_grid(low, high, bits, symmetric):
    low, high = min(low, high), max(low, high)
    grid = Uniform(bits, symmetric).grid(torch.tensor([low]), torch.tensor([high]))
    x = torch.linspace(0, 1, 50) * (high - low) + low
    out = grid.fake(x)
    assert torch.isfinite(out).all()
    assert float(grid.scale) > 0
    assert ((out - x).abs() <= float(grid.scale) * (0.5 + 1e-2)).all()
    assert grid.fake(torch.zeros(1)).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_rounded_in_float32_and_come_back_as_they_were(dtype):
    x = tensor(6, 8).to(dtype)
    grid = grid_of(x)
    out = grid.fake(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, grid.dequantize(grid.quantize(x)).to(dtype))


@pytest.mark.parametrize(("weight_bits", "bits"), [(8, 8), (4, 8), (6, 6)])
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_simulated_linear_equals_the_integer_one(weight_bits, bits, granularity):
    x, w = tensor(13, 40, seed=1) + 0.5, tensor(17, 40, seed=2)
    gx = grid_of(x, bits=bits)
    gw = grid_of(w, bits=weight_bits, symmetric=True, granularity=granularity)
    qx, qw = gx.quantize(x).numpy(), gw.quantize(w).numpy()
    assert qx.dtype == qw.dtype == np.int32
    # Σ (qx − z) qw = Σ qx qw − z Σ qw: the second sum is the weight's own
    accumulator = qx @ qw.T - int(gx.zero_point) * qw.sum(1)
    assert accumulator.dtype == np.int32 or np.abs(accumulator).max() < 2**31
    integer = torch.from_numpy(accumulator).double() * gx.scale.double() * gw.scale.double()
    simulated = gx.fake(x).double() @ gw.fake(w).double().T
    torch.testing.assert_close(simulated, integer, rtol=0, atol=1e-5 * float(integer.abs().max()))


def test_a_channel_of_its_own_confines_an_outlier():
    w = tensor(16, 32)
    w[3] *= 100.0
    rest = torch.arange(16) != 3
    error = {}
    for granularity in ("tensor", "channel"):
        grid = grid_of(w, symmetric=True, granularity=granularity)
        error[granularity] = (grid.fake(w) - w)[rest].square().mean()
    assert error["tensor"] > 1000 * error["channel"]


def test_a_token_of_its_own_confines_an_outlier():
    x = tensor(2, 16, 32)
    x[1, 5, 7] = 300.0
    rest = torch.ones(2, 16, dtype=torch.bool)
    rest[1, 5] = False
    error = {g: (grid_of(x, granularity=g).fake(x) - x)[rest].square().mean() for g in ("tensor", "token")}
    assert error["tensor"] > 1000 * error["token"]


@pytest.mark.parametrize("bits", [1, 17, 8.0, True])
def test_other_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits=.*2 to 16"):
        Uniform(bits)


def test_another_granularity_is_refused():
    with pytest.raises(ValueError, match="granularity='row'"):
        Uniform(granularity="row")


@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
def test_what_is_huge_or_infinite_takes_its_end_and_nan_stays(granularity):
    low, high = torch.full((2,), -1.0), torch.full((2,), 2.0)
    grid = Uniform(granularity=granularity).grid(*((low[:1], high[:1]) if granularity == "tensor" else (low, high)))
    x = torch.tensor([[torch.inf, 1e30, 0.0], [-torch.inf, -1e30, torch.nan]])
    found = grid.fake(x)
    assert found.flatten()[:5].tolist() == pytest.approx([2.0, 2.0, 0.0, -1.0, -1.0])
    assert found[1, 2].isnan()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_integers_of_any_dtype_are_values_again(dtype):
    x = tensor(40)
    grid = grid_of(x)
    assert grid.zero_point.item() > 0
    assert torch.equal(grid.dequantize(grid.quantize(x).to(dtype)), grid.fake(x))


def test_channels_are_counted_from_the_end_too():
    x = tensor(3, 4, 5) * torch.tensor([1.0, 10.0, 100.0, 1.0, 1.0])
    assert torch.equal(
        *(grid_of(x, granularity="channel", axis=axis).fake(x) for axis in (2, -1)),
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
@pytest.mark.parametrize("bits", [2, 8, 16])
def test_rounding_is_pytorchs_bit_for_bit(bits, granularity, symmetric):
    x = tensor(6, 50)
    grid = grid_of(x, bits=bits, symmetric=symmetric, granularity=granularity)
    x = 1.5 * x  # some lie beyond the range
    x[:, :8] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e38, -1e38, -0.0, 0.0, 1e-40])
    if granularity != "channel":
        x[:, 8:20] = (torch.arange(-6, 6) + 0.5) * grid.scale[:, None]  # between two integers
    plain, with_gradient = grid.fake(x), grid.fake(x.requires_grad_()).detach()
    assert torch.equal(plain.isnan(), x.isnan())
    assert torch.equal(plain.nan_to_num().view(torch.int32), with_gradient.nan_to_num().view(torch.int32))


@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
def test_gradients_pass_the_values_and_not_the_range(granularity):
    x = tensor(4, 6).requires_grad_()
    grid_of(x, granularity=granularity).fake(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
