"""The layers in plain float64 code, one head and one query at a time, to hold the real ones against."""

import math

import torch

from outeffhop.functional import clipped_softmax, entmax
from outeffhop.methods import Clipped, Entmax, Polynomial, SoftmaxN


def weights_of(layer, scores):
    """One row of scores → weights, by the method's formula; −inf is absent."""
    normalizer = layer.method.normalizer
    present = ~torch.isneginf(scores)
    out = torch.zeros_like(scores)
    if not present.any():
        return out
    x = scores[present]
    if isinstance(normalizer, SoftmaxN):
        out[present] = x.exp() / (normalizer.n + x.exp().sum())
    elif isinstance(normalizer, Clipped):
        full = torch.where(present, scores, -math.inf)
        gamma = normalizer.gamma if normalizer.gamma is not None else -normalizer.alpha / len(scores)
        return clipped_softmax(full, gamma, normalizer.zeta, normalizer.n)
    elif isinstance(normalizer, Entmax):
        alpha = 1 + math.log1p(math.exp(float(layer.state.raw_alpha))) if normalizer.learns else normalizer.alpha
        out[present] = entmax(x, torch.tensor(alpha, dtype=x.dtype))
    elif isinstance(normalizer, Polynomial):
        power = x ** (normalizer.order - 1)
        out[present] = power / power.abs().sum()
    return out


def linear(module, x):
    return (
        x
        if isinstance(module, torch.nn.Identity)
        else x @ module.weight.T + (0 if module.bias is None else module.bias)
    )


def opening(layer, x):
    """[L, H, 1 or the value's size]"""
    gate = layer.state.gate
    if gate is None:
        return torch.ones(len(x), layer.num_heads, 1, dtype=x.dtype)
    logits = torch.zeros(len(x), layer.num_heads, gate.bias[0].numel(), dtype=x.dtype)
    for head in range(layer.num_heads):
        size = layer.embed_dim // layer.num_heads
        part = x[:, head * size : (head + 1) * size]
        if gate.spec.gate == "constant":
            logits[:, head] = gate.bias[head]
            continue
        seen = x if gate.spec.predictor == "features" else part
        if gate.spec.predictor == "mlp":
            seen = (part @ gate.hidden_weight[head].T + gate.hidden_bias[head]).clamp(min=0)
        for channel in range(logits.shape[-1]):
            at = (head, channel) if gate.spec.gate == "element" else head
            logits[:, head, channel] = seen @ gate.weight[at] + gate.bias[at]
    if gate.spec.gate == "head":
        logits = logits.mean(0, keepdim=True).expand(len(x), -1, -1)
    return torch.sigmoid(logits + math.log(gate.spec.init / (1 - gate.spec.init)))


def unit(x):
    """Rows of root mean square 1."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def plain(layer, query, key, value, allowed, added=None):
    """One sample: query [L, E], key [S, kdim], value [S, vdim], allowed bool [H, L, S], added [H, L, S]."""
    q, k = linear(layer.q_proj, query), linear(layer.k_proj, key)
    v = linear(layer.v_proj, k if layer.connected else value)
    outs, all_weights = [], []
    gate = opening(layer, query)
    beta = layer.association.beta
    for head in range(layer.num_heads):
        qh, kh = (t[:, head * layer.head_dim : (head + 1) * layer.head_dim] for t in (q, k))
        vh = v[:, head * layer.value_head_dim : (head + 1) * layer.value_head_dim]
        b = beta[head] if beta.dim() else beta
        if layer.state.qk_norm is not None:
            qh, kh = layer.state.qk_norm.query.weight[head] * unit(qh), unit(kh)
        rows, weights = [], []
        for i in range(len(qh)):
            state = qh[i]
            steps = layer.association.steps
            for step in range(steps):
                scores = b * (kh @ state)
                if added is not None:
                    scores = scores + added[head, i]
                scores = torch.where(allowed[head, i], scores, -math.inf)
                w = weights_of(layer, scores)
                state = w @ (vh if step == steps - 1 else kh)
            rows.append(state)
            weights.append(w)
        outs.append(torch.stack(rows) * gate[:, head])
        all_weights.append(torch.stack(weights))
    return linear(layer.out_proj, torch.cat(outs, -1)), torch.stack(all_weights)
