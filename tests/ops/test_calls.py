"""Wrong calls are refused in words; explain says who serves, and why the others do not."""

import math

import pytest
import torch

from outeffhop import attention, explain
from outeffhop.ops import kernels as kernels_module
from outeffhop.ops.dispatch import BACKENDS
from outeffhop.ops.kernels import KERNELS

Q = torch.randn(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(query=Q, key=Q[..., :4], value=Q), ValueError, ["size 8", "key 4"]),
        (dict(query=Q[..., :4], key=Q, value=Q), ValueError, ["size 4", "key 8"]),
        (dict(query=Q, key=Q, value=Q[:, :, :3]), ValueError, ["key has shape (2, 4, 5, 8)", "value (2, 4, 3, 8)"]),
        (dict(query=Q, key=Q[:1], value=Q[:1]), ValueError, ["batch shape (2,)", "(1,)", "expand"]),
        (dict(query=Q, key=Q[:, :2], value=Q[:, :2]), ValueError, ["4 heads", "key 2", "enable_gqa=True"]),
        (dict(query=Q, key=Q[:, :3], value=Q[:, :3], enable_gqa=True), ValueError, ["multiple"]),
        (dict(query=Q, key=Q[0], value=Q[0]), ValueError, ["key", "(4, 5, 8)", "dimensions"]),
        (dict(query=Q[0, 0, 0], key=Q[0, 0, 0], value=Q[0, 0, 0]), ValueError, ["query", "(8,)"]),
        (dict(query=Q, key=Q.double(), value=Q), TypeError, ["key", "float64", "float32"]),
        (dict(query=Q.long(), key=Q.long(), value=Q.long()), TypeError, ["query", "int64"]),
        (
            dict(query=Q, key=Q, value=Q, attn_mask=torch.ones(4, 5) > 0),
            ValueError,
            ["attn_mask", "(4, 5)", "(2, 4, 5, 5)"],
        ),
        (dict(query=Q, key=Q, value=Q, attn_mask=torch.ones(5, 5).long()), TypeError, ["attn_mask", "int64", "bool"]),
        (dict(query=Q, key=Q, value=Q, dropout_p=1.5), ValueError, ["dropout_p=1.5"]),
        (dict(query=Q, key=Q, value=Q, sink=math.nan), ValueError, ["sink=nan", "softmax1"]),
        (dict(query=Q, key=Q, value=Q, sink=math.inf), ValueError, ["sink=inf"]),
        (dict(query=Q, key=Q, value=Q, sink=torch.zeros(3)), ValueError, ["sink", "(3,)", "(4,)"]),
        (dict(query=Q, key=Q, value=Q, sink=torch.zeros(4, 1)), ValueError, ["sink", "(4, 1)"]),
        (dict(query=Q, key=Q, value=Q, sink=torch.zeros(4).long()), TypeError, ["sink", "int64"]),
        (dict(query=Q, key=Q, value=Q, sink=torch.full((4,), math.nan)), ValueError, ["sink", "NaN"]),
        (dict(query=Q, key=Q, value=Q, sink=torch.full((4,), math.inf)), ValueError, ["sink", "3.4e+38"]),
        (dict(query=Q, key=Q, value=Q, sink=torch.full((4,), math.inf).half()), ValueError, ["sink", "3.4e+38"]),
        (
            dict(query=Q, key=Q, value=Q, sink=torch.full((4,), 1e39, dtype=torch.float64)),
            ValueError,
            ["sink", "3.4e+38"],
        ),
        (dict(query=Q, key=Q, value=Q, sink=1e39), ValueError, ["sink=1e+39", "3.4e+38"]),
        (dict(query=Q, key=Q, value=Q, sink=None), TypeError, ["sink=None", "number"]),
        (dict(query=Q, key=Q, value=Q, sink="learned"), TypeError, ["sink='learned'", "number"]),
        (dict(query=Q, key=Q, value=Q, scale="big"), TypeError, ["scale='big'", "number"]),
        # as a number it got no gradient
        (dict(query=Q, key=Q, value=Q, scale=torch.tensor(0.5, requires_grad=True)), TypeError, ["scale", "scale=1.0"]),
        (dict(query=Q, key=Q, value=Q, dropout_p=None), TypeError, ["dropout_p=None", "number"]),
        (dict(query=Q, key=Q, value=Q, window=3), TypeError, ["window=3", "(left, right)"]),
        (dict(query=Q, key=Q, value=Q, window=(-2, 0)), ValueError, ["window=(-2, 0)", "-1"]),
        (dict(query=Q, key=Q, value=Q, window=(1, 0), backend="cpu"), ValueError, ["'cpu'", "no window"]),
        (dict(query=Q.numpy(), key=Q, value=Q), TypeError, ["query", "ndarray", "tensor"]),
        (dict(query=Q, key=None, value=Q), TypeError, ["key", "NoneType", "tensor"]),
        (dict(query=Q, key=Q, value=Q, attn_mask=[[True]]), TypeError, ["attn_mask", "list", "tensor"]),
        (dict(query=Q, key=Q, value=Q, backend="cuda-flash"), ValueError, ["'cuda-flash'", "'cuda_flash'", "eager"]),
        (dict(query=Q, key=Q, value=Q, backend="cudnn"), ValueError, ["'cudnn'", "got cpu", "auto"]),
        (dict(query=Q, key=Q, value=Q, backend="cpu", dropout_p=0.1), ValueError, ["'cpu'", "dropout_p=0.1"]),
        (dict(query=Q, key=Q, value=Q, backend="padded", return_lse=True), ValueError, ["'padded'", "return_lse"]),
    ],
)
def test_errors_name_argument_value_and_remedy(arguments, error, words):
    with pytest.raises(error) as caught:
        attention(**arguments)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


