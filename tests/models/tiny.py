"""Models of two layers and four heads, small enough to build in a test."""

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    Qwen3Config,
    RobertaConfig,
    ViTConfig,
)

VOCAB = 64
_size = dict(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=1)
_encoder = dict(_size, intermediate_size=48, max_position_embeddings=40, hidden_dropout_prob=0.0)
_decoder = dict(
    _size, intermediate_size=48, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2
)
_encoder.update(attention_probs_dropout_prob=0.0, initializer_range=0.2)
_rope = {"rope_type": "default", "rope_theta": 10000.0}


def _opt():
    return OPTConfig(
        **_size,
        ffn_dim=48,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
        dropout=0.0,
        init_std=0.2,
        bos_token_id=2,
        eos_token_id=2,
    )


def _gpt2():
    return GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.2,
        bos_token_id=2,
        eos_token_id=2,
    )


def _distilbert():
    return DistilBertConfig(
        vocab_size=VOCAB,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=40,
        dropout=0.0,
        attention_dropout=0.0,
        pad_token_id=1,
        initializer_range=0.2,
    )


def _vit():
    return ViTConfig(
        image_size=12,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
        initializer_range=0.2,
    )


def _gpt_oss():
    return GptOssConfig(
        **_decoder,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=8,
        rope_parameters=_rope,
        eos_token_id=2,
        experts_implementation="eager",
    )


MODELS = {
    "bert": (lambda: BertConfig(**_encoder), AutoModelForMaskedLM),
    "roberta": (lambda: RobertaConfig(**_encoder), AutoModelForMaskedLM),
    "distilbert": (_distilbert, AutoModelForMaskedLM),
    "opt": (_opt, AutoModelForCausalLM),
    "gpt2": (_gpt2, AutoModelForCausalLM),
    "llama": (lambda: LlamaConfig(**_decoder, eos_token_id=2, rope_parameters=_rope), AutoModelForCausalLM),
    "qwen3": (lambda: Qwen3Config(**_decoder, eos_token_id=2, rope_parameters=_rope), AutoModelForCausalLM),
    "gpt-oss": (_gpt_oss, AutoModelForCausalLM),
    "vit": (_vit, AutoModelForImageClassification),
}
DECODERS = ("opt", "gpt2", "llama", "qwen3", "gpt-oss")
TEXT = tuple(name for name in MODELS if name != "vit")
SIX = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")


def clip():
    """A model of two parts, each with a config of its own, and a batch for it."""
    part = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    text = dict(part, vocab_size=VOCAB, max_position_embeddings=40, pad_token_id=1, bos_token_id=2, eos_token_id=2)
    vision = dict(part, image_size=12, patch_size=4)
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()
    with torch.no_grad():
        for p in model.parameters():  # as a fresh one's attention hardly shows
            p.mul_(4.0 if p.dim() > 1 else 1.0)
    return model, {**inputs("bert"), "pixel_values": inputs("vit")["pixel_values"]}


def config(name):
    return MODELS[name][0]()


def inputs(name, batch=2, length=11, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, generator=generator).to(dtype)}
    return {"input_ids": torch.randint(3, VOCAB, (batch, length), generator=generator)}


def stir(model, seed=3):
    """Moves gates, sinks and α off their first values, so that a test sees them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".outeffhop." in name:
                p.add_(torch.randn(p.shape, generator=generator).to(p.dtype) * 0.5)
    return model
