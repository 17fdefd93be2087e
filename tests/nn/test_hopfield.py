"""The three layers against plain code: every method, mode and mask; samples apart; compile, export, copies."""

import copy
import io
import math

import pytest
import torch
from plain import plain
from torch import nn

from outeffhop.methods import METHODS
from outeffhop.nn import OutEffHop, OutEffHopLayer, OutEffHopPooling

METHOD_NAMES = [
    *METHODS,
    "outeffhop(n=3)",
    "clipped(alpha=2)",
    "gated(predictor=mlp)",
    "gated-outeffhop(gate=head, predictor=features)",
    "gated(gate=constant, init=0.5)",
    "gated(gate=element, predictor=features)",
    "outeffhop(qk_norm=rms)",
    "gated-outeffhop(gate=element, predictor=mlp, qk_norm=rms)",
    "sparse(qk_norm=rms)",
]


def _randomize(module, seed=0):
    """Weights as after some training: nothing at its start value, so that nothing can hide."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def _layer(method="outeffhop", **options):
    torch.manual_seed(0)
    arguments = dict(embed_dim=8, num_heads=2, batch_first=True, dtype=torch.float64, method=method) | options
    return _randomize(OutEffHop(**arguments))


def _tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _compare(layer, query, key=None, value=None, allowed=None, added=None, **masks):
    """Output, weights and gradients of the layer against the plain code, fused and with weights."""
    parameters = dict(layer.named_parameters())
    k = query if key is None else key
    v = k if value is None else value
    batch, queries, keys = query.shape[0], query.shape[1], k.shape[1]
    shape = (batch, layer.num_heads, queries, keys)
    allowed = torch.ones(shape, dtype=torch.bool) if allowed is None else allowed.expand(shape)
    results = [
        plain(layer, query[b], k[b], v[b], allowed[b], None if added is None else added.expand(shape)[b])
        for b in range(batch)
    ]
    expected, expected_weights = (torch.stack(r) for r in zip(*results, strict=True))
    probe = _tensor(*expected.shape, seed=9)
    expected_grads = torch.autograd.grad((expected * probe).sum(), list(parameters.values()), allow_unused=True)
    for need_weights in (False, True):
        out, weights = layer(query, key, value, need_weights=need_weights, average_attn_weights=False, **masks)
        torch.testing.assert_close(out, expected)
        grads = torch.autograd.grad((out * probe).sum(), list(parameters.values()), allow_unused=True)
        for (name, parameter), found, wanted in zip(parameters.items(), grads, expected_grads, strict=True):
            wanted = torch.zeros_like(parameter) if wanted is None else wanted
            if name.endswith("raw_alpha"):
                continue  # the plain code takes α as a number
            torch.testing.assert_close(found, wanted, msg=lambda m, name=name: f"{name}: {m}")
        assert (weights is not None) == need_weights
    torch.testing.assert_close(weights, expected_weights)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("mode", ["self", "cross", "connected", "steps", "beta"])
def test_every_method_and_mode(method, mode):
    options = {
        "self": {},
        "cross": dict(kdim=6, vdim=5, value_head_dim=3, head_dim=4, out_dim=7),
        "connected": dict(connected=True, kdim=6),
        "steps": dict(steps=3, bias=False),
        "beta": dict(learn_beta=True, beta_per_head=True, beta=0.7),
    }[mode]
    layer = _layer(method, **options)
    query = _tensor(2, 5, 8)
    if mode in ("self", "beta", "steps"):
        _compare(layer, query)
    elif mode == "cross":
        _compare(layer, query, _tensor(2, 7, 6, seed=1), _tensor(2, 7, 5, seed=2))
    else:
        _compare(layer, query, _tensor(2, 7, 6, seed=1))


@pytest.mark.parametrize("method", ["vanilla", "outeffhop", "clipped-outeffhop", "sparse", "gated-outeffhop"])
@pytest.mark.parametrize("mask", ["padding", "padding_float", "bool", "float", "per_head", "four", "both", "all"])
def test_every_mask(method, mask):
    layer = _layer(method)
    query, key = _tensor(2, 4, 8), _tensor(2, 6, 8, seed=1)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 4:] = True
    banned = _tensor(4, 6, seed=3) > 0.5
    per_head = _tensor(2, 2, 4, 6, seed=4) > 0.5
    added = _tensor(4, 6, seed=5)
    keep = ~padding[:, None, None, :]
    as_float = torch.zeros(2, 6, dtype=torch.float64).masked_fill(padding, -math.inf)
    if mask == "padding":
        _compare(layer, query, key, allowed=keep, key_padding_mask=padding)
    elif mask == "padding_float":
        _compare(layer, query, key, allowed=keep, key_padding_mask=as_float)
    elif mask == "bool":
        _compare(layer, query, key, allowed=~banned, attn_mask=banned)
    elif mask == "float":
        _compare(layer, query, key, added=added, attn_mask=added)
    elif mask == "per_head":
        _compare(layer, query, key, allowed=~per_head, attn_mask=per_head.flatten(0, 1))
    elif mask == "four":
        _compare(layer, query, key, allowed=~per_head[:, :1], attn_mask=per_head[:, :1])
    elif mask == "both":
        _compare(layer, query, key, allowed=keep, added=added, key_padding_mask=padding, attn_mask=added)
    else:  # one sample has no key at all
        padding[1] = True
        _compare(layer, query, key, allowed=~padding[:, None, None, :], key_padding_mask=padding)


@pytest.mark.parametrize("method", ["outeffhop", "clipped", "outeffhop(sink=learned)"])
def test_causal(method):
    layer = _layer(method)
    x = _tensor(2, 5, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    if "learned" not in method:
        _compare(layer, x, allowed=causal, is_causal=True)
    out, _ = layer(x, is_causal=True)
    by_mask, _ = layer(x, attn_mask=~causal)
    torch.testing.assert_close(out, by_mask)
    hinted, _ = layer(x, attn_mask=~causal, is_causal=True)
    torch.testing.assert_close(out, hinted)


def test_learned_sink_is_the_formula():
    layer = _layer("outeffhop(n=2, sink=learned)")
    fixed = _layer("outeffhop(n=2)")
    assert layer.state.sink.shape == (2,)
    with torch.no_grad():
        layer.state.sink.fill_(math.log(2.0))
    fixed.load_state_dict({k: v for k, v in layer.state_dict().items() if "sink" not in k})
    x = _tensor(2, 5, 8)
    for need_weights in (False, True):
        out, _ = layer(x, need_weights=need_weights)
        torch.testing.assert_close(out, fixed(x)[0])
        (grad,) = torch.autograd.grad(out.sum(), layer.state.sink)
        assert (grad != 0).all()


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("need_weights", [False, True])
def test_samples_do_not_touch_each_other(method, need_weights):
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1] = True
    for layer in (
        _layer(method, steps=2),
        _layer(method, steps=None),
        _layer(method, learn_beta=True, beta_per_head=True, normalize=True),
    ):
        x = _tensor(2, 5, 8)
        other = x.clone()
        other[1] = 100 * _tensor(5, 8, seed=7)
        first = layer(x, need_weights=need_weights)[0]
        assert torch.isfinite(first).all()
        torch.testing.assert_close(first[0], layer(other, need_weights=need_weights)[0][0])
        masked = layer(other, key_padding_mask=padding, need_weights=need_weights)[0]
        torch.testing.assert_close(first[0], masked[0])
        assert torch.isfinite(masked).all()


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_permutations(method):
    layer = _layer(method)
    query, key = _tensor(2, 5, 8), _tensor(2, 6, 8, seed=1)
    out, _ = layer(query, key)
    order = torch.tensor([3, 0, 2, 4, 1])
    torch.testing.assert_close(layer(query[:, order], key)[0], out[:, order])
    keys = torch.tensor([5, 3, 0, 2, 4, 1])
    torch.testing.assert_close(layer(query, key[:, keys])[0], out)


@pytest.mark.parametrize("method", ["vanilla", "outeffhop", "sparse", "gsh", "polynomial"])
def test_updates_to_rest(method):
    layer = _layer(method, steps=None, tol=1e-9, max_steps=500, beta=2.0)
    x = _tensor(2, 5, 8)
    many = _layer(method, steps=400, beta=2.0)
    many.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x)[0], many(x)[0], atol=1e-5, rtol=1e-5)


UNPROJECTED = dict.fromkeys(("project_query", "project_key", "project_value", "out_projection"), False)


def test_retrieval_without_learning():
    layer = OutEffHop(6, **UNPROJECTED, beta=4.0, batch_first=True, dtype=torch.float64)
    assert not list(layer.parameters())
    stored, query = _tensor(1, 9, 6), _tensor(1, 3, 6, seed=1)
    out, weights = layer(query, stored, need_weights=True)
    scores = 4.0 * query @ stored.transpose(1, 2)
    expected = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, expected @ stored)


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("project_query", [False, True])
def test_pooling(method, project_query):
    options = dict(batch_first=True, dtype=torch.float64, method=method, project_query=project_query)
    layer = _randomize(OutEffHopPooling(8, 2, quantity=3, **options))
    patterns = _tensor(2, 6, 8)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[0, 2:] = True
    out, weights = layer(patterns, key_padding_mask=padding, need_weights=True)
    assert out.shape == (2, 3, 8)
    assert weights.shape == (2, 2, 3, 6)
    assert (weights[0, :, :, 2:] == 0).all()
    expected, _ = layer.hopfield(layer.queries.expand(2, -1, -1), patterns, key_padding_mask=padding)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer(patterns, key_padding_mask=padding), expected)
    if "alpha" not in method:  # γ = −α/T counts padding in T
        torch.testing.assert_close(layer(patterns[:1, :2])[0], out[0])  # padding is as good as absence
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    torch.testing.assert_close(layer(patterns[:, order]), layer(patterns))


@pytest.mark.parametrize("method", METHOD_NAMES)
@pytest.mark.parametrize("options", [{}, {"connected": True}, {"project_key": True, "project_value": True}], ids=str)
def test_lookup(method, options):
    layer = _randomize(
        OutEffHopLayer(8, 2, quantity=5, batch_first=True, dtype=torch.float64, method=method, **options)
    )
    query = _tensor(2, 4, 8)
    out, weights = layer(query, need_weights=True)
    assert out.shape == query.shape
    assert weights.shape == (2, 2, 4, 5)
    targets = None if layer.targets is None else layer.targets.expand(2, -1, -1)
    expected, _ = layer.hopfield(query, layer.patterns.expand(2, -1, -1), targets)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(layer(query[0]), out[0])
    layer(query).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_layouts():
    rows = _layer()
    columns = _layer(batch_first=False)
    columns.load_state_dict(rows.state_dict())
    query, key = _tensor(2, 5, 8), _tensor(2, 3, 8, seed=1)
    out, weights = rows(query, key, need_weights=True)
    turned, same = columns(query.transpose(0, 1), key.transpose(0, 1), need_weights=True)
    torch.testing.assert_close(turned.transpose(0, 1), out)
    torch.testing.assert_close(same, weights)
    assert weights.shape == (2, 5, 3)
    alone, weight = rows(query[0], key[0], need_weights=True)
    torch.testing.assert_close(alone, out[0])
    torch.testing.assert_close(weight, weights[0])


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 6, "vdim": 5}, {"add_bias_kv": True}, {"add_zero_attn": True}]
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_vanilla_is_multihead_attention(options, batch_first):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, batch_first=batch_first, dtype=torch.float64, **options)
    ours = OutEffHop.from_multihead(theirs, "vanilla")
    query, key, value = _tensor(3, 3, 8), _tensor(3, 3, options.get("kdim", 8)), _tensor(3, 3, options.get("vdim", 8))
    padding = torch.zeros(3, 3, dtype=torch.bool)
    padding[1, 2] = True
    banned = torch.ones(3, 3, dtype=torch.bool).triu(1)
    for arguments in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": banned},
        {"attn_mask": banned.expand(6, 3, 3), "key_padding_mask": padding},
        {"attn_mask": banned.double().masked_fill(banned, -math.inf)},
    ):
        expected, expected_weights = theirs(query, key, value, need_weights=True, **arguments)
        out, weights = ours(query, key, value, need_weights=True, **arguments)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, expected_weights)
        torch.testing.assert_close(ours(query, key, value, **arguments)[0], expected)
    # a zero pattern for softmax is softmax1
    if options.get("add_zero_attn"):
        one = OutEffHop(8, 2, batch_first=batch_first, dtype=torch.float64)
        one.load_state_dict(ours.state_dict())
        torch.testing.assert_close(one(query, key, value)[0], theirs(query, key, value)[0])


@pytest.mark.parametrize("training", [False, True])
def test_a_converted_layer_is_in_the_mode_of_the_other(training):
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).train(training)
    ours = OutEffHop.from_multihead(theirs, "vanilla")
    assert ours.training == ours.association.training == training
    if not training:
        x = torch.randn(2, 5, 8)
        torch.testing.assert_close(ours(x)[0], theirs(x, x, x)[0])


@pytest.mark.parametrize("predictor", ["linear", "mlp", "features"])
@pytest.mark.parametrize("gate", ["token", "element", "head", "constant"])
def test_padding_is_as_good_as_absence_under_a_gate(gate, predictor):
    layer = _layer(f"gated-outeffhop(gate={gate}, predictor={predictor})")
    x = _tensor(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[:, 3:] = True
    expected = layer(x[:, :3])[0]
    for mask in (padding, torch.zeros(2, 5, dtype=torch.float64).masked_fill(padding, -math.inf)):
        torch.testing.assert_close(layer(x, key_padding_mask=mask)[0][:, :3], expected)
        torch.testing.assert_close(layer(x, x, x, key_padding_mask=mask)[0][:, :3], expected)
    torch.testing.assert_close(layer(x[0], key_padding_mask=padding[0])[0][:3], expected[0])
    # the mask of other keys says nothing of the queries
    keys = x.clone()
    torch.testing.assert_close(layer(x, keys, key_padding_mask=padding)[0], layer(x, keys[:, :3])[0])


@pytest.mark.parametrize("extra", [{"add_zero_attn": True}, {"add_bias_kv": True}], ids=str)
def test_extra_patterns_with_masks_that_broadcast_and_without_keys(extra):
    layer = _layer("sparse", **extra)
    x = _tensor(2, 5, 8)
    for mask in (_tensor(2, 1, 5, 1) > 0, _tensor(2, 2, 5, 1)):  # the same for every key
        torch.testing.assert_close(layer(x, attn_mask=mask)[0], layer(x, attn_mask=mask.expand(2, 2, 5, 5))[0])
    out, weights = layer(x, x[:, :0], need_weights=True)
    torch.testing.assert_close(weights, torch.ones(2, 5, 1, dtype=torch.float64))
    value = layer.v_proj.bias * 0 if layer.bias_v is None else layer.bias_v[0, 0]
    torch.testing.assert_close(out, layer.out_proj(value).expand_as(out))


@pytest.mark.parametrize("batch_first", [False, True])
def test_an_empty_batch(batch_first):
    x = torch.zeros(0, 5, 8) if batch_first else torch.zeros(5, 0, 8)
    options = dict(quantity=3, batch_first=batch_first)
    assert OutEffHopLayer(8, 2, **options)(x).shape == x.shape
    assert OutEffHopPooling(8, 2, **options)(x).shape == ((0, 3, 8) if batch_first else (3, 0, 8))


def test_a_method_that_does_not_fit_leaves_the_layer_as_it_was():
    layer = OutEffHop(9, 2, head_dim=4)
    with pytest.raises(ValueError, match="embed_dim=9"):
        layer.set_method("gated(qk_norm=rms)")
    assert str(layer.method) == "outeffhop"
    assert layer.state.qk_norm is None


def test_half_precision_comes_to_rest(monkeypatch):
    """Two roundings of one state differ by more than 1e-4 of it in bfloat16: no tolerance may ask for less."""
    torch.manual_seed(0)
    layer = OutEffHop(16, **UNPROJECTED, beta=0.3, batch_first=True, steps=None, dtype=torch.bfloat16)
    updates = []
    plain_update = layer.association._update
    monkeypatch.setattr(layer.association, "_update", lambda *a, **k: updates.append(1) or plain_update(*a, **k))
    layer(torch.randn(2, 200, 16).bfloat16(), torch.randn(2, 30, 16).bfloat16())
    assert len(updates) < layer.association.max_steps


def test_dropout_only_in_training():
    layer = _layer(dropout=0.5)
    x = _tensor(2, 5, 8)
    layer.eval()
    torch.testing.assert_close(layer(x)[0], _layer()(x)[0])
    layer.train()
    assert not torch.allclose(layer(x)[0], layer(x)[0])


@pytest.mark.parametrize(
    "method",
    [
        *("outeffhop", "gated-outeffhop", "sparse", "outeffhop(sink=learned)"),
        *(pytest.param(method, marks=pytest.mark.slow) for method in ("clipped", "gsh")),
    ],
)
def test_compile_export_copy_pickle(method):
    torch._dynamo.reset()
    layer = _randomize(OutEffHop(8, 2, batch_first=True, method=method, steps=2, learn_beta=True)).eval()
    x = _tensor(2, 5, 8).float()
    expected = layer(x)[0]
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied(x)[0], expected, atol=0, rtol=0)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    torch.testing.assert_close(torch.load(buffer, weights_only=False)(x)[0], expected, atol=0, rtol=0)
    compiled = torch.compile(layer, fullgraph=True)(x)[0]
    torch.testing.assert_close(compiled, expected)
    parameters = list(layer.parameters())
    for a, b in zip(
        torch.autograd.grad(compiled.sum(), parameters), torch.autograd.grad(expected.sum(), parameters), strict=True
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x)[0], expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)[0]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("beta", [dict(beta=0.3), dict(beta=0.3, learn_beta=True), dict(beta=0.3, beta_per_head=True)])
def test_beta_is_registered(beta):
    layer = OutEffHop(8, 2, **beta)
    assert "association.log_beta" in layer.state_dict()
    torch.testing.assert_close(layer.association.beta, torch.full(layer.association.beta.shape, 0.3))
    assert layer.association.beta.shape == ((2,) if beta.get("beta_per_head") else ())
    assert ("association.log_beta" in dict(layer.named_parameters())) == bool(beta.get("learn_beta"))
    assert layer.half().association.beta.dtype == torch.float16


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OutEffHop(9, 2), ["embed_dim=9", "num_heads=2"]),
        (lambda: OutEffHop(8, 0), ["num_heads=0"]),
        (lambda: OutEffHop(8, 2, method="outefhop"), ["'outefhop'", "'outeffhop'"]),
        (lambda: OutEffHop(8, 2, beta=0.0), ["beta=0.0"]),
        (lambda: OutEffHop(8, 2, steps=0), ["steps=0"]),
        (lambda: OutEffHop(8, 2, dropout=1.0), ["dropout=1.0"]),
        (lambda: OutEffHop(8, 2, kdim=6, project_key=False), ["project_key=False", "6", "8"]),
        (
            lambda: OutEffHop(8, 2, head_dim=3, num_heads=2) if False else OutEffHopPooling(8, 2, quantity=0),
            ["quantity=0"],
        ),
        (lambda: OutEffHop(9, 2, head_dim=4, method="gated"), ["embed_dim=9", "features"]),
        (lambda: OutEffHop(8, 2)(torch.zeros(3, 2, 7)), ["query", "(3, 2, 7)", "size 8"]),
        (lambda: OutEffHop(8, 2)(torch.zeros(3, 2, 8), torch.zeros(3, 4, 8)), ["batch of 2", "of 4"]),
        (
            lambda: OutEffHop(8, 2)(torch.zeros(3, 2, 8), torch.zeros(4, 2, 8), torch.zeros(4, 3, 8)),
            ["key of 2", "value of 3"],
        ),
        (
            lambda: OutEffHop(8, 2)(torch.zeros(3, 2, 8), torch.zeros(4, 2, 8), torch.zeros(5, 2, 8)),
            ["key has length 4", "value 5"],
        ),
        (
            lambda: OutEffHop(8, 2)(torch.zeros(3, 8), torch.zeros(4, 8), torch.zeros(5, 8)),
            ["key has length 4", "value 5"],
        ),
        (
            lambda: OutEffHop(8, 2)(torch.zeros(3, 2, 8), attn_mask=torch.zeros(2, 2) > 0),
            ["attn_mask", "(2, 2)", "(3, 3)"],
        ),
        (
            lambda: OutEffHop(8, 2)(torch.zeros(3, 2, 8), key_padding_mask=torch.zeros(3, 2) > 0),
            ["key_padding_mask", "(3, 2)", "(2, 3)"],
        ),
        (
            lambda: OutEffHop(8, 2, connected=True)(torch.zeros(3, 2, 8), value=torch.zeros(3, 2, 8)),
            ["value", "connected=True"],
        ),
    ],
)
def test_errors(make, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_gpu_agrees_with_cpu(method):
    layer = _layer(method, dtype=torch.float32, steps=2, normalize=True)
    x = _tensor(2, 5, 8).float()
    expected = layer(x)[0]
    on_gpu = copy.deepcopy(layer).cuda()
    torch.testing.assert_close(on_gpu(x.cuda())[0].cpu(), expected, atol=1e-4, rtol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        out = on_gpu(x.cuda().requires_grad_())[0]
    out.float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in on_gpu.parameters())
