"""Which places are quantized: by rule for every model and method, and by hand for one layer of each."""

from functools import cache

import pytest
import torch
from subjects import OTHERS, PAPER, SIX, build, inputs, quantize
from tiny import clip
from torch import nn

from outeffhop.models import convert
from outeffhop.models.modules import attention_modules, has_attention
from outeffhop.nn.association import Association
from outeffhop.quantization import Calibration, freeze, quantization_map, simulate
from outeffhop.quantization.placement import lay_out
from outeffhop.state import Gate, QkNorm

BY_HAND = {  # one layer; {gate} stands where a gated context enters the output projection
    "bert": (
        "bert.encoder.layer.0.",
        """
        attention.self.query/weight attention.self.query/output attention.self.key/weight attention.self.key/output
        attention.self.value/weight attention.self.value/output
        attention.self/scores attention.self/probabilities attention.self/context
        {gate}attention.output.dense/input attention.output.dense/weight attention.output.dense/output
        attention.output/add.0 attention.output.LayerNorm/weight attention.output.LayerNorm/output
        intermediate.dense/weight intermediate.dense/output intermediate.intermediate_act_fn/output
        output.dense/weight output.dense/output output/add.0 output.LayerNorm/weight output.LayerNorm/output
        """,
    ),
    "opt": (
        "model.decoder.layers.0",
        """
        .self_attn_layer_norm/weight .self_attn_layer_norm/output
        .self_attn.q_proj/weight .self_attn.q_proj/output .self_attn.k_proj/weight .self_attn.k_proj/output
        .self_attn.v_proj/weight .self_attn.v_proj/output
        .self_attn/scores .self_attn/probabilities .self_attn/context
        {gate}.self_attn.out_proj/input .self_attn.out_proj/weight .self_attn.out_proj/output /add.0
        .final_layer_norm/weight .final_layer_norm/output .fc1/weight .fc1/output .activation_fn/output
        .fc2/weight .fc2/output /add.1
        """,
    ),
    "vit": (
        "vit.layers.0",
        """
        .layernorm_before/weight .layernorm_before/output
        .attention.q_proj/weight .attention.q_proj/output .attention.k_proj/weight .attention.k_proj/output
        .attention.v_proj/weight .attention.v_proj/output
        .attention/scores .attention/probabilities .attention/context
        {gate}.attention.o_proj/input .attention.o_proj/weight .attention.o_proj/output /add.0
        .layernorm_after/weight .layernorm_after/output .mlp.fc1/weight .mlp.fc1/output .mlp.activation_fn/output
        .mlp.fc2/weight .mlp.fc2/output /add.1
        """,
    ),
    "stanhop": (
        "encoder.0.sthm",
        """
        .time.q_proj/weight .time.q_proj/output .time.k_proj/weight .time.k_proj/output
        .time.v_proj/weight .time.v_proj/output
        .time.association/scores .time.association/probabilities .time.association/context
        {gate}.time.out_proj/input .time.out_proj/weight .time.out_proj/output
        /add.0 .norm_time/weight .norm_time/output
        .time_mlp.0/weight .time_mlp.0/output .time_mlp.1/output .time_mlp.2/weight .time_mlp.2/output
        /add.1 .norm_time_mlp/weight .norm_time_mlp/output
        .pooling.hopfield.q_proj/input .pooling.hopfield.q_proj/weight .pooling.hopfield.q_proj/output
        .pooling.hopfield.k_proj/weight .pooling.hopfield.k_proj/output
        .pooling.hopfield.v_proj/weight .pooling.hopfield.v_proj/output
        .pooling.hopfield.association/scores .pooling.hopfield.association/probabilities
        .pooling.hopfield.association/context
        {gate}.pooling.hopfield.out_proj/input .pooling.hopfield.out_proj/weight .pooling.hopfield.out_proj/output
        .series.q_proj/weight .series.q_proj/output .series.k_proj/weight .series.k_proj/output
        .series.v_proj/weight .series.v_proj/output
        .series.association/scores .series.association/probabilities .series.association/context
        {gate}.series.out_proj/input .series.out_proj/weight .series.out_proj/output
        /add.2 .norm_series/weight .norm_series/output
        .series_mlp.0/weight .series_mlp.0/output .series_mlp.1/output .series_mlp.2/weight .series_mlp.2/output
        /add.3 .norm_series_mlp/weight .norm_series_mlp/output
        """,
    ),
}
# what lies outside the layers
AROUND = {
    "bert": """
        bert.embeddings.word_embeddings/weight bert.embeddings.position_embeddings/weight
        bert.embeddings.token_type_embeddings/weight bert.embeddings/add.0 bert.embeddings/add.1
        bert.embeddings.LayerNorm/weight bert.embeddings.LayerNorm/output
        """,
    "opt": """
        model.decoder.embed_tokens/weight model.decoder.embed_positions/weight model.decoder/add.0
        model.decoder.final_layer_norm/weight model.decoder.final_layer_norm/output
        """,
    "vit": """
        vit.embeddings.patch_embeddings.projection/input vit.embeddings.patch_embeddings.projection/weight
        vit.embeddings.patch_embeddings.projection/output vit.embeddings/add.0 vit.layernorm/weight vit.layernorm/output
        """,
    "stanhop": """
        embedding.linear/input embedding.linear/weight embedding.linear/output embedding/add.0
        embedding.norm/weight embedding.norm/output
        """,
}
HEADS = {"bert": {"cls"}, "opt": {"lm_head"}, "vit": {"classifier"}, "stanhop": {"decoder.0.head", "decoder.1.head"}}


