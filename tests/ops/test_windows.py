"""Windows and packed batches: each sequence alone is the truth, and the CUDA kernel's layouts are held to it."""

import math

import pytest
import torch
from measuring import largest_allocation
from reference import DEVICES, reference

from outeffhop import functional
from outeffhop.ops import attention, attention_varlen, kernels
from outeffhop.ops.eager import eager_attention
from outeffhop.ops.kernels import KERNELS, Options, Saved
from outeffhop.ops.probe import watching
from outeffhop.ops.window import Packed, rows_without_keys, visible

LENGTHS = [(5, 5), (0, 3), (1, 1), (4, 0), (70, 70), (3, 9), (9, 4), (0, 0)]  # queries and keys of each sequence


def _cu(lengths, device="cpu"):
    return [torch.tensor([0, *side], device=device).cumsum(0) for side in zip(*lengths, strict=True)]


def _batch(lengths, dtype=torch.float64, device="cpu", heads=4, groups=2):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    shapes = (queries, heads, 16), (keys, groups, 16), (keys, groups, 8)
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]
    sink = torch.randn(heads, generator=generator, dtype=torch.float64).to(device)
    return [t.requires_grad_() for t in (*tensors, sink if dtype == torch.float64 else sink.float())]


def _each_alone(query, key, value, sink, lengths, **arguments):
    """(output [total, H, Dv], lse [H, total]) by the reference, one sequence after the other."""
    outs, lses, q, k = [], [], 0, 0
    for queries, keys in lengths:
        parts = query[q : q + queries], key[k : k + keys], value[k : k + keys]
        out, lse = reference(
            *(t.transpose(0, 1) for t in parts), sink=sink, enable_gqa=True, offset=keys - queries, **arguments
        )
        outs, lses, q, k = [*outs, out.transpose(0, 1)], [*lses, lse], q + queries, k + keys
    return torch.cat(outs), torch.cat(lses, -1)


def _with_gradients(out, lse, leaves):
    weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape) for t in (out, lse)]
    loss = (out * weights[0]).sum() + (lse * weights[1]).sum()
    return [out, lse, *torch.autograd.grad(loss, leaves)]


BANDS = [
    {},
    {"is_causal": True},
    {"window": (2, 3)},
    {"window": (6, -1), "is_causal": True},
    {"window": (0, 0)},
    {"window": (None, 2)},
]


