"""Makes a tiny model look trained: what training leaves in weights and activations, and fresh models lack.

Scores of every head lie off 0 by up to ±50. Two channels of the residual stream are a thousand times the rest at the
first token. Norms scale from 0.01 to 30, least where those channels are. Embeddings have unequal lengths. Every value
is one that bfloat16 holds. Softmax sees none of the offsets that come from biases of keys.
"""

import math

import torch
from torch import nn

from outeffhop.models.modules import attention_modules, has_attention, hopfield_layers, num_heads

FIRST = 3  # the token that stands out, as the first of a text does
MASSIVE = (5, 17)  # its channels
COMMON = 9  # a channel with one value for all tokens, from which layers without biases make offsets
OFFSET = 50.0
_PAIRS = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
_SHARE = 2.0  # the query's part of an offset; the key's part, which softmax does not see, is large


@torch.no_grad()
def look_trained(model, dtype=None):
    """Changes the weights of a model in place, so that it looks trained; with a dtype, also converts it."""
    generator = torch.Generator().manual_seed(11)
    for module in model.modules():
        if _is_norm(module):
            _scale(module, generator)
    tables = [m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and "position" not in n]
    for table in tables[:1]:
        spread = torch.randn(len(table.weight), 1, generator=generator).mul(0.5).exp()
        table.weight.mul_(spread.to(table.weight.dtype))
        if table.weight.shape[-1] > max(MASSIVE):
            size = float(table.weight.square().mean().sqrt())
            table.weight[:, COMMON] = 2 * size
            table.weight[FIRST, list(MASSIVE)] = torch.tensor([1000.0, -1000.0]).to(table.weight) * size
    for name, p in model.named_parameters():
        if name.endswith("cls_token"):
            p[..., list(MASSIVE)] = torch.tensor([1000.0, -1000.0]).to(p) * 0.1
    for module in (attention_modules if has_attention(model) else hopfield_layers)(model).values():
        _offset(module)
    for p in model.parameters():
        p.copy_(p.bfloat16())
    for p in model.parameters():  # not model.to(dtype), which would also round the frequencies of positions
        p.data = p.data if dtype is None else p.data.to(dtype)
    return model


def first(batch):
    """A batch whose texts begin with the token that stands out."""
    ids = batch.get("input_ids")
    return (
        batch if ids is None else {**batch, "input_ids": torch.cat([torch.full_like(ids[:, :1], FIRST), ids[:, 1:]], 1)}
    )


def _is_norm(module):
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and weight is not None and weight.dim() == 1


def _scale(norm, generator):
    """0.01 to 30, most of them around 0.5; what is left of the outlying channels is small."""
    width = len(norm.weight)
    scales = 0.55 * torch.exp(4 * torch.linspace(-1, 1, width) ** 3)[torch.randperm(width, generator=generator)]
    if width > max(MASSIVE):
        scales[list(MASSIVE)] = 0.01
        scales[COMMON] = 1.0
    if "gemma" in type(norm).__name__.lower():  # its norms multiply by 1 + weight
        scales = scales - 1
    norm.weight.copy_(scales)


def _offset(module):
    """Adds up to ±OFFSET to the scores, other values for each head."""
    heads = num_heads(module)
    for names in _PAIRS:
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, nn.Linear) and isinstance(key, nn.Linear):
            size = len(query.weight) // heads
            if query.bias is not None and key.bias is not None:
                _add(query.bias, key.bias, heads, size)
            elif query.in_features > max(MASSIVE):
                _add(query.weight[:, COMMON], key.weight[:, COMMON], heads, size)
            return
    fused = getattr(module, "c_attn", None)  # queries, keys and values, one after another
    if fused is not None and getattr(fused, "bias", None) is not None:
        width = len(fused.bias) // 3
        _add(fused.bias[:width], fused.bias[width : 2 * width], heads, width // heads)


def _add(query, key, heads, size):
    """In place, in the two directions that rotary positions turn least: query·key/√size gains ±OFFSET."""
    slow = [size // 2 - 1, size - 1]
    signs = torch.linspace(-1, 1, heads).to(query)
    query.view(heads, size)[:, slow] += (_SHARE * signs)[:, None]
    key.view(-1, size)[:, slow] += OFFSET * math.sqrt(size) / (_SHARE * len(slow))
