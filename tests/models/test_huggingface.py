"""The attention implementations: what transformers' models compute with them."""

import copy
import pickle

import pytest
import torch
from tiny import DECODERS, MODELS, SIX, TEXT, clip, config, inputs, stir
from torch import nn
from transformers import (
    AttentionInterface,
    AutoModelForMaskedLM,
    DogeConfig,
    DogeForCausalLM,
    MobileBertConfig,
    MobileBertForMaskedLM,
    Qwen2VLConfig,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

import outeffhop
from outeffhop.models import convert, from_config
from outeffhop.models.interface import attention_function
from outeffhop.models.modules import attention_modules, state_of
from outeffhop.ops.probe import probing

ELEMENT = "gated(gate=element, predictor=features)"
ALL = "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)"
METHODS = (*SIX, "outeffhop(n=3)", ELEMENT, ALL, "gated-outeffhop(predictor=mlp, sink=learned)")


def build(name, method, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    model = stir(from_config(MODELS[name][1], config(name), method)).to(dtype).eval()
    if name == "gpt-oss":
        with torch.no_grad():
            for module in attention_modules(model).values():
                module.sinks.copy_(torch.linspace(-1, 2, 4))
    return model


def methods_for(name):
    """gpt-oss has its own sinks: softmax methods take them, the others cannot. Qwen3 has its own QK-norm."""
    barred = {"gpt-oss": ("clipped", "learned"), "qwen3": ("qk_norm",)}.get(name, ())
    return [m for m in METHODS if not any(word in m for word in barred)]


CASES = [(name, method) for name in MODELS for method in methods_for(name)]


def gradients(model, logits):
    model.zero_grad()
    (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_every_method_is_registered_with_its_masks():
    for name in outeffhop.methods.METHODS:
        assert name in AttentionInterface().valid_keys()
        assert name in AttentionMaskInterface().valid_keys()
        assert not any(word in name for word in ("sdpa", "flex_attention", "flash", "/"))


@pytest.mark.parametrize(("name", "method"), CASES)
def test_fused_equals_eager_in_logits_and_gradients(name, method):
    model, batch = build(name, method), inputs(name, dtype=torch.float64)
    fused = model(**batch).logits
    fused_gradients = gradients(model, fused)
    plain = model(**batch, output_attentions=True)
    assert [w.shape[1] for w in plain.attentions] == [4, 4]
    torch.testing.assert_close(fused, plain.logits, rtol=1e-9, atol=1e-9)
    plain_gradients = gradients(model, plain.logits)
    assert fused_gradients.keys() == plain_gradients.keys()
    assert method != "gated" or any("outeffhop.gate" in n for n in fused_gradients)
    for n, g in fused_gradients.items():
        torch.testing.assert_close(g, plain_gradients[n], rtol=1e-7, atol=1e-8, msg=n)


@pytest.mark.parametrize("name", MODELS)
def test_vanilla_is_what_the_model_was(name):
    model, batch = build(name, "vanilla", torch.float32), inputs(name)
    ours = model(**batch).logits
    model.set_attn_implementation("eager" if name == "gpt-oss" else "sdpa")
    torch.testing.assert_close(ours, model(**batch).logits, rtol=1e-5, atol=2e-5)


def test_softmax1_is_gpt_oss_with_sinks_at_zero():
    model = build("gpt-oss", "outeffhop")
    for module in attention_modules(model).values():
        nn.init.zeros_(module.sinks)
    ours, batch = model(**inputs("gpt-oss")).logits, inputs("gpt-oss")
    model.set_attn_implementation("eager")
    torch.testing.assert_close(ours, model(**batch).logits)


# DistilBERT takes no positions: padded on the left it sees others
@pytest.mark.parametrize(
    ("name", "method", "side"),
    [(*c, s) for c in CASES for s in ("left", "right") if c[0] in TEXT and (c[0], s) != ("distilbert", "left")],
)
def test_padding_changes_nothing(name, method, side):
    model, lengths = build(name, method), (5, 9)
    whole = inputs(name)["input_ids"]
    ids, mask = torch.full((2, 9), 1), torch.zeros(2, 9, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(9 - length, 9) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = whole[row, :length], 1
    extra = {}
    if side == "left" and name in ("bert", "gpt2", "llama", "qwen3", "gpt-oss"):
        extra["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(input_ids=ids, attention_mask=mask, **extra).logits
    for row, length in enumerate(lengths):
        place = slice(9 - length, 9) if side == "left" else slice(0, length)
        alone = model(input_ids=whole[row : row + 1, :length]).logits
        torch.testing.assert_close(padded[row, place], alone[0], rtol=1e-8, atol=1e-9)


def test_a_gate_per_head_does_not_average_over_padding():
    model = build("bert", "gated(gate=head)")
    ids = inputs("bert", batch=1)["input_ids"]
    mask = torch.ones_like(ids)
    alone = model(input_ids=ids[:, :6]).logits
    mask[:, 6:] = 0
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[:, :6], alone)


GENERATION = [(name, method) for name, method in CASES if name in DECODERS and method in (*SIX, ALL, METHODS[-1])]


@pytest.mark.parametrize(("name", "method"), GENERATION)
def test_generation_is_the_same_with_any_cache(name, method):
    model = build(name, method)
    start = inputs(name, length=6)["input_ids"]
    mask = torch.ones_like(start)
    mask[0, :2] = 0
    call = dict(attention_mask=mask, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=1)
    call.update(output_scores=True, return_dict_in_generate=True)
    plain = model.generate(start, use_cache=False, **call)
    for cache in ("dynamic", "static"):
        cached = model.generate(start, cache_implementation=cache, disable_compile=True, **call)
        assert torch.equal(plain.sequences, cached.sequences)
        for a, b in zip(plain.scores, cached.scores, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)


# two methods for each model, in turn, so that every method is compiled
COMPILED = [
    (name, methods_for(name)[(2 * i + j) % len(methods_for(name))]) for j in (0, 1) for i, name in enumerate(MODELS)
]
FIRST, SECOND = COMPILED[: len(MODELS)], COMPILED[len(MODELS) :]


@pytest.mark.parametrize(
    ("name", "method"),
    [*FIRST, ("vit", "gated(gate=head)"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SECOND)],
)
def test_compiles_as_one_graph(name, method):
    torch._dynamo.reset()  # the models share code, and Dynamo counts how often it compiles it
    model, batch = build(name, method, torch.float32), inputs(name)
    if name == "gpt-oss":  # its own loop over experts cannot be compiled whole, whatever the attention
        model.set_experts_implementation("batched_mm")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**batch).logits, model(**batch).logits, rtol=1e-4, atol=1e-5)


def test_every_method_is_compiled():
    assert {method for _, method in COMPILED} == set(METHODS)


@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n, m in CASES if m in ("outeffhop", "gated", "clipped", ALL, METHODS[-1])]
)
def test_gradient_checkpointing_gives_the_same_gradients(name, method):
    model, batch = build(name, method).train(), inputs(name, dtype=torch.float64)
    plain = gradients(model, model(**batch).logits)
    model.gradient_checkpointing_enable()
    again = gradients(model, model(**batch).logits)
    for n, g in plain.items():
        torch.testing.assert_close(g, again[n], msg=n)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_their_gates(copier):
    model, batch = build("bert", "gated-outeffhop(sink=learned)"), inputs("bert")
    other = copier(model)
    assert torch.equal(model(**batch).logits, other(**batch).logits)
    gate = next(state_of(m).gate for m in attention_modules(other).values())
    nn.init.constant_(gate.bias, -50.0)  # the copy's gate is the copy's own
    assert not torch.equal(model(**batch).logits, other(**batch).logits)
    convert(other, "vanilla")
    assert not any(m._forward_pre_hooks for m in attention_modules(other).values())


