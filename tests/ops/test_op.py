"""The fused op as PyTorch sees it: opcheck, compile, export, autocast, checkpointing, second derivatives."""

import copy

import pytest
import torch
from reference import CASES, DEVICES, make, reference

from outeffhop import attention, explain
from outeffhop.ops.kernels import KERNELS


def _fused(device):
    return [name for name, kernel in KERNELS.items() if kernel.device == device]


FUSED = [(device, name) for device in DEVICES for name in _fused(device)]


def _qkv(device="cpu", dtype=torch.float32, length=33, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 4, length, 16)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(requires_grad) for _ in range(3)]


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_of_windows(packed):
    query, key, value = (t.detach()[:1] if packed else t.detach() for t in _qkv(length=32))
    cu = torch.tensor([0, 9, 32], dtype=torch.int32)
    lengths = (cu, cu, 23, 23) if packed else (None, None, 0, 0)
    band = False, 0.25, (7, 2), *lengths
    torch.library.opcheck(torch.ops.outeffhop.windows.default, (query, key, value, None, *band))
    out, lse = torch.ops.outeffhop.windows(query, key, value, None, *band)
    arguments = (torch.ones_like(out), query, key, value, None, out, lse, *band)
    torch.library.opcheck(torch.ops.outeffhop.windows_backward.default, arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "causal_learned_sink", "padding", "grouped", "wide_value", "odd_size"])
def test_compile(device, name):
    torch._dynamo.reset()  # each case compiles the same lines anew, and Dynamo counts
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    arguments = make(CASES[name], dtype, device)
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)}

    def function(tensors):
        return torch.sin(attention(**tensors, **rest))

    compiled = torch.compile(function, fullgraph=True)
    leaves = [t for t in tensors.values() if t.requires_grad]
    expected = function(tensors)
    found = compiled(tensors)
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    for a, b in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def test_compile_with_changing_lengths():
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, is_causal=True), fullgraph=True, dynamic=True)
    for length in (7, 33, 64):
        query, key, value = _qkv(length=length)
        torch.testing.assert_close(compiled(query, key, value), attention(query, key, value, is_causal=True))


class Module(torch.nn.Module):
    def __init__(self, backend="auto", **arguments):
        super().__init__()
        self.arguments = arguments | {"backend": backend}
        self.sink = torch.nn.Parameter(torch.linspace(-1, 1, 4))

    def forward(self, query, key, value):
        return attention(query, key, value, sink=self.sink, **self.arguments)


@pytest.mark.parametrize("backend", ["auto", "cpu", "eager"])
def test_export(backend):
    query, key, value = _qkv(requires_grad=False)
    module = Module(backend, is_causal=True)
    program = torch.export.export(module, (query, key, value))
    torch.testing.assert_close(program.module()(query, key, value), module(query, key, value))
    ops = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not any("outeffhop" in op for op in ops)  # it runs where this package is not installed
    # by default a program of public ops
    assert any("_for_cpu" in op for op in ops) == (backend == "cpu")


@pytest.mark.parametrize("is_causal", [False, True])
def test_onnx(tmp_path, is_causal):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    query, key, value = _qkv(requires_grad=False)
    module = Module(is_causal=is_causal)
    path = tmp_path / "attention.onnx"
    torch.onnx.export(module, (query, key, value), str(path), dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), (query, key, value), strict=True)}
    (found,) = session.run(None, feed)
    torch.testing.assert_close(torch.from_numpy(found), module(query, key, value), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast(device):
    query, key, value = _qkv(device)
    with torch.autocast(device, torch.bfloat16):
        out = attention(query, key, value)
        chosen = explain(query, key, value).chosen
    assert out.dtype == torch.bfloat16
    assert chosen in _fused(device)
    out.float().sum().backward()
    assert query.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), attention(query, key, value), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("device", "backend"), FUSED)
def test_second_derivative_is_refused_by_fused_backends(device, backend):
    query, key, value = _qkv(device, torch.float32 if device == "cpu" else torch.bfloat16)
    window = (7, 0) if KERNELS[backend].banded else None
    out = attention(query, key, value, window=window, backend=backend)
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="backend='eager'"):
        grad.sum().backward()


def test_second_derivative_of_eager():
    query, key, value = (t.double()[:1, :1, :3, :2].detach().requires_grad_() for t in _qkv())
    assert torch.autograd.gradgradcheck(lambda *t: attention(*t, backend="eager"), (query, key, value))


def test_torch_func_is_served_by_eager():
    query, key, value = (t.double().detach() for t in _qkv())

    def loss(query):
        return attention(query, key, value).square().sum()

    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(query), expected)
    _, tangent = torch.func.jvp(loss, (query,), (torch.ones_like(query),))
    torch.testing.assert_close(tangent, expected.sum())
    batched = torch.func.vmap(lambda q: attention(q[None], key[:1], value[:1]))(query)
    torch.testing.assert_close(batched[:, 0], attention(query, key[:1].expand_as(key), value[:1].expand_as(value)))
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.grad(lambda q: attention(q, key, value, backend="cpu").sum())(query)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_torch_func_inside_compile(transform):
    query, key, value = (t.double().detach() for t in _qkv())
    tangent = torch.ones_like(query)

    def function(query):
        if transform == "grad":
            return torch.func.grad(lambda q: attention(q, key, value).square().sum())(query)
        if transform == "jvp":
            return torch.func.jvp(lambda q: attention(q, key, value), (query,), (tangent,))[1]
        return torch.func.vmap(lambda q: attention(q[None], key[:1], value[:1]))(query)

    torch._dynamo.reset()
    found = torch.compile(function, fullgraph=True)(query)
    torch.testing.assert_close(found, function(query))
    assert found.abs().max() > 1e-3


def test_forward_mode_is_never_silently_zero():
    query, key, value = (t.double().detach() for t in _qkv())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, torch.ones_like(query))
        tangent = torch.autograd.forward_ad.unpack_dual(attention(dual, key, value)).tangent
    expected = torch.func.jvp(lambda q: reference(q, key, value)[0], (query,), (torch.ones_like(query),))[1]
    torch.testing.assert_close(tangent, expected)


def test_gradient_checkpointing():
    query, key, value = _qkv()
    checkpointed = torch.utils.checkpoint.checkpoint(attention, query, key, value, use_reentrant=False)
    found = torch.autograd.grad(checkpointed.sum(), (query, key, value))
    expected = torch.autograd.grad(attention(query, key, value).sum(), (query, key, value))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_deepcopy_of_a_module_that_calls_it():
    module = copy.deepcopy(Module())
    out = module(*_qkv())
    out.sum().backward()
    assert module.sink.grad.abs().sum() > 0


def test_inference_mode():
    query, key, value = _qkv(requires_grad=False)
    with torch.inference_mode():
        out = attention(query, key, value)
    torch.testing.assert_close(out, attention(query, key, value))
