"""Every backend against an independent float64 reference: outputs and all gradients, every dtype and mask."""

import math
from functools import partial

import pytest
import torch
from reference import CASES, DEVICES, Case, make, reference_run, replace, run

from outeffhop.ops import attention, explain
from outeffhop.ops.dispatch import BACKENDS
from outeffhop.ops.kernels import KERNELS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def _weights(arguments):
    generator = torch.Generator().manual_seed(1)
    query, value = arguments["query"], arguments["value"]
    out = torch.randn(*query.shape[:-1], value.shape[-1], generator=generator, dtype=torch.float64)
    lse = torch.randn(query.shape[:-1], generator=generator, dtype=torch.float64)
    return out.to(query.device), lse.to(query.device)


def _assert_as_exact_as_eager(found, eager, truth, dtype, context, kernel_error):
    """At most twice eager's error; where eager is right to rounding, to rounding as well.

    PyTorch's CPU kernel takes a faster, rougher exp in float32 and is itself up to three times as far
    off as eager when scores are large. There, what it makes of plain softmax is the measure, with a
    quarter for the sink's own rounding.
    """
    assert found.keys() == truth.keys() == eager.keys()
    for name, expected in truth.items():
        infinite = torch.isinf(expected)
        assert torch.equal(found[name][infinite], expected[infinite]), f"{context}: {name}"
        norm = expected[~infinite].norm()
        error = (found[name] - expected)[~infinite].norm()
        allowed = 2 * (eager[name] - expected)[~infinite].norm() + 2 * torch.finfo(dtype).eps * norm + 1e-300
        if error > allowed and dtype == torch.float32:
            allowed = torch.maximum(allowed, 1.25 * kernel_error() * norm)
        assert error <= allowed, f"{context}: {name} is off by {error / norm:.1e}, allowed {allowed / norm:.1e}"


def _error_of_plain_softmax(arguments, weights):
    """The largest relative error of PyTorch's own attention, over its output and gradients, in this call."""
    plain = {k: v for k, v in arguments.items() if k not in ("sink", "return_lse", "window")}
    truth = reference_run(plain | {"sink": -math.inf}, weights)
    found = run(torch.nn.functional.scaled_dot_product_attention, plain, weights)
    return max((found[name] - expected).norm() / expected.norm() for name, expected in truth.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_and_gradients(device, backend, name, dtype):
    _compare(device, backend, name, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_logsumexp_and_its_gradient(device, backend, name, dtype):
    _compare(device, backend, name, dtype, return_lse=True)


def _compare(device, backend, name, dtype, return_lse=False):
    case = CASES[name]
    arguments = make(case, dtype, device) | {"return_lse": return_lse}
    if explain(**arguments).reasons[backend] is not None:
        with pytest.raises(ValueError, match="cannot serve this call"):
            attention(**arguments, backend=backend)
        return
    # a sink's gradient is a few numbers, each a sum that cancels, and so is one query's: their errors are compared over
    # several draws, more in double precision, where they are as small as those of the truth
    draws = 32 if dtype == torch.float64 else 8
    few = "learned" in str(case.arguments.get("sink")) or case.shape[2] == 1
    seeds = range(draws) if few else range(1)
    runs = []
    for seed in seeds:
        arguments = make(case, dtype, device, seed) | {"return_lse": return_lse}
        weights = _weights(arguments)[: 1 + return_lse]
        runs.append(
            (
                run(lambda **a: attention(**a, backend=backend), arguments, *weights),
                run(lambda **a: attention(**a, backend="eager"), arguments, *weights),
                reference_run(arguments, *weights),
            )
        )
    found, eager, truth = ({key: torch.stack([r[i][key] for r in runs]) for key in runs[0][i]} for i in range(3))
    plain_error = partial(_error_of_plain_softmax, arguments, weights[0])
    _assert_as_exact_as_eager(found, eager, truth, dtype, f"{backend}, {name}", plain_error)


@pytest.mark.parametrize("backend", ["auto", "padded", "eager"])
@pytest.mark.parametrize(
    "name", ["causal_learned_sink", "masked_rows_learned_sink", "grouped", "wide_value", "window_learned_sink"]
)
def test_gradcheck(backend, name):
    arguments = make(CASES[name], torch.float64, "cpu")
    small = {k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)}
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    for k in ("query", "key", "value"):  # a corner is enough, and numerical differentiation is slow
        tensors[k] = tensors[k][:1, :, :4, :6].detach().clone().requires_grad_()
    if "attn_mask" in arguments:
        small["attn_mask"] = arguments["attn_mask"][:1, :, :4, :4]

    def function(*values):
        return attention(**dict(zip(tensors, values, strict=True)), **small, backend=backend)

    assert torch.autograd.gradcheck(function, tuple(tensors.values()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_logsumexp_gradient_is_not_dropped(device, backend):
    # one key: out = 2·sigmoid(q), so dq = 2·σ(1)(1 − σ(1)); scaling softmax's output under autograd gives 0
    dtype = torch.float64 if device == "cpu" else torch.float32
    if backend in ("cudnn", "cuda_flash"):
        dtype = torch.bfloat16
    query = torch.ones(1, 1, 1, 1, device=device, dtype=dtype, requires_grad=True)
    key, value = torch.ones_like(query).detach(), torch.full_like(query, 2.0).detach()
    if explain(query, key, value, scale=1.0).reasons[backend] is not None:
        pytest.skip(f"{backend} does not serve {device}")
    out = attention(query, key, value, scale=1.0, backend=backend)
    (grad,) = torch.autograd.grad(out, query)
    assert grad.item() == pytest.approx(0.39322387, rel=1e-6 if dtype != torch.bfloat16 else 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_dropout_keeps_the_mean_and_its_gradient(device, backend):
    dtype = torch.float32 if backend in ("padded", "eager", "efficient", "cpu") else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 2, 64, 16, generator=generator).to(device, dtype) for _ in range(2))
    value = torch.ones(2, 2, 64, 16, device=device, dtype=dtype, requires_grad=True)
    if explain(query, key, value, dropout_p=0.25).reasons[backend] is not None:
        pytest.skip(f"{backend} has no dropout on {device}")
    torch.manual_seed(0)
    out = attention(query, key, value, dropout_p=0.25, backend=backend)
    plain = attention(query, key, value, backend="eager")
    assert not torch.allclose(out, plain, atol=1e-2)
    assert out.mean().item() == pytest.approx(plain.mean().item(), rel=0.05)
    # the backward replays the forward's dropout: out is linear in value, so ⟨∂out, value⟩ = out
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))
    assert (grad * value).sum().item() == pytest.approx(out.sum().item(), rel=1e-3 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize(
    ("queries", "keys", "batch", "size"), [(0, 5, 2, 4), (5, 0, 2, 4), (0, 0, 2, 4), (3, 3, 0, 4), (3, 3, 2, 0)]
)
def test_tensors_without_elements(queries, keys, batch, size):
    query = torch.randn(batch, 2, queries, size, requires_grad=True)
    key, value = (torch.randn(batch, 2, keys, d, requires_grad=True) for d in (size, 3))
    out, lse = attention(query, key, value, return_lse=True, sink=0.5)
    assert out.shape == (batch, 2, queries, 3)
    if keys == 0:
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, 0.5))
    (out.sum() + lse.sum()).backward()
    assert query.grad.shape == query.shape
    assert torch.isfinite(query.grad).all()


