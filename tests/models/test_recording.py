"""How attention modules call transformers' interface: found by running a copy, and nothing is changed by it."""

import copy

import pytest
import torch
from tiny import MODELS, clip, config
from torch import nn
from transformers import (
    AlbertConfig,
    AttentionInterface,
    AutoModel,
    BartConfig,
    BloomConfig,
    DebertaV2Config,
    DeiTConfig,
    Dinov2Config,
    ElectraConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    MistralConfig,
    ModernBertConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2VLConfig,
    SiglipVisionConfig,
    StableLmConfig,
    T5Config,
    WhisperConfig,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from outeffhop.models import recording
from outeffhop.models.modules import attention_modules, has_attention
from outeffhop.models.recording import Calls, calls_of

USUAL = Calls(hands_on=True, own_sinks=False, by_pieces=False)
ENCODER_DECODER = dict(
    vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4
)
SIZE = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
DECODER = dict(SIZE, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
IMAGE = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=12, patch_size=4
)
CONFIGS = {
    "albert": (lambda: AlbertConfig(**SIZE, embedding_size=16), USUAL),
    "electra": (lambda: ElectraConfig(**SIZE, embedding_size=16), USUAL),
    "modernbert": (lambda: ModernBertConfig(**SIZE, pad_token_id=0), USUAL),
    "mistral": (lambda: MistralConfig(**DECODER), USUAL),
    "qwen2": (lambda: Qwen2Config(**DECODER), USUAL),
    "gemma2": (lambda: Gemma2Config(**DECODER, head_dim=8), USUAL),
    "gemma3": (lambda: Gemma3TextConfig(**DECODER, head_dim=8), USUAL),
    "gpt-neox": (lambda: GPTNeoXConfig(**SIZE), USUAL),
    "phi3": (lambda: Phi3Config(**DECODER), USUAL),
    "stablelm": (lambda: StableLmConfig(**DECODER), USUAL),
    "t5": (lambda: T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4), USUAL),
    "bart": (lambda: BartConfig(**ENCODER_DECODER), USUAL),
    "whisper": (lambda: WhisperConfig(**ENCODER_DECODER, pad_token_id=0), USUAL),
    "deit": (lambda: DeiTConfig(**IMAGE), USUAL),
    "dinov2": (lambda: Dinov2Config(**IMAGE), USUAL),
    "siglip": (lambda: SiglipVisionConfig(**IMAGE), Calls(False, False, False)),
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    monkeypatch.setattr(recording, "_FOUND", {})


def found(model):
    return {calls_of(module) for module in attention_modules(model).values()}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_other_tests(name):
    model = MODELS[name][1].from_config(config(name))
    assert found(model) == {Calls(hands_on=True, own_sinks=name == "gpt-oss", by_pieces=False)}
    assert len(attention_modules(model)) == 2


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_further_architectures(name, device):
    build, expected = CONFIGS[name]
    with torch.device(device):
        assert found(AutoModel.from_config(build())) == {expected}


def test_both_parts_of_clip():
    assert sorted({name.split(".")[0] for name in attention_modules(clip()[0])}) == ["text_model", "vision_model"]


def test_images_that_lie_one_behind_the_other():
    vision = Qwen2VLConfig().sub_configs["vision_config"]
    sizes = dict(depth=1, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4, temporal_patch_size=2)
    model = Qwen2VisionTransformerPretrainedModel(vision(**sizes, spatial_merge_size=2))
    assert found(model) == {Calls(hands_on=True, own_sinks=False, by_pieces=True)}


@pytest.mark.parametrize(
    "settings",
    [
        BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4),
        DebertaV2Config(**SIZE),
    ],
    ids=lambda settings: settings.model_type,
)
def test_attention_of_a_models_own_cannot_be_exchanged(settings):
    model = AutoModel.from_config(settings)
    assert not has_attention(model)
    with pytest.raises(ValueError, match="its attention cannot be replaced"):
        attention_modules(model)


def test_a_run_changes_nothing_and_happens_once(monkeypatch):
    model = MODELS["llama"][1].from_config(config("llama")).train()
    before, settings, state = copy.deepcopy(model.state_dict()), model.config.to_dict(), torch.get_rng_state()
    runs = []
    run = recording._run
    monkeypatch.setattr(recording, "_run", lambda module: (runs.append(module), run(module))[1])
    for _ in range(3):
        assert len(attention_modules(model)) == 2
    assert len(runs) == 1  # for two layers, three times
    assert torch.equal(torch.get_rng_state(), state)
    assert model.config.to_dict() == settings
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class TinyAttention(nn.Module):
    """A user's own: takes keywords, and keeps them to itself; sinks and sparsity only where it is told to have them."""

    def __init__(self, settings, sinks=False, sparse=False):
        super().__init__()
        self.config, self.with_sinks, self.sparse = settings, sinks, sparse
        self.proj = nn.Linear(32, 32)

    def forward(self, hidden_states, **kwargs):
        heads = self.proj(hidden_states).unflatten(-1, (4, 8)).transpose(1, 2)
        attend = AttentionInterface()[self.config._attn_implementation]
        more = {"s_aux": torch.zeros(4)} if self.with_sinks else {}
        more |= {"indices": torch.zeros(4)} if self.sparse else {}
        return attend(self, heads, heads, heads, None, **more)[0]


def test_switches_of_a_class_are_told_apart():
    settings = config("bert")
    assert calls_of(TinyAttention(settings)) == Calls(False, False, False)
    assert calls_of(TinyAttention(settings, sinks=True)) == Calls(False, True, False)
    assert calls_of(TinyAttention(settings, sparse=True)) == Calls(False, False, False, unserved=("indices",))
    assert calls_of(nn.Linear(2, 2)) is None


def test_the_recorder_computes_nothing():
    model = AutoModel.from_config(config("bert"), attn_implementation=recording.RECORDER)
    with pytest.raises(ValueError, match="computes no attention"):
        model(torch.ones(1, 3, dtype=torch.long))
