"""The normalizers against plain formulas, the paper's numbers, and at the ends of every dtype."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outeffhop.functional import clipped_softmax, entmax, logsumexp_n, softmax1, softmax_n, sparsemax

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NORMALIZERS = {
    "softmax": lambda x: softmax_n(x, 0.0),
    "softmax1": softmax1,
    "softmax_4": lambda x: softmax_n(x, 4.0),
    "clipped": lambda x: clipped_softmax(x, -0.03, 1.1),
    "clipped1": lambda x: clipped_softmax(x, -0.03, 1.1, n=1.0),
    "sparsemax": sparsemax,
    "entmax": lambda x: entmax(x, 1.5),
    "entmax_1.3": lambda x: entmax(x, 1.3),
    "entmax_learned": lambda x: entmax(x, torch.tensor(1.7, dtype=torch.float64)),
}


def test_the_papers_worked_example():
    # "How Does Softmax1 Solve the Outlier Problem?": n = [−10, −10, −10] and n' = [100, −10, −10]
    nothing = torch.full((3,), -10.0, dtype=torch.float64)
    outlier = torch.tensor([100.0, -10.0, -10.0], dtype=torch.float64)
    assert softmax_n(nothing, 0.0).tolist() == pytest.approx([1 / 3] * 3)
    assert softmax1(nothing).tolist() == pytest.approx([4.539e-5] * 3, rel=1e-3)  # the paper: 5e-5
    assert softmax_n(outlier, 0.0).tolist() == pytest.approx([1.0, 1.689e-48, 1.689e-48], rel=1e-3)  # the paper: 2e-48


def test_softmax_n_is_its_formula():
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for n in (0.0, 0.5, 1.0, 7.0):
        expected = x.exp() / (n + x.exp().sum(-1, keepdim=True))
        torch.testing.assert_close(softmax_n(x, n), expected)
        torch.testing.assert_close(logsumexp_n(x, n), torch.log(n + x.exp().sum(-1)))
    torch.testing.assert_close(softmax_n(x, 0.0, dim=0), torch.softmax(x, 0))
    torch.testing.assert_close(logsumexp_n(x, 0.0, dim=0, keepdim=True), torch.logsumexp(x, 0, keepdim=True))


def test_n_may_be_a_tensor_with_a_gradient():
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    n = torch.tensor([[0.3], [1.0], [20.0]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(softmax_n, (x, n))
    assert torch.autograd.gradcheck(logsumexp_n, (x, n))
    zero = torch.zeros(3, 1, dtype=torch.float64, requires_grad=True)
    softmax_n(x - 5, zero)[:, 0].sum().backward()
    expected = -torch.exp(x - 5)[:, :1] / torch.exp(x - 5).sum(-1, keepdim=True) ** 2
    torch.testing.assert_close(zero.grad, expected.detach())


def test_softmax_n_is_gamma_times_softmax():
    x = torch.randn(6, 9, dtype=torch.float64)
    gamma = torch.sigmoid(torch.logsumexp(x, -1, keepdim=True) - math.log(3))
    torch.testing.assert_close(softmax_n(x, 3.0), gamma * torch.softmax(x, -1))


def test_the_gradient_of_logsumexp_n_is_softmax_n():
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(logsumexp_n(x, 2.0).sum(), x)
    torch.testing.assert_close(grad, softmax_n(x, 2.0))


@pytest.mark.parametrize("name", NORMALIZERS)
def test_gradcheck(name):
    x = torch.tensor([[0.3, -1.2, 0.8, 0.1], [2.0, 0.5, -0.3, 1.1]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(NORMALIZERS[name], (x,))


def test_gradient_of_a_learned_alpha():
    x = torch.tensor([[0.3, -0.2, 0.8, 0.1]], dtype=torch.float64, requires_grad=True)
    alpha = torch.tensor([[1.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, a: entmax(x, a), (x, alpha), atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMALIZERS)
def test_rows_at_the_ends_of_the_range(name, dtype):
    inf = math.inf
    rows = [
        [-1e4, -1e4, -1e4, -1e4],
        [1e4, 1e4, 1e4, 1e4],
        [1e4, -1e4, 0.0, 0.0],
        [-inf, -inf, -inf, -inf],
        [-inf, 1.0, -inf, 2.0],
        [-inf, -1e4, 1e4, -inf],
    ]
    x = torch.tensor(rows, dtype=dtype, requires_grad=True)
    p = NORMALIZERS[name](x)
    (grad,) = torch.autograd.grad((p * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)).sum(), x)
    assert p.dtype == dtype
    assert torch.isfinite(p).all()
    assert torch.isfinite(grad).all()
    assert torch.equal(p[3], torch.zeros(4, dtype=dtype))
    assert torch.equal(grad[3], torch.zeros(4, dtype=dtype))
    assert (p[torch.isneginf(x)] == 0).all()
    assert (grad[torch.isneginf(x)] == 0).all()
    # a masked entry is as good as absent
    alone = NORMALIZERS[name](x[4, [1, 3]][None])[0]
    torch.testing.assert_close(p[4, [1, 3]], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_far_below_zero_softmax1_abstains_and_softmax_does_not(dtype):
    x = torch.full((1, 3), -1e4, dtype=dtype)
    assert torch.equal(softmax1(x), torch.zeros(1, 3, dtype=dtype))
    assert softmax_n(x, 0.0).sum().item() == pytest.approx(1.0, abs=1e-2)
    assert logsumexp_n(x.float(), 1.0).item() == 0.0


def test_half_precision_is_computed_in_float32():
    x = torch.randn(100, 50, generator=torch.Generator().manual_seed(0)).half()
    expected = softmax1(x.double())
    assert (softmax1(x).double() - expected).abs().max() < 2**-11 * expected.max()
    assert softmax1(x, dtype=torch.float32).dtype == torch.float32


def test_clipped_softmax_reaches_zero_and_one():
    x = torch.tensor([[8.0, 0.0, -8.0]])
    assert clipped_softmax(x, -0.1, 1.1).tolist() == [[1.0, 0.0, 0.0]]
    plain = torch.softmax(x, -1)
    torch.testing.assert_close(clipped_softmax(x, 0.0, 1.0), plain)


def test_sparsemax_is_the_projection_on_the_simplex():
    x = torch.tensor([[0.5, 0.3, -2.0]], dtype=torch.float64)
    torch.testing.assert_close(sparsemax(x), torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64))
    for alpha, expected in ((1.0, torch.softmax(x, -1)), (2.0, sparsemax(x))):
        torch.testing.assert_close(entmax(x, alpha), expected)
    # two algorithms of the package: sorting and bisection
    torch.testing.assert_close(entmax(x, 1.5), entmax(x, torch.tensor(1.5, dtype=torch.float64)))


@pytest.mark.parametrize("alpha", [1.05, 1.3, 1.9])
@pytest.mark.parametrize("size", [3, 64, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 100.0])
def test_float32_is_as_near_as_its_rounding(alpha, size, spread):
    x = spread * torch.randn(16, size, generator=torch.Generator().manual_seed(size))
    truth = entmax(x.double(), alpha)
    assert (entmax(x, alpha).double() - truth).abs().max() < 4e-7  # with 20 halvings up to 2e-6


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3)])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_no_entries(name, shape):
    assert NORMALIZERS[name](torch.zeros(shape)).shape == shape
    assert logsumexp_n(torch.zeros(3, 0), 1.0).tolist() == [0.0] * 3
    assert logsumexp_n(torch.zeros(2, 0), 0.0).tolist() == [-math.inf] * 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: softmax_n(x, -1.0), "n=-1.0"),
        (lambda x: softmax_n(x, math.nan), "n=nan"),
        (lambda x: clipped_softmax(x, 0.1, 1.0), "gamma=0.1"),
        (lambda x: clipped_softmax(x, -0.1, 0.9), "zeta=0.9"),
        (lambda x: clipped_softmax(x, -math.inf, 1.0), "gamma=-inf"),
        (lambda x: clipped_softmax(x, -0.1, math.inf), "zeta=inf"),
        (lambda x: entmax(x, 0.5), "alpha=0.5"),
        (lambda x: entmax(x, math.inf), "alpha=inf"),
        (lambda x: softmax_n(x, 1e39), "n=1e\\+39.*float32"),
        # one for each entry would be no normalization
        (lambda x: softmax_n(x, torch.ones(3)), r"n has shape \(3,\).*\(1,\)"),
        (lambda x: logsumexp_n(x, torch.ones(3)), r"n has shape \(3,\)"),
        (lambda x: clipped_softmax(x, -0.1, 1.0, torch.ones(3)), r"n has shape \(3,\)"),
        (lambda x: entmax(x, torch.full((3,), 1.5)), r"alpha has shape \(3,\)"),
        (lambda x: softmax_n(x.expand(2, 3), torch.ones(5, 1)), r"n has shape \(5, 1\).*\(2, 1\)"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call(torch.zeros(3))


@pytest.mark.parametrize("name", [*NORMALIZERS, "logsumexp"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_only_floating_point_scores_have_weights(name, dtype):
    function = NORMALIZERS.get(name, logsumexp_n)
    for x in (torch.tensor([1, 0, 1]).to(dtype), torch.zeros(0, dtype=dtype)):
        with pytest.raises(TypeError, match=str(dtype)):
            function(x)  # whole numbers came back: weights 0 and a cut logarithm
    with pytest.raises(TypeError, match="int64"):
        softmax1(torch.zeros(3), dtype=torch.int64)
    torch.testing.assert_close(softmax1(torch.tensor([1, 2]), dtype=torch.float32), softmax1(torch.tensor([1.0, 2.0])))


@pytest.mark.parametrize("function", [softmax1, logsumexp_n, sparsemax, entmax])
def test_a_dimension_that_is_not_there(function):
    for x, dim in ((torch.zeros(2, 3), 2), (torch.zeros(2, 3), -3), (torch.tensor(0.0), -1)):
        with pytest.raises(IndexError, match="Dimension"):
            function(x, dim=dim)


@pytest.mark.parametrize("dim", [0, -1])
def test_more_values_of_n_or_alpha_than_rows(dim):
    x = torch.randn(5, dtype=torch.float64)
    n, alpha = torch.tensor([[0.0], [1.0], [4.0]], dtype=torch.float64), torch.tensor([[1.2], [1.5]])
    torch.testing.assert_close(softmax_n(x, n, dim=dim), torch.stack([softmax_n(x, v) for v in (0.0, 1.0, 4.0)]))
    torch.testing.assert_close(logsumexp_n(x, n, dim=dim), torch.stack([logsumexp_n(x, v) for v in (0.0, 1.0, 4.0)]))
    expected = torch.stack([entmax(x, alpha[i]) for i in range(2)])
    torch.testing.assert_close(entmax(x, alpha, dim=dim), expected)


@pytest.mark.parametrize("distance", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12])
def test_entmax_near_softmax(distance):
    x = 3 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weights = entmax(x, 1.0 + distance)
    assert (weights.double() - entmax(x.double(), 1.0 + distance)).abs().max() < 1e-6
    assert (weights - torch.softmax(x, -1)).abs().max() < 2 * distance + 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_learned_alpha_may_come_to_one_and_go_again(dtype):
    # in half precision 1 + softplus(raw) is 1 long before raw is −∞: the weights were all equal, α's gradient NaN
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    alpha = torch.ones((), dtype=dtype, requires_grad=True)
    weights = entmax(x, alpha)
    assert (weights - torch.softmax(x, -1)).abs().max() < 2e-3
    upstream = weights.detach().double()  # sharper weights, larger α
    (grad,) = torch.autograd.grad((weights * upstream.to(dtype)).sum(), alpha)
    at, step = torch.tensor(1.01, dtype=torch.float64), 1e-4
    slope = (((entmax(x.double(), at + step) - entmax(x.double(), at - step)) * upstream).sum() / (2 * step)).item()
    assert grad.item() == pytest.approx(slope, rel=0.3)


@given(st.integers(1, 30), st.floats(0.01, 100), st.floats(-50, 20), st.integers(0, 999))
def test_softmax_n_properties(size, n, shift, seed):
    x = torch.randn(4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + shift
    p = softmax_n(x, n)
    assert (p >= 0).all()
    assert (p.sum(-1) < 1).all()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(softmax_n(x[:, order], n), p[:, order])
    torch.testing.assert_close(softmax_n(x, n), softmax_n(x - math.log(n), 1.0))
    torch.testing.assert_close(1 - p.sum(-1), n * torch.exp(-logsumexp_n(x, n)), atol=1e-9, rtol=1e-7)