def test_mask_that_requires_a_gradient_gets_it():
    arguments = make(CASES["additive_mask"], torch.float64, "cpu")
    mask = arguments["attn_mask"].requires_grad_()
    out_weights, _ = _weights(arguments)
    assert explain(**arguments).chosen not in ("cpu",)
    found = run(attention, arguments, out_weights)
    truth = reference_run(arguments, out_weights)
    assert torch.allclose(found["grad_attn_mask"], truth["grad_attn_mask"])
    assert mask.requires_grad


def _far_from_zero(shape):  # half precision knows 300 to 0.25 (float16) or 2 (bfloat16)
    return 300 + torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _lowest(shape):  # rows of the lowest number, as libraries of models write them: −inf in half precision
    mask = _far_from_zero(shape)
    mask[..., 3, :] = torch.finfo(torch.float32).min
    return mask


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "padded", "eager"])
@pytest.mark.parametrize("make_mask", [_far_from_zero, _lowest])
@pytest.mark.parametrize("sink", [-math.inf, 0.0, "learned"])
def test_a_mask_wider_than_the_query_is_not_rounded(dtype, backend, make_mask, sink):
    arguments = make(Case((2, 2, 9, 11, 8), arguments={"sink": sink}), dtype, "cpu")
    arguments["attn_mask"] = make_mask((1, 2, 9, 11))
    arguments["return_lse"] = backend != "padded"
    weights = _weights(arguments)[: 1 + arguments["return_lse"]]
    found = run(lambda **a: attention(**a, backend=backend), arguments, *weights)
    truth = reference_run(arguments, *weights)
    if make_mask is _lowest and sink == -math.inf:
        # backwards, the reference's too, take exp(score − lse), and in −3.4e38 the log of the number of keys is lost
        truth = {name: truth[name] for name in ("out", "lse") if name in truth}
    for name, expected in truth.items():
        # as far off as half precision is for scores near 1, not near 300; eager rounds those before the mask
        error = (found[name] - expected).norm() / (expected.norm() + 1e-30)
        assert error < 8 * torch.finfo(dtype).eps, f"{name} is off by {error:.1e}"


def test_where_a_kernel_rounds_the_mask_the_logsumexp_is_of_what_is_left(monkeypatch):
    # as the CUDA kernels do; the lowest number became −inf, and the row's logsumexp log 2
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], wide_bias=False))
    query, key, value = (torch.randn(1, 2, 4, 8, dtype=torch.bfloat16) for _ in range(3))
    out, lse = attention(query, key, value, _lowest((4, 4)), return_lse=True, backend="cpu")
    assert torch.equal(lse[..., 3], torch.zeros(1, 2))
    assert torch.equal(out[..., 3, :], torch.zeros(1, 2, 8, dtype=torch.bfloat16))


def test_autocast_takes_the_mask_along():
    query, key, value = (torch.randn(1, 2, 4, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(query, key, value, _far_from_zero((4, 4)), sink=-math.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, _far_from_zero((4, 4)))
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_other_numbers_of_dimensions(dims):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 2, 9, 8)[-dims:]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    out, lse = attention(query, key, value, return_lse=True, is_causal=True)
    from reference import reference

    expected = (
        reference(query[None], key[None], value[None], is_causal=True)
        if dims == 2
        else reference(query, key, value, is_causal=True)
    )
    assert torch.allclose(out, expected[0].reshape(out.shape))
    assert lse.shape == shape[:-1]
    assert torch.allclose(lse, expected[1].reshape(lse.shape))


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("backend", ["cudnn", "cuda_flash", "efficient"])
@pytest.mark.parametrize("name", ["plain", "causal_learned_sink", "padding_learned_sink", "masked_rows", "scalar_sink"])
def test_without_triton(backend, name, monkeypatch):
    from outeffhop.ops import sink_triton

    monkeypatch.setattr(sink_triton, "triton", None)
    for test in (test_outputs_and_gradients, test_logsumexp_and_its_gradient):
        test("cuda", backend, name, torch.bfloat16)
