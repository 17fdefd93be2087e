"""e4m3: rounded as PyTorch rounds it, for any range."""

import pytest
import torch
from subjects import build, decibels, inputs, output, quantize

from outeffhop.quantization import quantization_map
from outeffhop.quantization.float8 import Float8

LARGEST = 448.0


def grid_of(x, **spec):
    chosen = Float8(**spec)
    return chosen.grid(*chosen.minmax(x))


def tensor(*shape, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale


def test_with_scale_one_it_is_pytorchs_own_rounding():
    x = torch.cat([torch.linspace(-LARGEST, LARGEST, 9973), tensor(501), tensor(501, scale=2.0**-7)])
    grid = grid_of(x)
    assert grid.scale.item() == 1.0
    assert torch.equal(grid.fake(x), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(grid.quantize(x).float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("granularity", ["tensor", "channel", "token"])
@pytest.mark.parametrize("size", [1e-20, 0.3, 7.0, 1e30])
def test_any_range_is_scaled_to_the_end_of_e4m3(granularity, size):
    x = tensor(5, 7, 9, scale=size)
    grid = grid_of(x, granularity=granularity, axis=1)
    rows = grid.spec.rows(x)
    torch.testing.assert_close(grid.scale * LARGEST, rows.abs().amax(1), rtol=1e-6, atol=0.0)
    expected = (rows / grid.scale[:, None]).to(torch.float8_e4m3fn).float() * grid.scale[:, None]
    assert torch.equal(grid.spec.rows(grid.fake(x)), expected)
    assert torch.equal(grid.dequantize(grid.quantize(x)), grid.fake(x))
    assert len(grid.quantize(x).float().unique()) <= 253  # 2 · 126 numbers and 0


def test_the_error_is_a_share_of_each_number_down_to_the_smallest_normal_one():
    x = torch.logspace(-3, 2, 4001)
    grid = grid_of(x)
    error = (grid.fake(x) - x).abs()
    normal = x >= 2.0**-6 * grid.scale
    assert (error[normal] <= x[normal] * (2.0**-4 + 1e-6)).all()
    assert (error[~normal] <= 2.0**-10 * grid.scale * (1 + 1e-6)).all()


def test_values_outside_the_range_take_its_ends_and_nan_stays():
    grid = Float8().grid(torch.tensor([-1.0]), torch.tensor([2.0]))
    found = grid.fake(torch.tensor([-50.0, 50.0, torch.inf, -torch.inf, torch.nan, 0.0]))
    assert grid.range == pytest.approx((-2.0, 2.0))
    torch.testing.assert_close(found, torch.tensor([-2.0, 2.0, 2.0, -2.0, torch.nan, 0.0]), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_come_back_as_they_were(dtype):
    x = tensor(6, 8).to(dtype)
    assert grid_of(x).fake(x).dtype == dtype


def test_a_grid_equals_only_itself():
    """Comparing its tensors would raise an error."""
    grid, other = (grid_of(tensor(5, 7), granularity="channel", axis=1) for _ in range(2))
    assert grid == grid
    assert grid != other


def test_a_tensor_of_zeros_stays_zero():
    assert grid_of(torch.zeros(3, 4)).fake(torch.zeros(3, 4)).abs().max() == 0.0


@pytest.mark.parametrize("wrong", [{"bits": 4}, {"symmetric": False}])
def test_it_has_eight_bits_and_a_sign(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Float8(**wrong)


@pytest.mark.parametrize("name", ["bert", "opt", "vit", "stanhop"])
def test_weights_of_a_model_become_numbers_of_e4m3(name):
    model, batch = build(name), inputs(name)
    quantized = quantize(model, [batch], scheme="fp8")
    rows = {row.name: row for row in quantization_map(quantized).rows}
    same = {row.name for row in quantization_map(quantize(model, [batch])).rows}
    assert rows.keys() == same  # where the paper quantizes
    weights = dict(quantized.named_parameters())
    for key, row in rows.items():
        assert row.bits == 8
        if row.kind == "weight":
            weight = weights[key.replace("/", ".")].detach() / row.scale
            torch.testing.assert_close(weight.to(torch.float8_e4m3fn).float(), weight, rtol=1e-6, atol=1e-6)
    assert decibels(output(model, batch), output(quantized, batch)) > 10.0


def test_an_outlier_costs_the_other_numbers_less_than_in_int8():
    from outeffhop.quantization.quantizers import Uniform

    x = tensor(1000)
    x[0] = 1000.0
    uniform = Uniform()
    error = {
        "int8": uniform.grid(*uniform.minmax(x)).fake(x)[1:] - x[1:],
        "fp8": grid_of(x).fake(x)[1:] - x[1:],
    }
    assert error["fp8"].square().mean() < 0.01 * error["int8"].square().mean()
