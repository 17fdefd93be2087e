"""Conversion near the function a model was trained for: scores at any offset, sinks of a share, QK-norm's factors."""

import copy
import logging

import pytest
import torch
from tiny import MODELS as CLASSES
from tiny import config, inputs
from transformers import BartConfig, BartForConditionalGeneration
from waiting import waits

from outeffhop.models import SinkSchedule, convert, load_checkpoint
from outeffhop.models.calibration import _observe, sink_of_share
from outeffhop.models.modules import attention_modules, state_of
from outeffhop.outliers import measure

MODELS = ("opt", "bert", "llama", "gpt2", "vit")
SOFTMAX = ("outeffhop", "outeffhop(n=4)", "gated", "gated-outeffhop")


def plain(name):
    torch.manual_seed(0)
    return CLASSES[name][1].from_config(config(name)).eval()


def trained(name):
    """A tiny model whose scores lie far off 0, as those of trained models do: by up to ±50, another for each head."""
    model = plain(name)
    with torch.no_grad():
        for module in attention_modules(model).values():
            for part, value in (("q_proj", 12.0), ("query", 12.0), ("k_proj", -3.0), ("key", -3.0)):
                layer = getattr(module, part, None)
                if layer is not None:
                    layer.weight.mul_(4)
                    if layer.bias is not None:
                        layer.bias.add_(value * torch.linspace(-1, 1, layer.bias.numel()))
    return model


def run(model, name):
    with torch.no_grad():
        out = model(**inputs(name))
    return out.logits if "logits" in out else out[0]


def lse_of(model, name):
    """The logsumexp of each head, [modules][H, N], by scores computed here."""
    found = {}
    from outeffhop.models.inspection import inspecting

    def probe(module, part, tensor):
        if part == "scores":
            found.setdefault(module, []).append(tensor)
        return tensor

    with inspecting(model, probe=probe), torch.no_grad():
        model(**inputs(name))
    return found


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", SOFTMAX)
def test_the_same_function_is_the_same_at_any_offset(name, method):
    model = trained(name)
    before = run(model, name)
    scores = [s for parts in lse_of(model, name).values() for s in parts]
    if name in ("opt", "bert"):
        assert max(s.abs().max().item() for s in scores) > 20  # the premise
    convert(model, method, same_function=True)
    torch.testing.assert_close(run(model, name), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_same_function_in_every_dtype_and_through_a_file(dtype, tmp_path):
    model = trained("opt").to(dtype)
    before = run(model, "opt")
    convert(model, "gated-outeffhop", same_function=True)
    tolerance = {torch.float64: 1e-6}.get(dtype, 2e-2)  # an open gate is 1 − 2e-9
    torch.testing.assert_close(run(model, "opt"), before, rtol=tolerance, atol=tolerance)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(run(load_checkpoint(tmp_path), "opt"), run(model, "opt"))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.01, 0.2])
@pytest.mark.parametrize("method", ["outeffhop", "outeffhop(sink=learned)", "gated-outeffhop(n=4)"])
def test_every_head_gives_the_no_op_its_share(name, share, method):
    model, batch = trained(name), inputs(name)
    convert(model, method, calibrate=[batch], share=share)
    first, *later = measure(model, [batch]).attention
    assert first.no_op == pytest.approx([share] * len(first.no_op), rel=0.02)
    for heads in later:  # what comes before them has changed a little
        assert all(share / 5 < part < min(5 * share, 1) for part in heads.no_op)
    states = [state_of(module) for module in attention_modules(model).values()]
    assert len({round(s, 3) for state in states for s in state.sink.tolist()}) > 1  # each has its own


def test_a_calibrated_learned_sink_has_a_gradient():
    model, batch = trained("opt").train(), inputs("opt")
    convert(model, "outeffhop(sink=learned)", calibrate=[batch])
    model(**batch, labels=batch["input_ids"]).loss.backward()
    for module in attention_modules(model).values():
        assert (state_of(module).sink.grad.abs() > 0).all()