@pytest.mark.parametrize("kind", ["token", "element", "head", "constant"])
@pytest.mark.parametrize("predictor", ["linear", "mlp", "features"])
def test_a_fresh_gate_opens_as_it_should(kind, predictor):
    method = f"gated(gate={kind}, predictor={predictor}, init=0.3)"
    torch.manual_seed(0)
    model = from_config(AutoModelForMaskedLM, config("bert"), method)
    for module in attention_modules(model).values():
        opening = state_of(module)(torch.randn(2, 5, 32))
        torch.testing.assert_close(opening, torch.full_like(opening, 0.3), rtol=1e-6, atol=0)


def test_what_changes_the_scores_is_refused():
    q = torch.randn(1, 4, 3, 8)
    module = attention_modules(build("bert", "outeffhop", torch.float32)).popitem()[1]
    with pytest.raises(ValueError, match="block_indices"):
        attention_function("outeffhop", module, q, q, q, None, block_indices=torch.zeros(4))
    lengths = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 3])) | {"max_length_q": 3}
    with pytest.raises(ValueError, match="came with a softcap"):
        attention_function("outeffhop", module, q, q, q, None, softcap=30.0, **lengths, max_length_k=3)
    with pytest.raises(ValueError, match=r"no openings reached.*BertSelfAttention"):
        attention_function("gated", module, q, q, q, None)
    with pytest.raises(ValueError, match=r"convert\(model, 'gsh'\)"):
        attention_function("gsh", module, q, q, q, None)
    with pytest.raises(ValueError, match="s_aux"):
        attention_function("sparse", module, q, q, q, None, s_aux=torch.zeros(4))


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("masked", ["no", "bool", "added"])
@pytest.mark.parametrize("method", ["vanilla", "outeffhop", "clipped", "sparse"])
def test_a_softcap_by_hand(method, masked, weighed):
    """Outputs and gradients, with scores that a cap of 2 changes much."""
    module = attention_modules(build("llama", method)).popitem()[1]
    q, k, v = (
        torch.randn(2, heads, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(heads + i)) * 3
        for i, heads in enumerate((4, 2, 2))
    )
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = {"no": None, "bool": seen.expand(2, 1, 5, 5), "added": torch.zeros(5, 5).masked_fill(~seen, -torch.inf)}
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, weights = attention_function(
        method, module, *given, mask[masked], scaling=0.3, softcap=2.0, output_attentions=weighed
    )
    truth = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = truth[0] @ truth[1].repeat_interleave(2, 1).mT * 0.3
    scores = (2.0 * torch.tanh(scores / 2.0)).masked_fill(~seen, -torch.inf)
    expected = outeffhop.Method.parse(method).normalizer(scores)
    wanted = (expected @ truth[2].repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, wanted)
    assert (weights is None) == (not weighed)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), given), torch.autograd.grad(wanted.square().sum(), truth)
    )