def test_explain_says_who_serves_and_why_not():
    explanation = explain(Q, Q, Q)
    assert explanation.chosen == "cpu"
    assert list(explanation.reasons) == list(BACKENDS)
    assert explanation.reasons["cpu"] is explanation.reasons["eager"] is None
    assert "cuda" in explanation.reasons["cudnn"]
    assert "chosen" in str(explanation)
    assert explain(Q, Q, Q, dropout_p=0.1).chosen != "cpu"
    assert explain(Q, Q, Q, dropout_p=0.1, return_lse=True).chosen == "eager"


@pytest.mark.parametrize(
    ("queries", "keys", "arguments"),
    [
        (5, 3, dict(is_causal=True)),
        (3, 5, dict(is_causal=True)),
        (5, 1, {}),
        (5, 5, dict(enable_gqa=True)),
        (5, 3, dict(attn_mask=torch.zeros(3))),
        (5, 3, dict(attn_mask=torch.ones(5, 1) > 0, is_causal=True)),
        (5, 3, dict(window=(1, 2))),
        (3, 5, dict(window=(2, -1), is_causal=True, enable_gqa=True)),
    ],
)
def test_the_cpu_kernels_serve_all_shapes_and_masks(queries, keys, arguments):
    query, key = torch.randn(2, 4, queries, 300), torch.randn(2, 2 if "enable_gqa" in arguments else 4, keys, 300)
    kernel = "cpu_window" if "window" in arguments else "cpu"
    assert explain(query, key, key, **arguments).chosen == kernel
    found = attention(query, key, key, **arguments, backend=kernel)
    torch.testing.assert_close(found, attention(query, key, key, **arguments, backend="eager"))


@pytest.mark.parametrize("strided", ["query", "key", "value"])
def test_rows_whose_numbers_lie_apart(strided):
    dense = {name: torch.randn(2, 4, 5, 8) for name in ("query", "key", "value")}
    apart = dense | {strided: dense[strided].mT.contiguous().mT}
    assert apart[strided].stride(-1) != 1
    torch.testing.assert_close(attention(**apart, backend="cpu"), attention(**dense, backend="cpu"))


def test_a_scalar_tensor_is_a_sink_for_all_heads():
    sink = torch.tensor(0.3, requires_grad=True)
    out = attention(Q, Q, Q, sink=sink)
    torch.testing.assert_close(out, attention(Q, Q, Q, sink=0.3))
    out.sum().backward()
    assert sink.grad.shape == ()
    assert sink.grad != 0


@pytest.mark.parametrize("backend", ["cpu", "padded", "eager"])
def test_a_sink_below_every_number_is_none(backend):
    for sink in (-1e39, -1e300, torch.tensor(-1e39, dtype=torch.float64)):
        out = attention(Q, Q, Q, sink=sink, backend=backend)
        torch.testing.assert_close(out, attention(Q, Q, Q, sink=-math.inf, backend=backend))


def test_an_op_whose_signature_changed_is_not_called(monkeypatch):
    from dataclasses import replace

    changed = replace(KERNELS["cpu"], ops={"_scaled_dot_product_flash_attention_for_cpu": "query, key"})
    assert "changed" in changed.missing()
    gone = replace(KERNELS["cpu"], ops={"_no_such_op": "query"})
    assert "no op aten::_no_such_op" in gone.missing()
    monkeypatch.setitem(kernels_module._MISSING, "cpu", changed.missing())
    assert "changed" in explain(Q, Q, Q).reasons["cpu"]
    torch.testing.assert_close(attention(Q, Q, Q), attention(Q, Q, Q, backend="eager"))


def test_this_pytorch_has_every_kernel():
    assert {name: kernel.missing() for name, kernel in KERNELS.items()} == dict.fromkeys(KERNELS)


def test_the_compute_capability_is_a_constant_to_torch_compile():
    """kernels.py writes the mark itself, so that importing it does not import torch._dynamo."""
    assert vars(kernels_module._capability) == vars(torch.compiler.assume_constant_result(lambda index: None))