@cache
def names_of(name, method, **options):
    quantized = quantize(build(name, method), [inputs(name)], **options)
    return quantized, {row.name for row in quantization_map(quantized).rows}


def expected_layer(name, gated):
    prefix, text = BY_HAND[name]
    words = text.split()
    kept = [w.removeprefix("{gate}") for w in words if gated or not w.startswith("{gate}")]
    return {prefix + w for w in kept}


@pytest.mark.parametrize("method", SIX)
@pytest.mark.parametrize("name", PAPER)
def test_one_layer_by_hand(name, method):
    _, found = names_of(name, method)
    prefix = BY_HAND[name][0].rstrip(".")
    layer = {n for n in found if n.startswith((prefix + ".", prefix + "/"))}
    assert layer == expected_layer(name, "gated" in method)
    around = {
        n for n in found if ".layer." not in n and ".layers." not in n and not n.startswith(("encoder.", "decoder."))
    }
    assert around == set(AROUND[name].split())


@pytest.mark.parametrize("method", SIX)
@pytest.mark.parametrize("name", PAPER)
def test_every_module_by_rule(name, method):
    quantized, found = names_of(name, method)
    gates = {n for n, m in quantized.named_modules() if isinstance(m, Gate) or n.endswith(".outeffhop")}
    heads = HEADS[name]

    def floating(n):
        return any(n == top or n.startswith(top + ".") for top in gates | heads)

    weights, outputs, parts = set(), set(), set()
    attention = set(attention_modules(quantized)) if has_attention(quantized) else set()
    for n, module in quantized.named_modules():
        if floating(n):
            continue
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Conv2d, nn.Embedding)):
            weights.add(f"{n}/weight")
        if isinstance(module, (nn.Linear, nn.LayerNorm, nn.Conv2d)) or "act" in type(module).__name__.lower():
            outputs.add(f"{n}/output")
        if type(module).__name__ in ("GELU", "ReLU"):
            outputs.add(f"{n}/output")
        if n in attention or isinstance(module, Association):
            parts |= {f"{n}/{part}" for part in ("scores", "probabilities", "context")}
    assert {n for n in found if n.endswith("/weight")} == weights
    assert {n for n in found if n.endswith("/output")} == outputs
    assert {n for n in found if n.rpartition("/")[2] in ("scores", "probabilities", "context")} == parts
    rest = found - weights - outputs - parts
    assert {n.rpartition("/")[2].split(".")[0] for n in rest} == {"add", "input"} - (
        {"input"} if "gated" not in method and name in ("bert", "opt") else set()
    )


