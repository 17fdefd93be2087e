"""Range estimators against plain NumPy."""

import numpy as np
import pytest
import torch

from outeffhop.quantization.observers import Observer, mse_range, percentile_range
from outeffhop.quantization.quantizers import Uniform


def batches(count=5, rows=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 11, generator=generator) * (i + 1) for i in range(count)]


def observed(tensors, how, **options):
    observer = Observer(Uniform(**options.pop("spec", {})), how, **options)
    for t in tensors:
        observer.observe(t)
    return observer


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_min_max_does_not_depend_on_how_the_data_are_cut(granularity):
    data = torch.cat(batches())
    spec = dict(granularity=granularity, axis=1)
    whole = observed([data], "minmax", spec=spec)
    for size in (1, 7, 13):
        cut = observed(data.split(size), "minmax", spec=spec)
        assert torch.equal(cut.low, whole.low)
        assert torch.equal(cut.high, whole.high)
    axis = 0 if granularity == "channel" else None
    np.testing.assert_array_equal(whole.low.numpy(), np.atleast_1d(data.numpy().min(axis)))
    np.testing.assert_array_equal(whole.high.numpy(), np.atleast_1d(data.numpy().max(axis)))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_running_min_max_follows_the_momentum(momentum):
    tensors = batches()
    low, high = tensors[0].min().item(), tensors[0].max().item()
    for t in tensors[1:]:
        low = momentum * low + (1 - momentum) * t.min().item()
        high = momentum * high + (1 - momentum) * t.max().item()
    found = observed(tensors, "running", momentum=momentum)
    assert found.low.item() == pytest.approx(low, rel=1e-5)
    assert found.high.item() == pytest.approx(high, rel=1e-5)


@pytest.mark.parametrize("how", ["minmax", "running"])
def test_a_batch_may_come_in_parts(how):
    first, second, third, fourth = batches()[:4]
    parts, whole = Observer(Uniform(), how), Observer(Uniform(), how)
    for tensor, again in ((first, False), (second, True), (third, False), (fourth, True)):
        parts.observe(tensor, again=again)
    for pair in ((first, second), (third, fourth)):
        whole.observe(torch.cat(pair))
    assert torch.equal(parts.low, whole.low)
    assert torch.equal(parts.high, whole.high)


@pytest.mark.parametrize("percentile", [60.0, 90.0, 99.0, 99.999, 100.0])
@pytest.mark.parametrize("size", [1, 2, 10, 4001])
def test_percentiles_are_numpys(percentile, size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    low, high = percentile_range(x, Uniform(), percentile)
    expected = np.percentile(x.double().numpy(), [100 - percentile, percentile])
    np.testing.assert_allclose([low.item(), high.item()], expected, rtol=1e-4, atol=1e-5)


def test_percentiles_of_each_channel():
    x = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 5.0, 0.1])
    low, high = percentile_range(x, Uniform(granularity="channel", axis=1), 99.0)
    np.testing.assert_allclose(low.numpy(), np.percentile(x.numpy(), 1, axis=0), rtol=1e-4)
    np.testing.assert_allclose(high.numpy(), np.percentile(x.numpy(), 99, axis=0), rtol=1e-4)


def test_a_percentile_passes_over_one_outlier_in_many():
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    x[17] = 1e4
    assert observed([x], "percentile").high.item() < 10.0
    assert observed([x], "minmax").high.item() == 1e4


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_mse_range_is_the_best_of_a_plain_search(bits, symmetric):
    x = torch.from_numpy(np.random.default_rng(bits).standard_t(3, 600)).float()
    spec = Uniform(bits, symmetric)

    def error(low, high):  # in NumPy, from the definition
        low, high = min(low, 0.0), max(high, 0.0)
        smallest, largest = spec.integers
        scale = (2 * max(-low, high) if symmetric else high - low) / (largest - smallest)
        zero = 0 if symmetric else round(-low / scale)
        q = np.clip(np.round(x.double().numpy() / scale) + zero, smallest, largest)
        return np.mean(((q - zero) * scale - x.double().numpy()) ** 2)

    low, high = (t.item() for t in mse_range(x, spec))
    plain = min(error(x.min().item() * s, x.max().item() * s) for s in np.linspace(1 / 64, 1, 200))
    assert error(low, high) <= plain * 1.05
    assert error(low, high) <= error(x.min().item(), x.max().item())
    if bits <= 4:  # heavy tails: few bits are better spent on the middle
        assert high - low < 0.95 * (x.max() - x.min()).item()


def test_the_mse_range_may_be_a_64th_of_all():
    x = torch.tensor([1.0, -1.0]).repeat(20_000)
    x[:2] *= 64
    low, high = mse_range(x, Uniform(2, symmetric=True))
    assert (low.item(), high.item()) == pytest.approx((-1.0, 1.0), rel=1e-5)


def test_mse_ranges_of_channels_are_those_of_each_alone():
    x = torch.from_numpy(np.random.default_rng(0).standard_t(3, (4, 200))).float()
    spec = Uniform(4, True, "channel", 0)
    low, high = mse_range(x, spec)
    for i in range(4):
        alone = mse_range(x[i], Uniform(4, True))
        assert (low[i].item(), high[i].item()) == (alone[0].item(), alone[1].item())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("how", ["minmax", "running", "percentile", "mse"])
def test_what_is_not_finite_is_refused_by_name(bad, how):
    x = torch.randn(3, 4)
    x[1, 2] = bad
    with pytest.raises(ValueError, match="layer/output holds NaN or inf"):
        Observer(Uniform(), how).observe(x, "layer/output")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(how="max"), "range='max'"),
        (dict(momentum=1.0), "momentum=1.0"),
        (dict(percentile=50.0), "percentile=50.0"),
        (dict(spec=Uniform(granularity="token")), "nothing to observe"),
    ],
)
def test_wrong_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match):
        Observer(**{"spec": Uniform(), **arguments})
