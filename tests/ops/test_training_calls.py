"""The backward of a call in training: by PyTorch's own node where it can be, by ours everywhere else."""

import math

import pytest
import torch
from reference import CASES, DEVICES, make, reference_run, run
from torch.utils.checkpoint import checkpoint

from outeffhop.ops import aten, attention, sink, sink_triton
from outeffhop.ops.kernels import KERNELS

OWN = "_AttendBackward"


def _leaves(device="cpu"):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 9, 8, generator=generator).to(device, dtype).requires_grad_() for _ in "qkv"]


def _gradients(leaves, attend=attention):
    return torch.autograd.grad(attend(*leaves).square().sum(), leaves)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({}, False),
        ({"sink": -math.inf}, False),
        ({"sink": 1.5, "is_causal": True}, False),
        ({"attn_mask": torch.ones(9, 9, dtype=torch.bool).tril()}, False),
        ({"sink": torch.zeros(3)}, True),
        ({"return_lse": True}, True),
        ({"window": (3, 0)}, True),
    ],
    ids=str,
)
def test_whose_node_it_is(device, more, own):
    more = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in more.items()}
    out = attention(*_leaves(device), **more)
    out = out[0] if isinstance(out, tuple) else out
    assert (type(out.grad_fn).__name__ == OWN) == own
    assert (
        own
        or "AttentionBackward" in type(out.grad_fn).__name__
        or "AttentionForCpuBackward" in type(out.grad_fn).__name__
    )


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if "learned" not in n and "window" not in n])
@pytest.mark.parametrize("kept", [True, False])
def test_both_are_exact(name, kept, monkeypatch):
    monkeypatch.setattr(aten, "_KEPT", {"cpu": kept})
    arguments = make(CASES[name], torch.float64, "cpu")
    weights = torch.randn(*arguments["query"].shape[:-1], arguments["value"].shape[-1], dtype=torch.float64)
    found, truth = run(attention, arguments, weights), reference_run(arguments, weights)
    for key, expected in truth.items():
        torch.testing.assert_close(found[key], expected, msg=key)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keeps", [True, False])
def test_a_node_is_trusted_once_it_was_seen_to_save_the_tensors(device, keeps, monkeypatch):
    monkeypatch.setattr(aten, "_KEPT", {})
    if not keeps:
        monkeypatch.setattr(aten, "_keeps", lambda node, tensor: False)  # a PyTorch that saves copies
    leaves = _leaves(device)
    for _ in range(2):
        out = attention(*leaves)
        assert (type(out.grad_fn).__name__ == OWN) != keeps
    ((name, kept),) = aten._KEPT.items()
    assert name in KERNELS
    assert kept == keeps


def test_a_copy_is_not_what_was_saved():
    leaf = torch.randn(3, requires_grad=True)
    out = leaf.exp()  # its node saves its result
    assert aten._keeps(out.grad_fn, out)
    assert not aten._keeps(out.grad_fn, out.clone())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["checkpoint", "save_on_cpu", "copies"])
def test_hooks_on_saved_tensors_see_the_sink(device, how):
    """Such a hook runs when a node saves, which is before the sink is in the output."""
    leaves = _leaves(device)
    expected = _gradients(leaves)
    if how == "checkpoint":
        found = _gradients(leaves, lambda *t: checkpoint(attention, *t, use_reentrant=False))
    elif how == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            found = _gradients(leaves)
    else:
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            found = _gradients(leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_changed_before_the_backward_is_refused(device):
    out = attention(*_leaves(device))
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_graph_twice_and_some_leaves_only(device):
    query, key, value = _leaves(device)
    expected = _gradients([query, key, value])
    out = attention(query, key, value)
    for _ in range(2):
        found = torch.autograd.grad(out.square().sum(), (query, key, value), retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    (alone,) = torch.autograd.grad(attention(query.detach(), key, value.detach()).square().sum(), [key])
    torch.testing.assert_close(alone, expected[1], rtol=0, atol=0)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("without_keys", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_triton_takes_large_outputs_and_those_with_rows_without_keys(learned, without_keys, large, monkeypatch):
    """By a stand-in for the kernels: on a GPU a small call is faster without Triton."""
    asked = []

    def kernel(out, lse, sink):
        asked.append("apply_sink")
        return out, lse

    def row_dot(a, b):
        asked.append("row_dot")
        return (a * b).sum(-1)

    monkeypatch.setattr(sink_triton, "serves", lambda out: True)
    monkeypatch.setattr(sink_triton, "apply_sink", kernel)
    monkeypatch.setattr(sink_triton, "row_dot", row_dot)
    out = torch.randn(2, 3, 5, 8)
    monkeypatch.setattr(sink, "_SMALL", out.numel() - 1 if large else out.numel())
    lse, s = torch.randn(2, 3, 5), torch.randn(3) if learned else 0.5
    sink.apply_sink(out, lse, s, without_keys)
    assert asked == (["apply_sink"] if large or without_keys else [])
    if learned:
        asked.clear()
        grad = torch.randn_like(out)
        found = sink.sink_gradient(grad, None, out, lse, s)
        assert asked == (["row_dot"] if large else [])
        no_op = torch.exp(s[:, None] - lse).double()
        torch.testing.assert_close(found, -(no_op * (grad.double() * out.double()).sum(-1)).sum((0, 2)).float())


@pytest.mark.parametrize("s", [0.0, -1.5, "learned"])
@pytest.mark.parametrize("without_keys", [False, True])
def test_in_place_is_the_same_in_the_same_memory(s, without_keys):
    s = torch.randn(3) if s == "learned" else s
    out, lse = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5)
    if without_keys:
        lse[0, 1, 2], lse[1, 0, 0] = -math.inf, math.inf
    wanted = sink.apply_sink(out.clone(), lse.clone(), s, without_keys)
    memory = lse.data_ptr()
    found = sink.apply_sink(out, lse, s, without_keys, in_place=True)
    assert found[1].data_ptr() == memory
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_a_learned_sink_of_any_dtype(device, dtype, masked):
    """Its own dtype, narrower or wider than the logsumexp's, changes neither the result's nor the gradients'."""
    leaves = [*_leaves(device), torch.tensor([-1.0, 0.5, 2.0], device=device, dtype=dtype).requires_grad_()]
    mask = torch.ones(9, 9, dtype=torch.bool, device=device).tril(-1) if masked else None  # query 0 sees no key
    weights = torch.randn(2, 3, 9, 8)
    arguments = dict(zip(("query", "key", "value", "sink"), leaves, strict=True), attn_mask=mask)
    found, truth = run(attention, arguments, weights), reference_run(arguments, weights)
    out, lse = attention(**arguments, return_lse=True)
    assert (out.dtype, lse.dtype) == (leaves[0].dtype, torch.float32)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.dtype for g in grads] == [t.dtype for t in leaves]
    for name, expected in truth.items():
        narrow = device == "cuda" or (name == "grad_sink" and dtype.itemsize == 2)
        close = {"atol": 3e-2, "rtol": 3e-2} if narrow else {"atol": 1e-5, "rtol": 1e-5}
        torch.testing.assert_close(found[name], expected, **close)