@pytest.mark.parametrize("name", PAPER)
def test_heads_gates_and_biases_stay_in_floating_point_and_nothing_is_forgotten(name):
    model = build(name, "gated-outeffhop")
    quantized = quantize(model, [inputs(name)])
    found = quantization_map(quantized)
    weights = {row.name.removesuffix("/weight") + ".weight" for row in found.rows if row.kind == "weight"}
    before = dict(model.named_parameters(remove_duplicate=False))
    for parameter, value in quantized.named_parameters(remove_duplicate=False):
        own = parameter.rpartition(".")[2]
        listed = any(parameter == n or parameter.startswith(n + ".") for n in found.floating)
        assert (parameter in weights) + (listed or own == "bias") == 1, parameter
        if parameter not in weights:
            assert torch.equal(value, before[parameter]), parameter
        else:
            assert len(value.unique()) <= 255
    assert HEADS[name] <= {n for n, why in found.floating.items() if why == "head"}
    assert sum(why == "gate" for why in found.floating.values()) == sum(
        isinstance(m, Gate) for m in quantized.modules()
    )
    assert "biases" in found.floating


def test_a_tied_head_keeps_the_weight_that_the_embedding_loses():
    model = build("opt")
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    quantized = quantize(model, [inputs("opt")], "W4A8")
    assert torch.equal(quantized.lm_head.weight, model.lm_head.weight)
    assert len(quantized.model.decoder.embed_tokens.weight.unique()) <= 15
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize("name", ["roberta", "distilbert", "gpt2", "llama"])
def test_other_architectures(name):
    _, found = names_of(name, "sdpa")
    attention = {"roberta": ".attention.self", "distilbert": ".attention", "gpt2": ".attn", "llama": ".self_attn"}[name]
    for i in range(2):
        for part in ("scores", "probabilities", "context"):
            assert any(f".{i}{attention}/{part}" in n for n in found)
    # two residual sums a layer; RoPE adds two per layer, on rotated queries and keys
    layers = {n for n in found if "/add." in n and "embeddings" not in n and n != "transformer/add.0"}
    assert len(layers) == {"llama": 8}.get(name, 4)
    # a product of two tensors lies on no grid: the projection that takes it rounds it
    assert {n for n in found if n.endswith("/input")} == (
        {f"model.layers.{i}.mlp.down_proj/input" for i in range(2)} if name == "llama" else set()
    )
    assert not any("head" in n or "vocab" in n for n in found)


def test_experts_are_left_alone_and_said_to_be():
    quantized = quantize(build("gpt-oss", "eager"), [inputs("gpt-oss")])
    found = quantization_map(quantized)
    assert not any(".mlp." in row.name for row in found.rows)
    assert "experts" in found.floating["model.layers.0.mlp.experts"]
    assert any(row.name == "model.layers.0/add.1" for row in found.rows)


@pytest.mark.parametrize("name", [*PAPER, *OTHERS])
def test_placement_linear_takes_linear_inputs_and_weights_alone(name):
    method = "gated-outeffhop" if name in PAPER else "eager"
    _, found = names_of(name, method, scheme="linear")
    assert {n.rpartition("/")[2] for n in found} == {"input", "weight"}
    modules = {n.rpartition("/")[0] for n in found}
    assert {f"{m}/{w}" for m in modules for w in ("input", "weight")} == found


def test_a_pattern_excludes_a_module_or_a_quantizer():
    quantized, found = names_of("bert", "outeffhop", exclude=("*.layer.0.*", "*/scores"))
    assert not any(".layer.0." in n or n.endswith("/scores") for n in found)
    assert any(".layer.1." in n for n in found)
    floating = quantization_map(quantized).floating
    assert "excluded" in floating["bert.encoder.layer.0.attention"]


def test_a_pattern_of_nothing_is_refused():
    with pytest.raises(ValueError, match="matches no module of OPTForCausalLM"):
        simulate(build("opt"), exclude=("*classifier*",))
    with pytest.raises(TypeError, match="a sequence of patterns"):
        simulate(build("opt"), exclude="*lm_head*")


