"""Models that the quantization tests run, with inputs, and the decibels between two outputs."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DistilBertConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    RobertaConfig,
)

from outeffhop.models import presets
from outeffhop.quantization import Calibration, freeze, simulate

SIX = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")
PAPER = ("bert", "opt", "vit", "stanhop")
SMALL = {
    "bert": dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64, num_attention_heads=4),
    "opt": dict(
        num_hidden_layers=2, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, vocab_size=64, num_attention_heads=4
    ),
    "vit": dict(num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4),
    "stanhop": dict(e_layers=1, d_model=16, d_ff=24, num_heads=2, num_series=3),
}
_rope = {"rope_type": "default", "rope_theta": 10000.0}
_text = dict(vocab_size=64, pad_token_id=1, bos_token_id=2, eos_token_id=2)
_wide = dict(_text, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
_grouped = dict(_wide, num_key_value_heads=2, head_dim=8, rope_parameters=_rope, tie_word_embeddings=False)
OTHERS = {
    "roberta": (lambda: RobertaConfig(**_wide, max_position_embeddings=40), AutoModelForMaskedLM),
    "distilbert": (
        lambda: DistilBertConfig(**_text, dim=32, n_layers=2, n_heads=4, hidden_dim=48),
        AutoModelForMaskedLM,
    ),
    "gpt2": (lambda: GPT2Config(**_text, n_embd=32, n_layer=2, n_head=4), AutoModelForCausalLM),
    "llama": (lambda: LlamaConfig(**_grouped), AutoModelForCausalLM),
    "gpt-oss": (
        lambda: GptOssConfig(**_grouped, num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager"),
        AutoModelForCausalLM,
    ),
}


def build(name, method="outeffhop", seed=0):
    torch.manual_seed(seed)
    if name in PAPER:
        return stir(presets.build(name, "tiny", method, **SMALL[name]).eval())
    config, auto = OTHERS[name]
    return stir(auto.from_config(config(), attn_implementation=method).eval())


def stir(model):
    """Larger weights than the first ones, so that attention is not flat and gates are not constant."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.1)
    return model


def inputs(name, batch=3, seed=0, length=11):
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 1, 8, 8, generator=generator)}
    if name == "stanhop":
        return {"past_values": torch.randn(batch, 48, 3, generator=generator)}
    ids = torch.randint(3, 64, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def output(model, batch):
    out = model(**batch)
    return out.prediction if hasattr(out, "prediction") else out.logits


@torch.no_grad()
def quantize(model, batches, scheme="W8A8", **options):
    quantized = simulate(model, scheme, **options)
    with Calibration(quantized):
        for batch in batches:
            quantized(**batch)
    return freeze(quantized)


def decibels(truth, found, batch=None):
    """Signal over noise; with a batch, of its real tokens alone: padding has no range."""
    if batch is not None and "attention_mask" in batch:
        truth, found = (x[batch["attention_mask"].bool()] for x in (truth, found))
    noise = (found.double() - truth.double()).square().sum()
    return float(10 * torch.log10(truth.double().square().sum() / noise))