@pytest.mark.parametrize("method", ["vanilla(qk_norm=rms)", "gated-outeffhop(qk_norm=rms)"])
def test_qk_norm_starts_from_the_lengths_of_queries_and_keys(method, caplog):
    model, batch = trained("opt"), inputs("opt")
    before = run(model, "opt").log_softmax(-1)

    def divergence(other):
        return (before.exp() * (before - run(other, "opt").log_softmax(-1))).sum(-1).mean().item()

    at_once = divergence(convert(copy.deepcopy(model), "vanilla(qk_norm=rms)"))
    with caplog.at_level(logging.INFO, logger="outeffhop"):
        near = divergence(convert(model, method, calibrate=[batch]))
    assert near < 0.7 * at_once
    assert f"{near:.2g}"[:3] in caplog.text  # it says how far it is
    factors = state_of(next(iter(attention_modules(model).values()))).qk_norm.query.weight
    assert not torch.allclose(factors, torch.ones(4), atol=0.1)


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_qk_norm_starts_from_the_mean_sizes_of_queries_and_keys(name):
    """Normalized ones have the size 1, so the factor is the product of the sizes before."""
    model, batch = plain(name), inputs(name)
    seen = {}
    attention = next(iter(attention_modules(model).values()))
    for part in ("q_proj", "k_proj"):
        getattr(attention, part).register_forward_hook(lambda _, args, out, part=part: seen.update({part: out}))
    run(model, name)
    q, k = (seen[part].unflatten(-1, (-1, attention.head_dim)).square().mean(-1).sqrt().mean((0, 1)) for part in seen)
    convert(model, "vanilla(qk_norm=rms)", calibrate=[batch, batch])
    factors = state_of(next(iter(attention_modules(model).values()))).qk_norm.query.weight
    torch.testing.assert_close(factors, q * k.repeat_interleave(len(q) // len(k)), rtol=1e-4, atol=0)


def test_a_calibrated_model_is_saved_and_moved_to_the_method(tmp_path):
    model, batch = trained("opt"), inputs("opt")
    target = run(convert(copy.deepcopy(model), "gated-outeffhop"), "opt")
    convert(model, "gated-outeffhop", calibrate=[batch])
    start = run(model, "opt")
    schedule = SinkSchedule(steps=6)
    schedule.apply(model, 0)
    assert torch.equal(run(model, "opt"), start)
    schedule.apply(model, 2)
    model.save_pretrained(tmp_path)
    again = load_checkpoint(tmp_path)  # knows where its sinks started
    for each in (model, again):
        schedule.apply(each, 4)
    torch.testing.assert_close(run(again, "opt"), run(model, "opt"))
    schedule.apply(model, 6)
    torch.testing.assert_close(run(model, "opt"), target)


def test_padding_does_not_count():
    model, batch = trained("bert"), inputs("bert")
    batch = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    alone = convert(copy.deepcopy(model), "outeffhop", calibrate=[batch])
    padded = {name: torch.nn.functional.pad(value, (0, 7)) for name, value in batch.items()}
    convert(model, "outeffhop", calibrate=[padded])
    for one, other in zip(attention_modules(alone).values(), attention_modules(model).values(), strict=True):
        torch.testing.assert_close(state_of(one).sink, state_of(other).sink, rtol=1e-3, atol=1e-3)


def test_batches_of_padding_alone_are_refused():
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5, dtype=torch.long)}
    with pytest.raises(ValueError, match="calibrate has no queries: every token is padding"):
        convert(plain("bert"), "outeffhop", calibrate=[batch])


def test_an_encoder_and_a_decoder_have_padding_of_their_own():
    torch.manual_seed(0)
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    more = dict(encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=20, max_position_embeddings=16)
    model = BartForConditionalGeneration(BartConfig(**sizes, **more)).eval()
    whole = {"input_ids": torch.randint(4, 20, (2, 4)), "decoder_input_ids": torch.randint(4, 20, (2, 3))}
    padded = {k: torch.nn.functional.pad(v, (0, 6 - v.shape[1])) for k, v in whole.items()}  # equally long
    for name, ids in whole.items():
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, 6 - ids.shape[1]))
        padded[name.replace("input_ids", "attention_mask")] = mask
    one, other = (convert(copy.deepcopy(model), "outeffhop", calibrate=[batch]) for batch in (whole, padded))
    for a, b in zip(attention_modules(one).values(), attention_modules(other).values(), strict=True):
        torch.testing.assert_close(state_of(a).sink, state_of(b).sink, rtol=1e-3, atol=1e-3)


def test_the_sink_of_a_share_solves_its_equation():
    torch.manual_seed(0)
    lse = torch.randn(3, 500) * torch.tensor([[0.1], [5.0], [40.0]]) + torch.tensor([[-100.0], [0.0], [60.0]])
    for share in (0.001, 0.01, 0.5, 0.99):
        sink = sink_of_share(lse.double(), share)
        torch.testing.assert_close(
            torch.sigmoid(sink[:, None] - lse.double()).mean(-1), torch.full((3,), share, dtype=torch.float64)
        )


@pytest.mark.parametrize(
    ("method", "given", "words"),
    [
        ("outeffhop", {"share": 0.0, "calibrate": [1]}, "share=0.0"),
        ("outeffhop", {"share": 1.0, "calibrate": [1]}, "share=1.0"),
        ("outeffhop", {"calibrate": []}, "calibrate is empty"),
        ("outeffhop", {"calibrate": [1], "same_function": True}, "same_function=True and calibrate"),
        ("clipped", {"calibrate": [1]}, "calibrate with method='clipped'"),
        ("gsh", {"same_function": True}, "same_function with method='gsh'"),
        ("outeffhop(sink=learned)", {"same_function": True}, "learned sink.*calibrate=batches"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(method, given, words):
    model = plain("opt")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=words):
        convert(model, method, **given)
    assert model.config._attn_implementation == "sdpa"
    assert before.keys() == model.state_dict().keys()


def test_more_layers_are_no_more_reads_of_what_runs():
    """Each would make a GPU wait."""
    found = []
    for layers in (1, 3):
        sized = config("llama")
        sized.num_hidden_layers = layers
        model = CLASSES["llama"][1].from_config(sized).eval()
        with waits() as reads, torch.no_grad():
            _observe(model, [inputs("llama")])
        found.append(reads)
    assert found[0] == found[1]
