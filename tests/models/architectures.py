"""A tiny model of each of many architectures, by the name of its class in transformers."""

import torch
import transformers

from outeffhop.models.stanhop import StanhopForForecasting

VOCAB = 400
SIDE = 16
_text = dict(vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2)
_size = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
_wide = dict(_size, intermediate_size=48)
_encoder = dict(_text, **_wide, max_position_embeddings=64)
_decoder = dict(_encoder, num_key_value_heads=2, head_dim=8)
_experts = dict(num_local_experts=2, num_experts_per_tok=1, experts_implementation="eager")
_windows = dict(sliding_window=8)
_gpt2 = dict(_text, n_embd=32, n_layer=2, n_head=4, n_positions=64)
_distilbert = dict(_text, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=64)
_alibi = dict(_text, hidden_size=32, n_layer=2, n_head=4)
_t5 = dict(
    vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, decoder_start_token_id=0
)
_pair = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
_bart = dict(_text, **_pair, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64)
_bart |= dict(decoder_start_token_id=2, forced_eos_token_id=2)
_gemma3 = dict(_decoder, sliding_window=8, query_pre_attn_scalar=8)
_image = dict(_wide, image_size=SIDE, patch_size=4, num_labels=10)
_stages = dict(hidden_sizes=[8, 16], depths=[1, 1], num_labels=10, image_size=SIDE)
_swin = dict(image_size=SIDE, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, num_labels=10)
_clip_text = dict(_wide, vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=1, eos_token_id=2)
_vision = dict(_wide, image_size=SIDE, patch_size=4)


def _of_parts(text, vision, **more):
    return dict(text_config=text, vision_config=vision, **more)


MASKED = {
    "BertForMaskedLM": _encoder,
    "RobertaForMaskedLM": _encoder | dict(pad_token_id=1),
    "DistilBertForMaskedLM": _distilbert,
    "ElectraForMaskedLM": _encoder | dict(embedding_size=32),
    "DebertaV2ForMaskedLM": _encoder | dict(relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    "AlbertForMaskedLM": _encoder | dict(embedding_size=16),
    "ModernBertForMaskedLM": _encoder | dict(cls_token_id=1, sep_token_id=2, local_attention=8),
}
CAUSAL = {
    "GPT2LMHeadModel": _gpt2,
    "OPTForCausalLM": dict(_text, **_size, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=64),
    "LlamaForCausalLM": _decoder,
    "Qwen3ForCausalLM": _decoder,
    "Gemma2ForCausalLM": _decoder | _windows | dict(query_pre_attn_scalar=8),
    "Gemma3ForCausalLM": _gemma3,
    "SmolLM3ForCausalLM": _decoder,
    "MistralForCausalLM": _decoder | _windows,
    "MixtralForCausalLM": _decoder | _experts,
    "Phi3ForCausalLM": {k: v for k, v in _decoder.items() if k != "head_dim"},
    "Olmo2ForCausalLM": _decoder,
    "FalconForCausalLM": dict(_text, **_size, max_position_embeddings=64),
    "GPTNeoXForCausalLM": _encoder,
    "BloomForCausalLM": _alibi,
    "GptOssForCausalLM": _decoder | _experts | _windows,
    # text and images, here given text alone
    "Gemma3ForConditionalGeneration": _of_parts(_gemma3, _vision, mm_tokens_per_image=4, image_token_index=399),
    "LlavaForConditionalGeneration": _of_parts(
        _decoder | dict(model_type="llama"), _vision | dict(model_type="clip_vision_model"), image_token_index=399
    ),
}
SEQ2SEQ = {
    "T5ForConditionalGeneration": _t5,
    "MT5ForConditionalGeneration": _t5 | dict(feed_forward_proj="gated-gelu"),
    "BartForConditionalGeneration": _bart,
    "MBartForConditionalGeneration": _bart,
    "PegasusForConditionalGeneration": _bart,
    "MarianMTModel": _bart,
}
CLASSIFIERS = {
    "ViTForImageClassification": _image,
    "DeiTForImageClassification": _image,
    "Dinov2ForImageClassification": dict(_size, mlp_ratio=2, image_size=SIDE, patch_size=4, num_labels=10),
    "SwinForImageClassification": _swin,
    "BeitForImageClassification": _image,
    "ConvNextForImageClassification": _stages | dict(num_stages=2, patch_size=4),
    "ResNetForImageClassification": dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=10),
}
EMBEDDING = {
    "BertModel": _encoder,
    "LlamaModel": _decoder,
    "GPT2Model": _gpt2,
    "BartModel": _bart,
    "T5EncoderModel": _t5,
    "RobertaForSequenceClassification": _encoder | dict(pad_token_id=1),
    "DistilBertForTokenClassification": _distilbert,
    "BertForQuestionAnswering": _encoder,
    "LlamaForSequenceClassification": _decoder,
    "ElectraForPreTraining": _encoder | dict(embedding_size=32),
    "CLIPTextModel": _clip_text,
    "Dinov2Model": dict(_size, mlp_ratio=2, image_size=SIDE, patch_size=4),
    "ViTModel": _image,
    "CLIPVisionModel": _vision,
    "SwinModel": _swin,
    "ViTForMaskedImageModeling": _image | dict(encoder_stride=4),
}
_deepseek = {k: v for k, v in _decoder.items() if k != "head_dim"} | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8
)
_deepseek |= dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1)
_deepseek |= dict(moe_intermediate_size=16, experts_implementation="eager")
_moe = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, experts_implementation="eager")
_whisper = _bart | dict(num_mel_bins=8, max_source_positions=16, max_target_positions=32)
_stanhop = dict(num_series=7, in_len=24, out_len=6, seg_len=4, factor=2, d_model=32, d_ff=48, num_heads=4, e_layers=1)
_stanhop |= dict(method="vanilla")
# models of the matrix that no command serves yet, or that the tables above have in another form
MORE_CAUSAL = {
    "Qwen2ForCausalLM": {k: v for k, v in _decoder.items() if k != "head_dim"},
    "Qwen3MoeForCausalLM": _decoder | _moe,
    "DeepseekV3ForCausalLM": _deepseek,
}
OTHER = {
    "WhisperForConditionalGeneration": _whisper,
    "CLIPModel": _of_parts(_clip_text, _vision, projection_dim=16),
    "SiglipModel": _of_parts(_clip_text, _vision),
    "StanhopForForecasting": _stanhop,
}
MODELS = MASKED | CAUSAL | SEQ2SEQ | CLASSIFIERS | EMBEDDING

_LEFT_OUT = ("MT5", "MBart", "Pegasus", "Marian", "Beit", "ConvNext", "ResNet", "Gemma3ForCond", "Llava")
MATRIX = tuple(
    n for n in (CAUSAL | MORE_CAUSAL | MASKED | SEQ2SEQ | CLASSIFIERS | OTHER) if not n.startswith(_LEFT_OUT)
)


def build(name, **changes):
    kind = StanhopForForecasting if name == "StanhopForForecasting" else getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**(MODELS | MORE_CAUSAL | OTHER)[name] | changes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():  # larger than the first ones, so that no output is constant
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return model