@pytest.mark.parametrize("window", [None, (-1, -1), (0, 0), (1, 0), (0, -1), (-1, 0), (2, 3)])
@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("keys", [1, 4, 9])
def test_queries_without_keys_are_those_that_see_none(window, queries, keys):
    for is_causal in (False, True) if window is None else (False,):
        place = (queries, keys, is_causal, window, None, torch.device("cpu"))
        seen = visible(*place)
        expected = torch.zeros(queries, dtype=torch.bool) if seen is None else ~seen.any(-1)
        assert torch.equal(rows_without_keys(*place), expected)


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_a_watch_sees_windows_as_a_mask(band):
    """And so does attention with any function of the scores."""
    query, key, value = (torch.randn(2, 3, 9, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    seen = []
    with watching(lambda call, lse, weights: seen.append(call)):
        found = attention(query, key, value, **band)
        by_scores, weights = eager_attention(query, key, value, functional.softmax1, **band)
    torch.testing.assert_close(found, attention(query, key, value, **band))
    torch.testing.assert_close(by_scores, found)
    for call in seen:
        assert call.window is None
        told = attention(query, key, value, call.mask, is_causal=call.is_causal)
        torch.testing.assert_close(told, found)
    torch.testing.assert_close(weights @ value, found)


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize("backend", ["cpu_window", "eager"])
def test_a_packed_sequence_is_that_sequence_alone(band, backend):
    leaves = _batch(LENGTHS)
    *tensors, sink = leaves
    found = attention_varlen(
        *tensors, *_cu(LENGTHS), 70, 70, enable_gqa=True, sink=sink, return_lse=True, backend=backend, **band
    )
    expected = _each_alone(*leaves, LENGTHS, **band)
    for a, b in zip(_with_gradients(*found, leaves), _with_gradients(*expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype):
    *tensors, sink = _batch(LENGTHS, dtype)
    out = attention_varlen(*tensors, *_cu(LENGTHS), 70, 70, is_causal=True, enable_gqa=True, sink=sink)
    expected, _ = _each_alone(*(t.double() for t in (*tensors, sink)), LENGTHS, is_causal=True)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=16 * torch.finfo(dtype).eps, rtol=0)


def test_a_query_without_keys_gets_zero_and_the_sink():
    *tensors, sink = _batch(LENGTHS)
    out, lse = attention_varlen(*tensors, *_cu(LENGTHS), 70, 70, enable_gqa=True, sink=sink, return_lse=True)
    rows = slice(6, 10)  # of the sequence with four queries and no key
    assert torch.equal(out[rows], torch.zeros_like(out[rows]))
    assert torch.equal(lse[:, rows], sink[:, None].expand(-1, 4))


def _flash_forward(query, key, value, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, debug, *, scale, **window):
    """aten::_flash_attention_forward with its layouts, by the reference: [B, L, H, D], or [total, H, D]."""
    band = (window["window_size_left"], window["window_size_right"])
    arguments = dict(is_causal=is_causal, scale=scale, window=band)
    with torch.no_grad():
        if cu_q is None:
            heads_first = (t.transpose(1, 2) for t in (query, key, value))
            out, lse = reference(*heads_first, sink=-math.inf, enable_gqa=True, **arguments)
            out = out.transpose(1, 2)
        else:
            lengths = list(zip(cu_q.diff().tolist(), cu_k.diff().tolist(), strict=True))
            out, lse = _each_alone(query, key, value, -math.inf, lengths, **arguments)
    lse = torch.where(torch.isneginf(lse), math.inf, lse)  # as the CUDA kernel marks a row without keys
    empty = torch.empty(0, dtype=torch.int64)
    return out.contiguous(), lse.contiguous(), empty, empty, empty


def _flash_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng, unused, *, scale, **window
):
    """aten::_flash_attention_backward: from ``out`` and ``lse`` as it gets them, like the kernel."""
    lead = cu_q is None
    o = Options(
        0.0,
        is_causal,
        scale,
        (window["window_size_left"], window["window_size_right"]),
        None if lead else Packed(cu_q, cu_k, max_q, max_k),
    )
    if o.window == (-1, -1):
        o = o._replace(window=None)
    grad, query, key, value, out = (
        t.transpose(1, 2) if lead else t.transpose(0, 1)[None] for t in (grad, query, key, value, out)
    )
    saved = Saved(out, lse if lead else lse[None], rng, rng)
    grads = KERNELS["cpu_window"].backward(grad, query, key, value, None, saved, o)
    return tuple((g.transpose(1, 2) if lead else g[0].transpose(0, 1)).contiguous() for g in grads)


@pytest.fixture
def flash_on_the_cpu(monkeypatch):
    """The CUDA kernel's code on CPU tensors, over an op of the same signature."""

    class Ops:
        _flash_attention_forward = staticmethod(_flash_forward)
        _flash_attention_backward = staticmethod(_flash_backward)

        def __getattr__(self, name):
            return getattr(torch.ops.aten, name)

    from dataclasses import replace

    monkeypatch.setattr(kernels, "aten", Ops())
    kernel = replace(KERNELS["cuda_window"], device="cpu", dtypes=(torch.float64,))
    monkeypatch.setitem(KERNELS, "cuda_window", kernel)
    from outeffhop.ops import dispatch

    backend = replace(dispatch.BACKENDS["cuda_window"], why_not=kernel.why_not)
    monkeypatch.setitem(dispatch.BACKENDS, "cuda_window", backend)


@pytest.mark.usefixtures("flash_on_the_cpu")
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_layouts_and_gradients_of_the_cuda_kernel_packed(band):
    leaves = _batch(LENGTHS)
    *tensors, sink = leaves
    found = attention_varlen(
        *tensors, *_cu(LENGTHS), 70, 70, enable_gqa=True, sink=sink, return_lse=True, backend="cuda_window", **band
    )
    expected = _each_alone(*leaves, LENGTHS, **band)
    for a, b in zip(_with_gradients(*found, leaves), _with_gradients(*expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("flash_on_the_cpu")
@pytest.mark.parametrize("band", [b for b in BANDS if "window" in b], ids=str)
@pytest.mark.parametrize("return_lse", [False, True])
def test_layouts_and_gradients_of_the_cuda_kernel(band, return_lse):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, h, 33, 13, generator=generator, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)
    )
    leaves = query, key, value, torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    results = []
    for backend in ("cuda_window", "eager"):
        arguments = dict(enable_gqa=True, sink=leaves[-1], backend=backend, **band)
        if return_lse:
            results.append(_with_gradients(*attention(*leaves[:3], **arguments, return_lse=True), leaves))
        else:
            out = attention(*leaves[:3], **arguments)
            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_packed_batches_on_cuda(band):
    leaves = _batch(LENGTHS, torch.bfloat16, "cuda")
    *tensors, sink = leaves
    found = attention_varlen(
        *tensors,
        *_cu(LENGTHS, "cuda"),
        70,
        70,
        enable_gqa=True,
        sink=sink,
        return_lse=True,
        backend="cuda_window",
        **band,
    )
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = _each_alone(*wide, LENGTHS, **band)
    for a, b in zip(_with_gradients(*found, leaves), _with_gradients(*expected, wide), strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-2, rtol=5e-2)


on_cuda = pytest.mark.skipif("cuda" not in DEVICES, reason="there is no CUDA device")


@on_cuda
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [130, 1000])
def test_a_layer_like_that_of_gpt_oss_on_cuda(packed, length):
    """64 query heads on 8 key heads, a window of 128 and learned sinks: as exact as eager attention in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (length, 64, 64), (length, 8, 64), (length, 8, 64)
    leaves = [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes]
    leaves = [t.requires_grad_() for t in (*leaves, torch.randn(64, generator=generator, device="cuda"))]
    weights = torch.randn(length, 64, 64, generator=generator, device="cuda", dtype=torch.float64)
    band = dict(is_causal=True, window=(127, 0), enable_gqa=True)
    cut = length // 3
    cu = torch.tensor([0, cut, length] if packed else [0, length], device="cuda")

    def run(dtype, backend):
        query, key, value, sink = own = [
            t.detach().to(dtype if t.dtype == torch.bfloat16 else torch.promote_types(dtype, t.dtype)).requires_grad_()
            for t in leaves
        ]
        if packed:
            out = attention_varlen(query, key, value, cu, cu, length, length, sink=sink, backend=backend, **band)
        else:
            rows = (t.transpose(0, 1)[None] for t in (query, key, value))
            out = attention(*rows, sink=sink, backend=backend, **band)[0].transpose(0, 1)
        grads = torch.autograd.grad((out * weights.to(dtype)).sum(), own)
        return [t.double() for t in (out, *grads)]

    exact, eager, fused = (
        run(dtype, name)
        for dtype, name in ((torch.float64, "eager"), (torch.bfloat16, "eager"), (torch.bfloat16, "cuda_window"))
    )
    for name, truth, plain, found in zip(("out", "query", "key", "value", "sink"), exact, eager, fused, strict=True):
        error, allowed = (found - truth).norm() / truth.norm(), (plain - truth).norm() / truth.norm()
        assert error <= 2 * allowed + 4e-3, f"{name}: {error:.1e}, eager {allowed:.1e}"


@on_cuda
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_replayed_on_cuda(packed):
    torch.manual_seed(0)
    query, key = (torch.randn(256, 4, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    value = torch.ones(256, 4, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    options = dict(window=(63, 0), dropout_p=0.25, backend="cuda_window")
    if packed:
        cu = torch.tensor([0, 100, 256], device="cuda")
        out = attention_varlen(query, key, value, cu, cu, 156, 156, **options)
        plain = attention_varlen(query, key, value, cu, cu, 156, 156, window=(63, 0))
    else:
        rows = [t.transpose(0, 1)[None] for t in (query, key, value)]
        out, plain = attention(*rows, **options), attention(*rows, window=(63, 0))
    assert not torch.allclose(out, plain, atol=1e-2)
    assert out.float().mean().item() == pytest.approx(plain.float().mean().item(), rel=0.05)
    (grad,) = torch.autograd.grad(out, value, torch.ones_like(out))  # out is linear in value
    assert (grad * value).float().sum().item() == pytest.approx(out.float().sum().item(), rel=2e-2)


@on_cuda
def test_memory_is_linear_on_cuda():
    """At 16,384 tokens the pairs of one head alone would take 512 MiB."""
    length = 16384
    query, key, value = (
        torch.randn(1, heads, length, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (8, 2, 2)
    )
    sink = torch.zeros(8, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(query, key, value, window=(127, 0), enable_gqa=True, sink=sink).sum().backward()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 12 * query.numel() * query.element_size()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 3])}, ValueError, ["cu_seqlens_q=[0, 3]", "from 0 to 6"]),
        ({"cu_seqlens_q": torch.tensor([0, 4, 2, 6])}, ValueError, ["entries"]),
        ({"cu_seqlens_q": torch.tensor([0.0, 6.0])}, TypeError, ["cu_seqlens_q", "float32"]),
        ({"max_q": 5}, ValueError, ["max_q=5", "6"]),
        ({"query": torch.ones(1, 2, 6, 8)}, ValueError, ["query", "(1, 2, 6, 8)", "[total, heads, size]"]),
        ({"backend": "cpu"}, ValueError, ["'cpu'", "no packed batch"]),
    ],
)
def test_wrong_packed_batches_are_refused_in_words(change, error, words):
    tensors = {name: torch.ones(6, 2, 8) for name in ("query", "key", "value")}
    cu = torch.tensor([0, 6])
    arguments = {**tensors, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_q": 6, "max_k": 6} | change
    with pytest.raises(error) as caught:
        attention_varlen(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


def test_a_window_compiles_as_one_graph():
    torch._dynamo.reset()
    query, key, value = (torch.randn(1, 2, 150, 8, requires_grad=True) for _ in range(3))

    def function(query):
        return attention(query, key, value, window=(7, 0))

    found, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(query), function(query)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(o.sum(), (query, key)) for o in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("band", [{}, {"window": (2, 3)}, {"is_causal": True}], ids=str)
def test_a_packed_batch_compiles_as_one_graph(band):
    torch._dynamo.reset()
    *tensors, sink = _batch(LENGTHS)

    def function(*tensors):
        return attention_varlen(*tensors, *_cu(LENGTHS), 70, 70, enable_gqa=True, sink=sink, **band)

    found, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors), function(*tensors)
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), tensors) for o in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_memory_is_linear():
    """No allocation of a call is as large as the pairs of queries and keys are; a mask of them all would be."""
    length = 2048
    query, key, value = (torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3))
    band = torch.ones(length, length, dtype=torch.bool).tril().triu(-63)

    def windowed():
        attention(query, key, value, window=(63, 0)).sum().backward()

    def masked():
        attention(query, key, value, attn_mask=band.clone()).sum().backward()

    assert largest_allocation(masked) >= length * length  # so the measurement sees such a tensor
    assert largest_allocation(windowed) < length * length / 2