def test_multihead_attention_is_out_of_sight():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    layout = lay_out(layer, "paper")
    assert "nn.MultiheadAttention" in layout.floating["self_attn"]
    assert set(layout.sites) == {"linear1", "linear2", "norm1", "norm2"}


def test_a_functional_activation_and_both_sides_of_a_sum_are_seen():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = nn.functional.gelu(self.first(x))
            y = self.second(torch.relu(y)) + 1.0  # a number is no residual
            y += x
            scores = y.view(3, 1, 2, 2).expand(3, 2, 2, 2) + torch.full((3, 1, 2, 2), -1e38)  # a mask, and no sum
            return torch.add(x, other=y) + 0 * scores.sum()

    quantized = simulate(nn.Sequential(Block()))
    x = torch.randn(3, 4)
    with Calibration(quantized):
        quantized(x)
    freeze(quantized)
    assert {row.name for row in quantization_map(quantized).rows} == {
        *("0/gelu.0", "0/relu.0", "0/add.0", "0/add.1"),
        *("0.first/input", "0.first/weight", "0.first/output", "0.second/weight", "0.second/output"),
    }


@pytest.mark.parametrize("name", PAPER)
def test_normalized_queries_and_keys_are_quantized_and_all_else_is_as_without(name):
    method = "gated-outeffhop(sink=learned)"
    plain, normed = (names_of(name, m)[1] for m in (method, f"{method[:-1]}, qk_norm=rms)"))
    quantized, _ = names_of(name, f"{method[:-1]}, qk_norm=rms)")
    norms = {n for n, m in quantized.named_modules() if isinstance(m, QkNorm)}
    assert len(norms) == sum(n.endswith("/scores") for n in plain)
    new = {f"{n}.{part}" for n in norms for part in ("query/weight", "query/output", "key/output")}
    # OPT's queries are scaled, and its keys come out of a cache: both off their grid
    off = {f"{n}.{part}/input" for n in norms for part in ("query", "key") if name == "opt"}
    assert normed - plain == new | off
    assert plain <= normed
    left = quantization_map(quantized).floating
    assert sum(why == "gate" for why in left.values()) == len(norms)
    assert sum(n.endswith(".sink") for n in left) == len(norms)


def test_the_map_prints():
    quantized, found = names_of("vit", "gated")
    text = str(quantization_map(quantized))
    for word in (*found, "In floating point", "classifier", "asymmetric per tensor", "zero point"):
        assert word in text
    (row,) = (row for row in quantization_map(quantized).rows if row.name == "vit.layers.0/add.0")
    assert row.range[0] < 0 < row.range[1]
    assert row.scale == pytest.approx((row.range[1] - row.range[0]) / 255)
    assert 0 < row.zero_point < 255


def test_a_pattern_of_no_quantizer_is_refused():
    with pytest.raises(ValueError, match=r"exclude='\*/score' matches no quantizer of ViT.*attention/scores"):
        quantize(build("vit"), [inputs("vit")], exclude=["*/score"])
    with pytest.raises(ValueError, match="matches no quantizer"):
        quantize(build("vit"), [inputs("vit")], scheme="per-token", exclude=["*/outputs"])
    freeze(simulate(build("vit"), scheme="per-token", exclude=["*.q_proj/input"]))  # not seen yet


@pytest.mark.parametrize("method", ["outeffhop(n=4)", "gated"])
def test_a_part_with_a_method_of_its_own_keeps_it(method):
    model, batch = clip()
    convert(model.vision_model, method)
    quantized = simulate(model, "W16A16")
    with torch.no_grad():
        truth = model(**batch).logits_per_image
        with Calibration(quantized):
            seen = quantized(**batch).logits_per_image  # in floating point still
    torch.testing.assert_close(seen, truth, rtol=1e-4, atol=1e-4)
    assert any(row.name.endswith("scores") and "vision_model" in row.name for row in quantization_map(quantized).rows)
    assert model.text_model.config._attn_implementation == "sdpa"
