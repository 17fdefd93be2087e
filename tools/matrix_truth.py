"""What the cells of the compatibility matrix stand on: models that look trained, their inputs, and the truth.

The truth of a method is attention written out in float64, without any code of the library.
"""

from __future__ import annotations

import copy

import torch
from architectures import CAUSAL, MORE_CAUSAL, SEQ2SEQ, SIDE, VOCAB, build
from torch import nn
from trained_look import FIRST, look_trained
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from outeffhop.methods import METHODS
from outeffhop.models import convert
from outeffhop.models.hf_private import implementation, set_implementation
from outeffhop.models.modules import attention_modules, has_attention, hopfield_layers

NEAR = 1e-3  # ‖found − truth‖ / ‖truth‖ between float32 and a truth whose attention is float64
TRUTH = "matrix-truth"
DECODERS = CAUSAL | MORE_CAUSAL
ALIBI = ("BloomForCausalLM",)  # take no positions


class NotServed(Exception):
    """The model is not served, or the question does not arise; the text says why."""


class NotHere(NotServed):
    """This machine cannot answer the question; another one may have."""


# Models and their inputs


def subject(name):
    """A tiny model that looks trained, and a batch for it."""
    model = look_trained(build(name))
    return model, batch_of(model, name)


def batch_of(model, name, rows=3):
    generator = torch.Generator().manual_seed(2)
    names = {"pixel_values", "input_features", "input_ids", "past_values"}
    if hasattr(model.config, "vision_config") and name in ("CLIPModel", "SiglipModel"):
        wanted = {"pixel_values", "input_ids"}
    else:
        wanted = {model.main_input_name} & names
    found = {}
    if "input_ids" in wanted:
        found["input_ids"] = torch.randint(4, VOCAB - 2, (rows, 16), generator=generator)
        found["input_ids"][:, 0] = FIRST
    if "pixel_values" in wanted:
        found["pixel_values"] = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
    if "past_values" in wanted:
        found["past_values"] = torch.randn(rows, model.config.in_len, model.config.num_series, generator=generator)
    if "input_features" in wanted:
        frames = 2 * model.config.max_source_positions
        found["input_features"] = torch.randn(rows, model.config.num_mel_bins, frames, generator=generator)
    if name in SEQ2SEQ or "input_features" in wanted:
        found["decoder_input_ids"] = torch.randint(4, VOCAB - 2, (rows, 7), generator=generator)
    return found


def output(model, batch):
    """The logits, or what the model returns first."""
    out = model(**batch) if "use_cache" in batch else model(**batch, **no_cache(model))
    return out[main_output(out)]


def main_output(out):
    """The name of what is compared."""
    names = ("logits", "logits_per_image", "last_hidden_state", "prediction")
    return next(name for name in names if out.get(name) is not None)


def no_cache(model):
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") and model.can_generate() else {}


@torch.no_grad()
def run(model, batch):
    return output(model, batch)


@torch.no_grad()
def samples(model, batch):
    """One entry for each sample; models that compare texts with images have an embedding of each."""
    if hasattr(model, "get_image_features"):
        out = model(**batch)
        return torch.cat([out.text_embeds, out.image_embeds], 1)
    return run(model, batch)


def distance(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def held(found, truth, what, near=NEAR):
    far = distance(found, truth)
    if not far <= near:
        raise AssertionError(f"{what}: {far:.1e} from the truth")
    return far


def doubled(batch):
    """The batch in float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}


def padded(model, batch, name):
    """The same batch with padding beside its texts, by its side: left only where a decoder takes it."""
    given = {key for key in batch if key.endswith("input_ids")}
    if not given or name == "SiglipModel":  # which reads a text's last place, padded or not
        return {}
    padding, found = model.config.get_text_config().pad_token_id or 0, {}
    for side in ("right", "left") if name in DECODERS else ("right",):
        pads = (0, 5) if side == "right" else (5, 0)
        found[side] = dict(batch)
        for key in given:
            mask = nn.functional.pad(torch.ones_like(batch[key]), pads)
            found[side][key] = nn.functional.pad(batch[key], pads, value=padding)
            found[side]["decoder_attention_mask" if key.startswith("decoder") else "attention_mask"] = mask
        if side == "left" and name not in ALIBI:
            found[side]["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return found


def unpadded(out, whole, side):
    """What a model says about the texts alone, given padding as well."""
    if out.shape == whole.shape:  # of images, or of whole texts
        return out
    return out[:, : whole.shape[1]] if side == "right" else out[:, -whole.shape[1] :]


# The truth


def _weights(method, scores, sinks):
    """By the formulas: a sink is one more column, and clipping stretches and cuts."""
    normalizer = method.normalizer
    n = normalizer.n
    column = sinks if sinks is not None else None if n == 0 else torch.full((1,), float(n)).log()
    if column is None:
        weights = scores.softmax(-1)
    else:
        column = column.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    if hasattr(normalizer, "gamma"):
        gamma = normalizer.gamma if normalizer.gamma is not None else -normalizer.alpha / scores.shape[-1]
        weights = ((normalizer.zeta - gamma) * weights + gamma).clamp(0, 1)
    return weights


def truth(module, query, key, value, attention_mask, scaling=None, position_bias=None, s_aux=None, softcap=None, **_):
    method = METHODS[module.matrix_method].method
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    for added in (position_bias, attention_mask):
        if added is not None:
            scores = scores + added[..., : k.shape[2]].double()
    if (seen := getattr(module, "matrix_seen", None)) is not None:
        seen.append(scores.detach().logsumexp(-1))  # [B, H, T]
    sinks = s_aux if s_aux is not None else getattr(module, "matrix_sinks", None)
    out = (_weights(method, scores, sinks) @ v).transpose(1, 2)
    opening = 1.0 if method.gate is None else method.gate.init  # of every gate before training
    return (out * opening).to(query.dtype).contiguous(), None


AttentionInterface.register(TRUTH, truth)
AttentionMaskInterface.register(TRUTH, eager_mask)


class _Association(nn.Module):
    """The truth inside our own layers, which STanHop-Net is built from; β is 1/√d."""

    def __init__(self, method):
        super().__init__()
        self.matrix_method, self.is_causal = method, False

    def forward(self, state, query, key, value, mask, is_causal, need_weights):
        return truth(self, query, key, value, mask)[0].transpose(1, 2), None


def by_hand(model, method):
    """A copy whose attention is the truth."""
    model = copy.deepcopy(model)
    if not has_attention(model):
        for layer in hopfield_layers(model).values():
            layer.association = _Association(method)
        return model
    modules = attention_modules(model).values()
    for part in (*(m for m in model.modules() if isinstance(m, PreTrainedModel)), *modules):
        set_implementation(part.config, TRUTH)
    for module in modules:
        module.matrix_method = method
    return model


def converted(model, method, **how):
    """A converted copy. One that is refused must not have been changed."""
    model = copy.deepcopy(model)
    before, named = {k: v.clone() for k, v in model.state_dict().items()}, implementation(model.config)
    try:
        return convert(model, method, **how)
    except ValueError as error:
        after = model.state_dict()
        same = before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())
        if not same or implementation(model.config) != named:
            raise AssertionError(f"{method} was refused after the model was changed") from error
        raise NotServed(str(error)) from error
