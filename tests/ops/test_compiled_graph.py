"""What torch.compile makes of attention: PyTorch's own kernels and elementwise ops, forwards and backwards."""

import pytest
import torch
from reference import CASES, DEVICES, make
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from outeffhop import attention, explain

KERNEL_OPS = {
    "cudnn": "aten._scaled_dot_product_cudnn_attention",
    "cuda_flash": "aten._scaled_dot_product_flash_attention",
    "efficient": "aten._scaled_dot_product_efficient_attention",
    "cpu": "aten._scaled_dot_product_flash_attention_for_cpu",
    "cuda_window": "aten._flash_attention",
    "cpu_window": "outeffhop.windows",
}
NAMES = [
    "plain",
    "causal",
    "softmax",
    "causal_learned_sink",
    "padding_learned_sink",
    "masked_rows",
    "grouped",
    "odd_size",
    "wide_value",
    "window_learned_sink",
]


class Graphs:
    """A backend of torch.compile that keeps the forward and the backward graph."""

    def __init__(self):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=lambda module, _: self._keep(self.forward, module),
            bw_compiler=lambda module, _: self._keep(self.backward, module),
        )

    def _keep(self, graphs, module):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)


def calls(graph):
    """The ops of a graph that compute something."""
    found = [str(n.target) for n in graph.nodes if n.op == "call_function"]
    return [c for c in found if not any(view in c for view in ("getitem", "detach", "unsqueeze"))]


def compiled(arguments, dynamic=False):
    """The result and gradients of a compiled call, and its graphs."""
    torch._dynamo.reset()
    graphs = Graphs()
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)}

    def function(tensors):
        return attention(**tensors, **rest)

    found = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=graphs.backend)(tensors)
    leaves = [t for t in tensors.values() if t.requires_grad]
    loss = sum(t.sin().sum() for t in (found if isinstance(found, tuple) else [found]))
    return found, torch.autograd.grad(loss, leaves), graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("return_lse", [False, True])
def test_the_kernel_stands_in_the_graph_and_nothing_opaque(device, name, return_lse):
    arguments = make(CASES[name], torch.float32 if device == "cpu" else torch.bfloat16, device)
    arguments["return_lse"] = return_lse
    chosen = explain(**arguments).chosen
    _, _, graphs = compiled(arguments)
    (forward,), (backward,) = graphs.forward, graphs.backward
    for graph, op in ((forward, KERNEL_OPS[chosen]), (backward, f"{KERNEL_OPS[chosen]}_backward")):
        kernels = [c for c in calls(graph) if "attention" in c or "outeffhop" in c]
        assert [c.rpartition(".")[0].replace("_forward", "") for c in kernels] == [op]
        assert all(c.startswith(("aten.", "prims.")) for c in calls(graph) if c not in kernels)


@pytest.mark.parametrize("device", DEVICES)
def test_softmax1_adds_elementwise_ops_to_the_forward_and_none_to_the_backward(device):
    arguments = make(CASES["causal"], torch.float32 if device == "cpu" else torch.bfloat16, device)
    _, _, graphs = compiled(arguments | {"sink": 0.0})
    _, _, plain = compiled(arguments | {"sink": -torch.inf})
    (forward,), (backward,) = graphs.forward, graphs.backward
    more = calls(forward)
    for op in calls(plain.forward[0]):
        more.remove(op)
    assert set(more) <= {
        f"aten.{op}" for op in ("sigmoid.default", "mul.Tensor", "softplus.default", "_to_copy.default")
    }
    assert calls(backward) == calls(plain.backward[0])


@pytest.mark.parametrize("device", DEVICES)
def test_changing_lengths_keep_one_graph(device):
    torch._dynamo.reset()
    graphs = Graphs()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    function = torch.compile(
        lambda q, k, v: attention(q, k, v, is_causal=True), fullgraph=True, dynamic=True, backend=graphs.backend
    )
    for length in (17, 33, 64):
        query, key, value = (torch.randn(2, 3, length, 16, device=device, dtype=dtype) for _ in range(3))
        torch.testing.assert_close(function(query, key, value), attention(query, key, value, is_causal=True))
    assert len(graphs.forward) == 1


def test_without_gradients_nothing_is_computed_for_them():
    arguments = make(CASES["plain"], torch.float32, "cpu")
    torch._dynamo.reset()
    graphs = Graphs()
    query, key, value = (arguments[name].detach() for name in ("query", "key", "value"))
    torch.compile(attention, fullgraph=True, backend=graphs.backend)(query, key, value)
    assert "aten.sigmoid.default" in calls(graphs.forward[0])
    assert not any("softplus" in c or "logaddexp" in c for c in calls(graphs.forward[0]))


def test_checkpointing_inside_a_compiled_graph():
    torch._dynamo.reset()
    query, key, value = (torch.randn(2, 4, 33, 16, requires_grad=True) for _ in range(3))
    sink = torch.randn(4, requires_grad=True)

    def function(query, key, value, sink):
        return torch.utils.checkpoint.checkpoint(
            lambda *t: attention(*t[:3], sink=t[3]).sin(), query, key, value, sink, use_reentrant=False
        )

    leaves = query, key, value, sink
    found = torch.autograd.grad(torch.compile(function, fullgraph=True)(*leaves).sum(), leaves)
    expected = torch.autograd.grad(function(*leaves).sum(), leaves)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
