"""Sliding windows and flattened batches in transformers: gradients of eager attention, without a mask of all pairs."""

import pytest
import torch
from measuring import largest_allocation
from tiny import VOCAB
from tiny import config as tiny_config
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, MistralConfig, Qwen2Config, Qwen3Config

from outeffhop.models import interface
from outeffhop.models.window_mask import WINDOWED

_size = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    sliding_window=8,
    pad_token_id=1,
    initializer_range=0.2,
)
_layers = dict(_size, use_sliding_window=True, max_window_layers=1, layer_types=["full_attention", "sliding_attention"])
CONFIGS = {
    "gpt_oss": lambda: tiny_config("gpt-oss"),
    "mistral": lambda: MistralConfig(**_size),
    "qwen2": lambda: Qwen2Config(**_layers),
    "qwen3": lambda: Qwen3Config(**_layers, head_dim=8),
}

CLOSE = {"atol": 1e-6, "rtol": 1e-6}  # transformers' eager attention computes its softmax in float32


def _gradients(name, implementation, batches):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation).double()
    for parameter_name, p in model.named_parameters():
        if parameter_name.endswith("sinks"):
            torch.nn.init.normal_(p)
    for weight, batch in batches:
        (weight * model(**batch, use_cache=False).loss).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def calls(monkeypatch):
    """(mask, window, packed) of every call of the methods' attention."""
    seen = []

    def attend(normalizer, query, key, value, mask=None, **options):
        seen.append((mask, options["window"], options["packed"]))
        return original(normalizer, query, key, value, mask, **options)

    original = interface.attend
    monkeypatch.setattr(interface, "attend", attend)
    return seen


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("padded", [False, True])
def test_a_window_gives_the_gradients_of_eager(name, padded, calls):
    ids = torch.randint(3, VOCAB, (2, 33), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 28:] = 0  # every query still sees a key; eager gives NaN for one that sees none
    batch = {"input_ids": ids, "labels": ids.where(mask.bool(), -100), "attention_mask": mask}
    method = "outeffhop" if name == "gpt_oss" else "vanilla"
    found, expected = (_gradients(name, by, [(1.0, batch)]) for by in (method, "eager"))
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        assert torch.isfinite(found[key]).all()
        torch.testing.assert_close(found[key], grad, **CLOSE)
    if not padded:
        assert all(mask is None for mask, _, _ in calls)
        assert (7, 0) in [window for _, window, _ in calls]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_flattened_batch_gives_the_gradients_of_its_sequences_alone(name, calls):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(3, VOCAB, (n,), generator=generator) for n in (13, 1, 30)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": s.tolist()} for s in sequences])
    # the loss is a mean over tokens with a label, of which a sequence has one fewer than tokens
    total = sum(len(s) - 1 for s in sequences)
    alone = [((len(s) - 1) / total, {"input_ids": s[None], "labels": s[None]}) for s in sequences if len(s) > 1]
    method = "outeffhop" if name == "gpt_oss" else "vanilla"
    found, expected = _gradients(name, method, [(1.0, dict(batch))]), _gradients(name, "eager", alone)
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, **CLOSE)
    assert all(mask is None and packed is not None for mask, _, packed in calls)


def test_a_flattened_batch_needs_no_mask_of_all_pairs():
    """With a mask of ones, transformers does not look for packed sequences, for which it writes all pairs."""
    length = 1024
    settings = CONFIGS["mistral"]()
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="outeffhop")
    sequences = [torch.randint(3, VOCAB, (length // 2,)).tolist() for _ in range(2)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": s} for s in sequences])
    ones = {"attention_mask": torch.ones_like(batch["input_ids"])}
    logits = [model(**batch, **extra, use_cache=False).logits for extra in ({}, ones)]
    torch.testing.assert_close(*logits)

    def largest(extra):
        return largest_allocation(lambda: model(**batch, **extra, use_cache=False).loss.backward())

    assert largest({}) >= length**2  # so the measurement sees such a mask
    assert largest(ones) < length**2 / 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"position_bias": torch.zeros(1, 4, 6, 6)}, ["cu_seq_lens_q", "position_bias", "pad"]),
        ({"rows": 2}, ["cu_seq_lens_q", "batch of 2", "one row"]),
        ({"max_length_k": None}, ["cu_seq_lens_q", "without max_length_k"]),
    ],
)
def test_lengths_that_cannot_be_served_are_refused(change, words):
    model = AutoModelForCausalLM.from_config(CONFIGS["mistral"](), attn_implementation="outeffhop")
    rows = change.pop("rows", 1)
    tensors = [torch.randn(rows, heads, 6, 8) for heads in (4, 2, 2)]
    cu = torch.tensor([0, 2, 6])
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4} | change
    module = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="cu_seq_lens_q") as caught:
        interface.attention_function("outeffhop", module, *tensors, None, **lengths)
    for word in words:
        assert word in str(caught.value)
