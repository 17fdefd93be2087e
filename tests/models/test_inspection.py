"""A running model looked into: names of modules at work, the parts of attention, and nothing left behind."""

import pytest
import torch
from tiny import VOCAB, clip
from transformers import AutoModelForMaskedLM, BertConfig

import outeffhop
from outeffhop.models import presets
from outeffhop.models.inspection import ModulePath, inspecting
from outeffhop.ops import attention
from outeffhop.ops.probe import watching

SIX = ["vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop"]


def bert(implementation="sdpa"):
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    return AutoModelForMaskedLM.from_config(config, attn_implementation=implementation).eval()


def seen_by(model, inputs):
    seen = []
    with inspecting(model, lambda name, part, t: (seen.append((name, part, tuple(t.shape))), t)[1]), torch.no_grad():
        out = model(**inputs)
    return seen, out


@pytest.mark.parametrize("method", SIX)
def test_every_attention_shows_its_parts(method):
    model = outeffhop.convert(bert(), method)
    inputs = {"input_ids": torch.randint(VOCAB, (2, 7))}
    with torch.no_grad():
        plain = model(**inputs).logits
    seen, out = seen_by(model, inputs)
    names = [f"bert.encoder.layer.{i}.attention.self" for i in range(2)]
    expected = [(n, p) for n in names for p in ("key", "value", "scores", "probabilities", "context")]
    assert [(n, p) for n, p, _ in seen] == expected
    assert [s for _, _, s in seen[:5]] == [*[(2, 4, 7, 8)] * 2, (2, 4, 7, 7), (2, 4, 7, 7), (2, 4, 7, 8)]
    torch.testing.assert_close(out.logits, plain)


def test_a_sdpa_model_is_looked_into_and_has_its_own_attention_again():
    model = bert("sdpa")
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    seen, _ = seen_by(model, {"input_ids": torch.randint(VOCAB, (2, 7))})
    assert len(seen) == 10
    assert model.config._attn_implementation == "sdpa"
    assert hooks == sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("method", SIX)
def test_stanhop_shows_its_hopfield_layers(method):
    model = presets.build("stanhop", "tiny", method).eval()
    seen, _ = seen_by(model, {"past_values": torch.randn(2, 48, 7)})
    # time, pooling and series in 2 + 3 STHM blocks, and the cross Hopfield of 3 decoder layers
    assert len(seen) == 3 * (3 * 5 + 3)
    assert all(dict(model.named_modules())[name] is not None for name, _, _ in seen)


def test_what_the_probe_returns_is_used():
    model = bert()
    inputs = {"input_ids": torch.randint(VOCAB, (2, 7))}
    with torch.no_grad():
        with inspecting(model, lambda name, part, t: torch.zeros_like(t) if part == "context" else t):
            zeroed = model(**inputs).logits
        assert not torch.allclose(zeroed, model(**inputs).logits)


def test_the_path_is_left_by_a_forward_that_raises():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    with ModulePath(model) as path:
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 4))
        assert not path._running


def test_a_compiled_model_is_refused():
    with pytest.raises(TypeError, match="_orig_mod"), inspecting(torch.compile(bert())):
        pass


@pytest.mark.parametrize("method", SIX)
def test_a_watch_is_told_of_every_attention_and_changes_nothing(method):
    model = outeffhop.convert(bert(), method)
    inputs = {"input_ids": torch.randint(VOCAB, (2, 7))}
    shown, told = {}, {}

    def keep(name, part, tensor):
        if part == "probabilities":
            shown[name] = tensor
        return tensor

    with torch.no_grad():
        plain = model(**inputs).logits
        with inspecting(model, watch=lambda name, call, lse, weights: told.update({name: (call, lse, weights)})):
            watched = model(**inputs).logits
        with inspecting(model, keep):
            model(**inputs)
    assert torch.equal(watched, plain)
    assert told.keys() == shown.keys()
    for name, (call, lse, weights) in told.items():
        assert (lse is None) == ("clipped" in method)
        if weights is None:
            scores = call.query @ call.key.transpose(-2, -1) * call.scale
            weights = (scores - lse[..., None]).exp()
        torch.testing.assert_close(weights, shown[name])


def test_attention_returns_what_it_did_before_while_it_is_watched():
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind(0)
    seen = []
    with watching(lambda call, lse, weights: seen.append(lse)):
        out = attention(query, key, value)
        _, lse = attention(query, key, value, return_lse=True)
    assert torch.equal(out, attention(query, key, value))
    assert torch.equal(seen[0], lse)


@pytest.mark.parametrize("method", ["outeffhop(n=4)", "gated"])
def test_parts_with_methods_of_their_own_keep_them(method):
    model, batch = clip()
    outeffhop.convert(model.vision_model, method)
    model.text_model.set_attn_implementation("eager")

    def running():
        return [each.config._attn_implementation for each in (model, model.text_model, model.vision_model)]

    before, implementations = model(**batch).logits_per_image, running()
    assert len(set(implementations)) == 3
    seen, out = seen_by(model, batch)
    assert len(seen) == 4 * 5
    torch.testing.assert_close(out.logits_per_image, before, rtol=1e-4, atol=1e-4)
    assert running() == implementations
    assert torch.equal(model(**batch).logits_per_image, before)


def test_a_wrapped_model_is_looked_into():
    model = torch.nn.Sequential(bert("sdpa"))
    seen = []
    with inspecting(model, lambda name, part, t: (seen.append(name), t)[1]), torch.no_grad():
        model(torch.randint(VOCAB, (2, 7)))
    assert sorted(set(seen)) == [f"0.bert.encoder.layer.{i}.attention.self" for i in range(2)]
    assert model[0].config._attn_implementation == "sdpa"