def test_a_probe_sees_capped_scores():
    module = attention_modules(build("llama", "outeffhop")).popitem()[1]
    q = torch.randn(1, 4, 5, 8, dtype=torch.float64) * 5
    seen = {}
    with probing(lambda part, x: (seen.setdefault(part, x), x)[1]):
        out, _ = attention_function("outeffhop", module, q, q, q, None, scaling=1.0, softcap=2.0)
    torch.testing.assert_close(seen["scores"], 2.0 * torch.tanh(q @ q.mT / 2.0))
    torch.testing.assert_close(out, attention_function("outeffhop", module, q, q, q, None, scaling=1.0, softcap=2.0)[0])


def test_clipping_beside_a_models_own_sinks():
    module = attention_modules(build("gpt-oss", "clipped(gamma=-0.1)")).popitem()[1]
    q, v, sinks = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.tensor([-1.0, 0.0, 1.0, 2.0])
    out, _ = attention_function("clipped", module, q, q, v, None, is_causal=False, s_aux=sinks)
    scores = torch.cat([q @ q.mT * 8**-0.5, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    expected = (1.1 * scores.softmax(-1)[..., :-1] - 0.1).clamp(0, 1)
    torch.testing.assert_close(out, (expected @ v).transpose(1, 2))


@pytest.mark.parametrize("masked", [False, True])
def test_clipped_by_hand(masked):
    model = build("llama", "clipped(alpha=2)")
    module = attention_modules(model).popitem()[1]
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    mask = causal.expand(2, 1, 5, 5) if masked else None
    out, weights = attention_function("clipped", module, q, k, v, mask, scaling=0.3, output_attentions=True)
    scores = (q @ k.repeat_interleave(2, 1).mT * 0.3).masked_fill(~causal, -torch.inf)
    expected = ((1 + 2 / 5) * scores.softmax(-1) - 2 / 5).clamp(0, 1)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, (expected @ v.repeat_interleave(2, 1)).transpose(1, 2))
    assert out.is_contiguous()


def unit(x):
    return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_qk_norm_by_hand(name):
    module = attention_modules(build(name, "outeffhop(qk_norm=rms)")).popitem()[1]
    groups = 2 if name == "llama" else 4
    shapes = ((2, 4, 5, 8), (2, groups, 7, 8), (2, groups, 7, 8))
    q, k, v = (100 * torch.randn(shape, dtype=torch.float64) for shape in shapes)
    mask = torch.rand(2, 1, 5, 7) < 0.8
    out, _ = attention_function("outeffhop", module, q, k, v, mask, scaling=0.3)  # the model's scaling has no say
    factors = state_of(module).qk_norm.query.weight
    assert not torch.equal(factors, torch.ones_like(factors))  # stirred
    k, v = (t.repeat_interleave(4 // groups, 1) for t in (k, v))
    scores = factors[:, None, None] * (unit(q) @ unit(k).mT) / 8**0.5
    assert scores.abs().max() < factors.abs().max() * 8**0.5
    weights = torch.where(mask, scores.exp(), 0.0)
    weights = weights / (1 + weights.sum(-1, keepdim=True))
    torch.testing.assert_close(out, (weights @ v).transpose(1, 2))


def test_qk_norm_knows_no_scale_of_queries_and_keys():
    """OPT scales its queries before the attention function sees them: no difference, and no factor of √d."""
    model, batch = build("opt", "vanilla(qk_norm=rms)"), inputs("opt")
    before = model(**batch).logits
    with torch.no_grad():
        for module in attention_modules(model).values():
            for projection, factor in ((module.q_proj, 30.0), (module.k_proj, 0.5)):
                projection.weight.mul_(factor)
                projection.bias.mul_(factor)
    torch.testing.assert_close(model(**batch).logits, before, rtol=1e-3, atol=1e-3)  # but for the norm's ε
    with torch.no_grad():
        for module in attention_modules(model).values():
            state_of(module).qk_norm.query.weight.mul_(3)
    assert not torch.allclose(model(**batch).logits, before, rtol=1e-2, atol=1e-2)


def test_one_factor_per_head_commutes_with_rotation():
    """So it does not matter that the attention function sees queries and keys after RoPE."""
    module = attention_modules(build("llama", "vanilla(qk_norm=rms)")).popitem()[1]
    norm, q = state_of(module).qk_norm, torch.randn(1, 4, 6, 8, dtype=torch.float64)
    angles = torch.randn(6, 4, dtype=torch.float64)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

    def rotate(x):
        return x * cos + torch.cat([-x[..., 4:], x[..., :4]], -1) * sin

    torch.testing.assert_close(norm.query(rotate(q)), rotate(norm.query(q)))


def test_a_position_bias_is_added():
    module = attention_modules(build("bert", "vanilla", torch.float32)).popitem()[1]
    q, bias, mask = torch.randn(2, 4, 3, 8), torch.randn(1, 4, 3, 3), torch.tensor([True, True, False])
    out, _ = attention_function("vanilla", module, q, q, q, mask.expand(2, 1, 3, 3), position_bias=bias)
    expected = nn.functional.scaled_dot_product_attention(q, q, q, bias.masked_fill(~mask, -torch.inf))
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_changing_the_implementation_of_a_built_model():
    model, batch = build("bert", "outeffhop(n=3)"), inputs("bert")
    many = model(**batch).logits
    model.set_attn_implementation("clipped")
    clipped = model(**batch).logits
    assert not torch.allclose(many, clipped)
    torch.testing.assert_close(clipped, convert(model, "clipped")(**batch).logits)
    model.set_attn_implementation("gated")
    with pytest.raises(ValueError, match=r"convert\(model, 'gated'\)"):
        model(**batch)


SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)


def test_a_gate_per_head_is_refused_where_it_would_see_tokens_to_come():
    doge = DogeForCausalLM(DogeConfig(**SIZES, num_key_value_heads=2))  # its attention does not say that it is causal
    with pytest.raises(ValueError, match=r"self_attn \(DogeAttention\).*to come.*gate=token"):
        convert(doge, "gated(gate=head)")
    model, batch = clip()
    convert(model, "gated(gate=head)")  # the text model's says that it is not; its call says that it is
    model.vision_model(pixel_values=batch["pixel_values"])
    with pytest.raises(ValueError, match=r"cannot gate this CLIPAttention.*to come"):
        model.text_model(input_ids=batch["input_ids"])


def test_gates_of_images_that_lie_one_behind_the_other_are_refused():
    vision = Qwen2VLConfig().sub_configs["vision_config"]
    sizes = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4, temporal_patch_size=2)
    model = Qwen2VisionTransformerPretrainedModel(vision(**sizes, spatial_merge_size=2)).eval()
    for gate in ("token", "head"):
        with pytest.raises(ValueError, match=r"blocks\.0\.attn \(VisionAttention\).*each piece.*gate=constant"):
            convert(model, f"gated(gate={gate})")
    assert model.config._attn_implementation == "sdpa"
    patches, grid = torch.randn(24, 96), torch.tensor([[1, 4, 4], [1, 2, 4]])
    for method in ("outeffhop", "gated(gate=constant)"):
        both = convert(model, method)(hidden_states=patches, grid_thw=grid).last_hidden_state
        first = model(hidden_states=patches[:16], grid_thw=grid[:1]).last_hidden_state
        torch.testing.assert_close(both[:16], first)


def test_inputs_a_gate_was_not_made_for_are_refused_by_name():
    sizes = dict(SIZES, embedding_size=16, intra_bottleneck_size=16)
    model, batch = MobileBertForMaskedLM(MobileBertConfig(**sizes)).eval(), inputs("bert")
    convert(model, "gated")
    with pytest.raises(ValueError, match=r"this MobileBertSelfAttention.*inputs of size 32.*gets size 16.*constant"):
        model(**batch)
    assert torch.isfinite(convert(model, "gated(gate=constant)")(**batch).logits).all()
