"""The numbers of one tensor against plain loops: Gaussian, heavy-tailed, far from zero, huge, tiny, padded, half."""

import math

import numpy as np
import pytest
import torch
from by_hand import plain_stats

from outeffhop.outliers import moments
from outeffhop.outliers.accumulate import TensorSums
from outeffhop.outliers.moments import batch_stats


def heavy(shape, generator, degrees=2.0):
    """Student's t: its fourth moment is infinite."""
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    chi = torch.distributions.Chi2(torch.tensor(degrees, dtype=torch.float64))
    torch.manual_seed(5)
    return normal / (chi.sample(shape) / degrees).sqrt()


def tensors():
    g = torch.Generator().manual_seed(0)
    shape = (3, 13, 37)
    gauss = torch.randn(shape, generator=g, dtype=torch.float64)
    spiked = gauss.clone()
    spiked[1, 4, 7], spiked[2, 12, 36], spiked[2, 0, 7] = 90.0, -70.0, 80.0
    return {
        "gauss": gauss,
        "uniform": torch.rand(shape, generator=g, dtype=torch.float64),
        "heavy": heavy(shape, g),
        "spiked": spiked,
        "far": spiked + 1000.0,
        "huge": spiked * 1e20,
        "tiny": spiked * 1e-20,
        "tokens of all sizes": spiked * 10.0 ** torch.linspace(-18, 18, 13, dtype=torch.float64)[:, None],
        "one feature of weight": torch.cat([spiked, spiked[..., :1] * 100], -1),
    }


def summed(x, real=None, split=None, keep=16):
    sums, first = TensorSums(keep), 0
    for part in range(0, len(x), split or len(x)):
        rows = slice(part, part + (split or len(x)))
        sums.add(batch_stats(x[rows], None if real is None else real[rows]), first)
        first += len(x[rows])
    return sums.stats("x", True)


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("padded", [False, True])
def test_against_plain_loops(name, dtype, padded):
    x = tensors()[name].to(dtype)
    real = torch.ones(x.shape[:2], dtype=torch.bool)
    if padded:
        real[0, 9:], real[2, 5:] = False, False
    expected = plain_stats(x.double(), real)
    found = summed(x, real if padded else None)
    close = 1e-9 if dtype == torch.float64 else 2e-4 if name == "far" else 2e-6
    for field in ("inf_norm", "max_abs", "kurtosis", "token_inf_norm", "token_kurtosis"):
        assert getattr(found, field) == pytest.approx(expected[field], rel=close), field
    assert found.outliers == len(expected["outliers"])
    assert [(p.value, p.sample, p.token, p.channel) for p in found.positions] == expected["outliers"][:16]
    assert found.values == int(real.sum()) * x.shape[2] if padded else x.numel()


@pytest.mark.parametrize("together", [1, 100, 500])
def test_reduced_a_few_tokens_at_a_time(together, monkeypatch):
    x = tensors()["tokens of all sizes"].float()
    whole = summed(x)
    monkeypatch.setattr(moments, "_TOGETHER", together)
    assert summed(x) == whole


def test_a_bound_between_two_floats_divides_them():
    x = torch.randn(1, 1, 400, generator=torch.Generator().manual_seed(3))
    for value in x.flatten().tolist():
        for bound in (np.nextafter(value, -9), value, np.nextafter(value, 9)):
            bounds = np.array([-abs(bound)]), np.array([abs(bound)])
            where, values = moments._beyond(x, np.ones((1, 1), dtype=bool), *bounds)
            expected = x[0, 0].double().abs() > abs(bound)
            assert where[2].tolist() == expected.nonzero().flatten().tolist()
            assert values.tolist() == x[0, 0][expected].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_measured_in_float32(dtype):
    x = (tensors()["spiked"] * 100).to(dtype)  # its fourth power is far beyond float16
    expected = plain_stats(x.double())
    found = summed(x)
    assert found.kurtosis == pytest.approx(expected["kurtosis"], rel=1e-5)
    assert found.max_abs == expected["max_abs"]


def test_a_gaussian_has_kurtosis_3():
    x = torch.randn(2, 400, 500, generator=torch.Generator().manual_seed(1))
    assert summed(x).kurtosis == pytest.approx(3.0, abs=0.02)


@pytest.mark.parametrize("offset", [1e3, 1e5, 1e6])
def test_what_rounding_of_the_centre_leaves_is_corrected(offset):
    x = (tensors()["gauss"] + offset).float()
    assert summed(x).kurtosis == pytest.approx(plain_stats(x.double())["kurtosis"], rel=1e-6)


@pytest.mark.parametrize("split", [1, 2])
def test_split_into_batches(split):
    x = heavy((7, 11, 19), torch.Generator().manual_seed(2)).float()
    real = torch.arange(11) < torch.tensor([11, 3, 7, 11, 1, 5, 11])[:, None]
    whole, parts = summed(x, real, keep=5), summed(x, real, split, keep=5)
    assert whole.positions == parts.positions
    assert whole.channels == parts.channels
    assert (whole.outliers, whole.samples, whole.tokens) == (parts.outliers, parts.samples, parts.tokens)
    for field in ("inf_norm", "max_abs", "kurtosis", "token_inf_norm", "token_kurtosis"):
        assert getattr(parts, field) == pytest.approx(getattr(whole, field), rel=1e-13)


def test_channels_by_how_many_outliers_they_carry():
    found = summed(tensors()["spiked"])
    assert [(c.channel, c.count, c.max_abs) for c in found.channels] == [(7, 2, 90.0), (36, 1, 70.0)]


def test_a_constant_has_no_kurtosis_and_does_not_touch_the_mean():
    x = tensors()["gauss"].float()
    alone = summed(x[:2])
    x[2] = 0.1
    found = summed(x)
    assert found.kurtosis == pytest.approx(alone.kurtosis, rel=1e-13)
    assert summed(x[2:]).kurtosis is None
    assert summed(x[2:]).token_kurtosis is None
    assert found.samples == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad):
    x = tensors()["gauss"].float()
    x[1, 3, 5] = x[1, 3, 6] = bad
    found = summed(x, split=1)
    assert found.non_finite == 2
    assert not math.isfinite(found.max_abs)
    assert not math.isfinite(found.inf_norm)
    assert math.isnan(found.kurtosis)
    assert math.isnan(found.token_kurtosis)
    real = torch.ones(3, 13, dtype=torch.bool)
    real[1, 3] = False  # in padding it does not count
    hidden = summed(x, real)
    assert hidden.non_finite == 0
    assert math.isfinite(hidden.kurtosis)
