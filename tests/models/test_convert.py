"""Converting, saving, loading: a model keeps its method, or is refused."""

import copy
import json
import math
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import MODELS, SIX, clip, config, inputs, stir
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    CLIPModel,
    CLIPTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from outeffhop.models import SinkSchedule, convert, from_config, model_summary, presets, register
from outeffhop.models.modules import attention_modules, state_of

METHODS = (
    *SIX,
    "outeffhop(n=4)",
    "outeffhop(sink=learned)",
    "clipped(alpha=12)",
    "clipped(gamma=-0.1, zeta=1.1)",
    "gated-outeffhop(predictor=mlp, sink=learned, init=0.4)",
    "gated(gate=constant)",
    "gated(gate=element, predictor=features)",
    "outeffhop(qk_norm=rms)",
    "clipped(alpha=12, qk_norm=rms)",
    "gsh",
)
EVERYTHING = "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)"

GATED = "gated-outeffhop(sink=learned)"


def build(name, method="vanilla"):
    torch.manual_seed(0)
    return stir(from_config(MODELS[name][1], config(name), method)).eval()


def plain(name):
    """A model as transformers makes it."""
    torch.manual_seed(0)
    return MODELS[name][1].from_config(config(name)).eval()


def logits(model, name="bert"):
    with torch.no_grad():
        return model(**inputs(name, dtype=model.dtype)).logits


def reload(model, folder, name="bert"):
    model.save_pretrained(folder)
    return MODELS[name][1].from_pretrained(folder)


def aligned(model):
    """A copy: loaded tensors may lie unaligned in a mapped file, where matrix products round otherwise."""
    return copy.deepcopy(model)


def assert_same(a, b, name="bert"):
    assert model_summary(a) == model_summary(b)
    states = a.state_dict(), b.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    assert torch.equal(logits(aligned(a), name), logits(aligned(b), name))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bert", "opt", "vit"])
def test_round_trip(name, method, tmp_path):
    model = build(name, method)
    other = reload(model, tmp_path / "a", name)
    assert_same(model, other, name)
    assert_same(model, reload(other, tmp_path / "b", name), name)


@pytest.mark.parametrize("method", [*SIX, EVERYTHING])
@pytest.mark.parametrize("name", ["bert", "opt", "vit"])
def test_round_trip_of_a_half_model(name, method, tmp_path):
    model = build(name, method).half()
    other = reload(model, tmp_path, name)
    assert other.dtype == torch.float16
    assert_same(model, other, name)


@pytest.mark.parametrize("name", ["bert", "opt", "vit"])
def test_convert_twice_leaves_nothing_behind(name, tmp_path):
    model = plain(name)
    before = set(model.state_dict())
    convert(model, GATED)
    convert(model, EVERYTHING)
    assert len(model.state_dict()) > len(before)
    convert(stir(model), "outeffhop")
    assert set(model.state_dict()) == before
    assert_same(model, reload(model, tmp_path, name), name)
    assert torch.equal(logits(model, name), logits(convert(plain(name), "outeffhop"), name))


@pytest.mark.parametrize("method", [*SIX, EVERYTHING])
def test_convert_keeps_the_weights_and_equals_a_fresh_model(method):
    model = plain("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert convert(model, method) is model
    after = model.state_dict()
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    torch.manual_seed(0)
    fresh = from_config(AutoModelForMaskedLM, config("bert"), method).eval()
    assert torch.equal(logits(model), logits(fresh))  # the same seed gives the same weights, gates or not


def test_shared_parameters_survive_a_conversion():
    model = stir(convert(plain("bert"), "gated"))
    before = [state_of(m).gate.bias.clone() for m in attention_modules(model).values()]
    convert(model, "gated-outeffhop(qk_norm=rms)")
    for old, module in zip(before, attention_modules(model).values(), strict=True):
        assert torch.equal(old, state_of(module).gate.bias)


def any_model(name, method):
    return stir(presets.build("stanhop", "tiny", method)).eval() if name == "stanhop" else build(name, method)


def any_inputs(name):
    generator = torch.Generator().manual_seed(7)
    return {"past_values": torch.randn(2, 48, 7, generator=generator)} if name == "stanhop" else inputs(name)


def test_a_second_process_finds_every_model_and_method(tmp_path):
    expected = {}
    for name in ("bert", "opt", "vit", "stanhop"):
        for method in SIX:
            model, batch = any_model(name, method), any_inputs(name)
            folder = str(tmp_path / name / method)
            model.save_pretrained(folder)
            with torch.no_grad():
                expected[folder] = type(model).__name__, method, batch, model.state_dict(), model(**batch)[0]
    torch.save(expected, tmp_path / "expected.pt")
    code = """
import copy, sys, torch, transformers, outeffhop
from transformers import AutoModel
from outeffhop.models import stanhop
torch.set_num_threads(int(sys.argv[2]))  # as many as there, or sums round otherwise
for folder, (kind, method, batch, state, logits) in torch.load(sys.argv[1]).items():
    model = (getattr(transformers, kind, None) or getattr(stanhop, kind)).from_pretrained(folder)
    assert outeffhop.model_summary(model).method.split("(")[0] == method, folder
    found = model.state_dict()
    assert found.keys() == state.keys(), folder
    assert all(torch.equal(found[name], state[name]) for name in state), folder
    model = copy.deepcopy(model)
    assert torch.equal(model(**batch)[0], logits), folder
    if kind.startswith("Bert"):
        base = copy.deepcopy(AutoModel.from_pretrained(folder))
        assert base.config._attn_implementation == method
        assert torch.equal(base(**batch)[0], model.bert(**batch)[0]), folder
print(len(torch.load(sys.argv[1])))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "expected.pt"), str(torch.get_num_threads())]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[-1] == "24"


def test_without_the_package_a_checkpoint_is_refused_not_changed(tmp_path):
    build("bert", "outeffhop").save_pretrained(tmp_path)
    code = f"from transformers import AutoModel; AutoModel.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert 'attn_implementation="outeffhop"' in run.stderr


def edit(folder, **changes):
    path = folder / "config.json"
    data = json.loads(path.read_text())
    for key, value in changes.items():
        data.pop(key, None)
        if value is not None:
            data[key] = value
    path.write_text(json.dumps(data))


def test_broken_checkpoints_are_refused(tmp_path):
    build("bert", GATED).save_pretrained(tmp_path)
    load = AutoModelForMaskedLM.from_pretrained
    with pytest.raises(ValueError, match=r"'sdpa'.*gated-outeffhop\(sink=learned\).*convert"):
        load(tmp_path, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=r"outeffhop\.gate\.bias.*does not call for"):
        load(tmp_path, attn_implementation="outeffhop")
    with pytest.raises(ValueError, match=r"cannot be restored.*outeffhop\.qk_norm\.query\.weight"):
        load(tmp_path, attn_implementation="gated-outeffhop", outeffhop={"method": f"{GATED[:-1]}, qk_norm=rms)"})
    weights = load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in weights.items() if not k.endswith("outeffhop.sink")}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"cannot be restored.*outeffhop\.sink.*convert"):
        load(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit(tmp_path, attn_implementation=None)
    with pytest.raises(ValueError, match=r"'sdpa'.*config\.outeffhop says gated-outeffhop\(sink=learned\)"):
        load(tmp_path)
    edit(tmp_path, outeffhop={"method": "gated-outefhop"})
    with pytest.raises(ValueError, match="gated-outeffhop"):
        load(tmp_path)
    edit(tmp_path, outeffhop={"mode": 1})
    with pytest.raises(ValueError, match='"method"'):
        load(tmp_path)
    edit(tmp_path, outeffhop={"method": GATED, "format": 99})
    with pytest.raises(ValueError, match="format 99 is unknown"):
        load(tmp_path)
    edit(tmp_path, outeffhop=None)
    with pytest.raises(ValueError, match=r"holds .*outeffhop\.gate"):
        load(tmp_path)


def test_a_plain_checkpoint_takes_a_method_on_loading(tmp_path):
    plain("bert").save_pretrained(tmp_path)
    load = AutoModelForMaskedLM.from_pretrained
    model = load(tmp_path, attn_implementation="outeffhop")
    assert torch.equal(logits(aligned(model)), logits(aligned(convert(load(tmp_path), "outeffhop"))))
    with pytest.raises(ValueError, match=r"convert\(model, 'gated'\)"):
        load(tmp_path, attn_implementation="gated")


def test_nothing_changes_for_other_models(tmp_path):
    register()  # again: nothing
    model = plain("bert")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "outeffhop" not in saved
    assert "attn_implementation" not in saved
    assert not any(state_of(m) for m in attention_modules(model).values())
    other, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert other.config._attn_implementation == "sdpa"
    assert info["missing_keys"] is not None


def test_a_tensor_free_method_needs_its_implementation_in_the_config(tmp_path):
    build("bert", "clipped(alpha=12)").save_pretrained(tmp_path)
    edit(tmp_path, attn_implementation=None)
    with pytest.raises(ValueError, match=r'says clipped\(alpha=12\).*"attn_implementation": "clipped"'):
        AutoModelForMaskedLM.from_pretrained(tmp_path)


def test_what_outeffhop_0_1_0_wrote_is_read(tmp_path):
    model = build("bert", GATED)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["outeffhop"].pop("format") == 2
    edit(tmp_path, outeffhop=saved["outeffhop"])
    assert_same(model, AutoModelForMaskedLM.from_pretrained(tmp_path))


def test_layers_as_outeffhop_0_1_0_named_them_are_refused(tmp_path):
    model = presets.build("stanhop", "tiny", "gated")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace(".state.gate.", ".gate."): value for name, value in weights.items()}
    assert renamed.keys() != weights.keys()
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"saved by outeffhop 0\.1\.0.*load it with that version"):
        type(model).from_pretrained(tmp_path)


def test_a_name_alone_is_saved(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(config("bert"), attn_implementation="outeffhop").eval()
    again = reload(model, tmp_path / "a")
    assert model_summary(again).method == "outeffhop"
    assert torch.equal(logits(aligned(again)), logits(model))
    plain("bert").save_pretrained(tmp_path / "b")
    AutoModelForMaskedLM.from_pretrained(tmp_path / "b", attn_implementation="clipped").save_pretrained(tmp_path / "c")
    assert model_summary(AutoModelForMaskedLM.from_pretrained(tmp_path / "c")).method == "clipped"


@pytest.mark.parametrize("method", ["clipped(alpha=12)", "gated"])
def test_a_config_builds_no_model_with_other_parameters(method, tmp_path):
    build("bert", method).config.save_pretrained(tmp_path)
    model = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tmp_path)).eval()
    with pytest.raises(ValueError, match=rf"outeffhop\.convert\(model, '{re.escape(method)}'\)"):
        logits(model)
    torch.manual_seed(0)
    fresh = from_config(AutoModelForMaskedLM, AutoConfig.from_pretrained(tmp_path), "outeffhop")
    assert model_summary(fresh).method == "outeffhop"


def test_a_model_built_without_the_method_of_its_config_is_not_saved(tmp_path):
    settings = config("bert")
    settings.outeffhop = {"method": "clipped(alpha=12)"}
    with pytest.raises(ValueError, match=r"clipped\(alpha=12\).*'sdpa'.*outeffhop\.from_config"):
        AutoModelForMaskedLM.from_config(settings).save_pretrained(tmp_path)


def test_a_later_implementation_counts_in_what_is_saved(tmp_path):
    model = build("bert", "clipped(alpha=12)")
    model.set_attn_implementation("outeffhop")
    assert_same(model, reload(model, tmp_path / "a"))
    for load in (BertForMaskedLM.from_pretrained, AutoModelForMaskedLM.from_pretrained):
        other = load(tmp_path / "a", attn_implementation="sdpa")  # nothing is learned, so that it can be left out
        assert model_summary(reload(other, tmp_path / "b")).method == "sdpa"
    model.set_attn_implementation("sdpa")
    assert reload(model, tmp_path / "c").config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", ["gated", "vanilla(qk_norm=rms)"])
def test_another_implementation_does_not_pass_over_what_is_learned(method):
    model = build("bert", method)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match=rf"'sdpa'.*{re.escape(method)}.*convert"):
        logits(model)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="outeffhop"):
        convert(plain("bert"), "outefhop")
    with pytest.raises(ValueError, match="outeffhop"):
        from_config(AutoModelForMaskedLM, config("bert"), "outefhop")
    with pytest.raises(TypeError, match="config is 'outeffhop', a str: give a model class"):
        from_config(config("bert"), "outeffhop")
    with pytest.raises(TypeError, match="Linear"):
        convert(torch.nn.Linear(2, 2), "outeffhop")
    with pytest.raises(ValueError, match="clipped"):
        convert(plain("bert"), "clipped", same_function=True)
    with pytest.raises(ValueError, match=r"self_attn \(GptOssAttention\).*its own learned sinks"):
        convert(plain("gpt-oss"), "sparse")
    with pytest.raises(ValueError, match=r"self_attn \(GptOssAttention\).*its own learned sinks"):
        convert(plain("gpt-oss"), "gated-outeffhop(sink=learned)")
    with pytest.raises(ValueError, match=r"self_attn \(Qwen3Attention\).*itself \(q_norm, k_norm\)"):
        convert(plain("qwen3"), "outeffhop(qk_norm=rms)")
    with pytest.raises(ValueError, match=r"same_function=True.*qk_norm=rms.*calibrate"):
        convert(plain("bert"), "outeffhop(qk_norm=rms)", same_function=True)
    model = plain("opt")
    with pytest.raises(ValueError, match=r"self_attn \(OPTAttention\).*to come"):
        convert(model, "gated(gate=head)")
    assert model.config._attn_implementation == "sdpa"
    siglip = SiglipVisionModel(
        SiglipVisionConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(ValueError, match=r"self_attn \(SiglipAttention\).*keyword"):
        convert(siglip, "gated")
    convert(siglip, "outeffhop")


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
@pytest.mark.parametrize("method", ["outeffhop", "outeffhop(n=4)", "gated", "gated-outeffhop"])
def test_same_function(name, method, tmp_path):
    before = logits(plain(name), name)
    model = convert(plain(name), method, same_function=True)
    torch.testing.assert_close(logits(model, name), before, rtol=1e-5, atol=2e-5)
    assert_same(model, reload(model, tmp_path, name), name)
    convert(model, "vanilla")
    torch.testing.assert_close(logits(model, name), before, rtol=1e-5, atol=2e-5)


def test_a_moving_half_model_is_saved_exactly(tmp_path):
    model = convert(plain("bert").half(), "gated-outeffhop", same_function=True)
    SinkSchedule(steps=7).apply(model, 3)
    assert_same(model, reload(model, tmp_path))


def test_schedule_values():
    line, curve = SinkSchedule(steps=10), SinkSchedule(steps=10, shape="cosine")
    assert [line.progress(s) for s in (-1, 0, 5, 10, 99)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert [curve.progress(s) for s in (0, 5, 10)] == pytest.approx([0.0, 0.5, 1.0])
    assert curve.progress(2) < line.progress(2)
    with pytest.raises(ValueError, match="steps=0"):
        SinkSchedule(steps=0)
    with pytest.raises(FrozenInstanceError):  # what is checked once stays so
        line.steps = 0
    with pytest.raises(ValueError, match="shape='stairs'"):
        SinkSchedule(steps=1, shape="stairs")
    with pytest.raises(ValueError, match="clipped has neither"):
        SinkSchedule(steps=5).apply(build("bert", "clipped"), 0)


@pytest.mark.parametrize("method", ["outeffhop", "gated", "gated-outeffhop"])
def test_schedule_moves_the_model_and_survives_saving(method, tmp_path):
    schedule, target = SinkSchedule(steps=4), logits(convert(plain("bert"), method))
    model = convert(plain("bert"), method, same_function=True)
    start = logits(model)
    schedule.apply(model, 0)
    assert torch.equal(logits(model), start)
    schedule.apply(model, 3)
    middle = logits(model)
    assert not torch.allclose(middle, start)
    assert not torch.allclose(middle, target)
    other = reload(model, tmp_path)
    assert_same(model, other)
    for each in (model, other):
        schedule.apply(each, 4)
        assert torch.equal(logits(aligned(each)), target)
        assert not any("offset" in k or "sink" in k for k in each.state_dict())
        assert each.config.outeffhop == {"format": 2, "method": method}


def test_a_moving_sink_does_not_compile_anew():
    model = convert(plain("bert"), "outeffhop", same_function=True)
    schedule = SinkSchedule(steps=8)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(4):
        schedule.apply(model, step)
        compiled(**inputs("bert"))
    assert counter.frame_count == 1


class Lines(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.arange(3, 11) + index
        return {"input_ids": ids, "labels": ids}


def test_trainer_callback_and_resume(tmp_path):
    pytest.importorskip("accelerate")  # the Trainer needs it

    def train(folder, resume=None):
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=6,
            save_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            logging_steps=100,
            learning_rate=1e-2,
        )
        model = convert(plain("bert"), "gated-outeffhop", same_function=True)
        trainer = Trainer(model, arguments, train_dataset=Lines(), callbacks=[SinkSchedule(steps=5).callback()])
        trainer.train(resume_from_checkpoint=resume)
        return model

    whole = train(tmp_path / "a")
    assert whole.config.outeffhop == {"format": 2, "method": "gated-outeffhop"}
    midway = AutoModelForMaskedLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    sink = state_of(next(iter(attention_modules(midway).values()))).sink
    torch.testing.assert_close(sink, torch.full((4,), math.log(3 / 5)))  # n of the step it was saved after
    resumed = train(tmp_path / "b", resume=str(tmp_path / "a" / "checkpoint-4"))
    assert torch.allclose(logits(whole.eval()), logits(resumed.eval()), rtol=1e-5, atol=1e-6)


def test_summary():
    model = build("bert", "gated-outeffhop(sink=learned)")
    summary = model_summary(model)
    assert (summary.layers, summary.heads) == (2, (4, 4))
    assert summary.sink_parameters == 2 * 4
    assert summary.gate_parameters == 2 * (4 * 8 + 4)
    assert summary.parameters - summary.extra_parameters == model_summary(plain("bert")).parameters
    assert "gated-outeffhop(sink=learned)" in str(summary)
    everything = model_summary(build("bert", EVERYTHING))
    assert everything.gate_parameters == 2 * (32 * 32 + 32)
    assert (everything.sink_parameters, everything.norm_parameters) == (2 * 4, 2 * 4)
    assert everything.parameters - everything.extra_parameters == model_summary(plain("bert")).parameters
    assert "of QK-norm" in str(everything)
    assert model_summary(plain("bert")).method == "sdpa"


def t5(heads=4):
    sizes = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=heads)
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**sizes, pad_token_id=1, decoder_start_token_id=1)).eval()


def test_parts_whose_config_is_a_copy_are_converted():
    model, ids = t5(), inputs("bert")["input_ids"]
    before = model(input_ids=ids, decoder_input_ids=ids).logits
    convert(model, "outeffhop")
    parts = (model, model.encoder, model.decoder)
    assert [part.config._attn_implementation for part in parts] == ["outeffhop"] * 3
    assert not torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, before)
    convert(model, "vanilla")
    assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, before)


def test_a_refused_gate_leaves_the_model_as_it_was():
    model, ids = t5(heads=6), inputs("bert")["input_ids"]  # 32 features in 6 parts, as t5-v1_1-small has 512
    before = model(input_ids=ids, decoder_input_ids=ids).logits
    with pytest.raises(ValueError, match=r"embed_dim=32 .*num_heads=6.*predictor='features'"):
        convert(model, "gated")
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids, decoder_input_ids=ids).logits, before)
    convert(model, "gated(predictor=features)")(input_ids=ids, decoder_input_ids=ids)


def test_models_of_one_config_are_converted_one_by_one(tmp_path):
    shared = config("bert")
    baseline, ours, third = (BertForMaskedLM(shared).eval() for _ in range(3))
    before = logits(baseline)
    convert(ours, "outeffhop")
    assert torch.equal(logits(baseline), before)
    assert (baseline.config._attn_implementation, ours.config._attn_implementation) == ("sdpa", "outeffhop")
    assert reload(baseline, tmp_path / "baseline").config._attn_implementation == "sdpa"
    assert torch.equal(logits(baseline), before)
    for method in ("gated", "outeffhop(n=4)"):
        stir(convert(third.bert, method))  # of a part: the whole is saved with it
        assert model_summary(third).method == method
        assert_same(third, reload(third, tmp_path / method))


def test_parts_of_one_config_with_methods_of_their_own_are_not_saved(tmp_path):
    model = t5()
    convert(model.encoder, "outeffhop")
    with pytest.raises(ValueError, match=r"encoder.* has outeffhop and decoder.* has softmax.*one T5Config"):
        model.save_pretrained(tmp_path)
    convert(model.decoder, "outeffhop")
    model.save_pretrained(tmp_path)
    again = T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert [model_summary(part).method for part in (again, again.encoder, again.decoder)] == ["outeffhop"] * 3


def test_same_function_starts_from_softmax_alone():
    for method in ("gated", "outeffhop", "vanilla(qk_norm=rms)"):
        model = build("bert", method)
        before = logits(model)
        with pytest.raises(ValueError, match=rf"same_function.* softmax model, and .*self .*has {re.escape(method)}"):
            convert(model, "gated-outeffhop", same_function=True)
        assert torch.equal(logits(model), before)
    for model in (plain("bert"), build("bert", "vanilla")):
        before = logits(model)
        for _ in range(2):  # one that is on its way may go back to its start
            convert(model, "gated-outeffhop", same_function=True)
            torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=2e-5)


def test_sinks_of_a_models_own_are_not_moved():
    model = plain("gpt-oss")
    before = logits(model, "gpt-oss")
    for method in ("outeffhop", "gated-outeffhop"):
        with pytest.raises(ValueError, match=r"self_attn \(GptOssAttention\) has (its own )?learned sinks.*'gated'"):
            convert(model, method, same_function=True)
    assert model.config._attn_implementation == "eager"
    convert(model, "outeffhop")  # its own sinks win, so this is the same function anyway
    torch.testing.assert_close(logits(model, "gpt-oss"), before, rtol=1e-5, atol=2e-5)
    with pytest.raises(ValueError, match="learned sinks"):
        SinkSchedule(steps=3).apply(model, 0)
    assert torch.isfinite(logits(model, "gpt-oss")).all()
    moved = convert(plain("gpt-oss"), "gated", same_function=True)
    torch.testing.assert_close(logits(moved, "gpt-oss"), before, rtol=1e-5, atol=2e-5)


def test_a_schedule_needs_modules_made_for_the_method():
    model = plain("bert")
    model.set_attn_implementation("outeffhop")  # computes softmax1, but nothing there can move
    with pytest.raises(ValueError, match=r"convert\(model, 'outeffhop'\) first"):
        SinkSchedule(steps=3).apply(model, 0)
    with pytest.raises(ValueError, match="StanhopForForecasting does not use transformers' attention interface"):
        SinkSchedule(steps=3).apply(presets.build("stanhop"), 0)


def test_a_method_twice_is_refused():
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa' would replace method='outeffhop\(n=4\)'"):
        from_config(AutoModelForMaskedLM, config("bert"), "outeffhop(n=4)", attn_implementation="sdpa")


def test_what_is_on_its_way_is_saved_under_any_implementation(tmp_path):
    model = convert(plain("bert"), "outeffhop", same_function=True)
    SinkSchedule(steps=4).apply(model, 1)
    before = logits(model)
    model.set_attn_implementation("sdpa")
    again = reload(model, tmp_path)  # its sinks are among the weights, so the method is still called for
    assert torch.equal(logits(aligned(again)), before)
    with pytest.raises(ValueError, match=r"'sdpa'.*config\.outeffhop says outeffhop, which has its own parameters"):
        AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="sdpa")


PARTS = [
    (None, "outeffhop(n=4)"),
    (None, "gated"),
    ("outeffhop(n=4)", "outeffhop(n=2)"),
    ("gated", "vanilla"),
    ("outeffhop", "gated-outeffhop(sink=learned)"),
    ("gated", "gated(predictor=features)"),
]


@pytest.mark.parametrize(("whole", "part"), PARTS)
def test_parts_of_a_model_have_methods_of_their_own(whole, part, tmp_path):
    model, batch = clip()
    if whole is not None:
        convert(model, whole)
    stir(convert(model.vision_model, part))
    expected = model(**batch).logits_per_image
    model.save_pretrained(tmp_path)
    again = aligned(CLIPModel.from_pretrained(tmp_path))
    assert torch.equal(again(**batch).logits_per_image, expected)
    assert model_summary(again.vision_model).method == part
    assert model_summary(again.text_model).method == (whole or "sdpa")


def test_the_method_of_a_whole_reaches_its_parts():
    model = from_config(CLIPModel, clip()[0].config, "gated(predictor=features)")
    for each in (model, model.vision_model, model.text_model):
        assert model_summary(each).method == "gated(predictor=features)"
    assert model_summary(convert(t5(), "outeffhop(n=4)").encoder).method == "outeffhop(n=4)"


def test_a_part_takes_another_implementation_on_loading(tmp_path):
    convert(clip()[0], "outeffhop(n=4)").save_pretrained(tmp_path / "a")
    model = CLIPModel.from_pretrained(tmp_path / "a", attn_implementation={"vision_config": "eager"})
    assert model.vision_model.config._attn_implementation == "eager"
    assert model_summary(model.text_model).method == "outeffhop(n=4)"
    convert(clip()[0], "gated").save_pretrained(tmp_path / "b")
    with pytest.raises(ValueError, match=r"'eager', but config\.outeffhop says gated"):
        CLIPModel.from_pretrained(tmp_path / "b", attn_implementation={"vision_config": "eager"})


def test_a_part_is_loaded_from_the_checkpoint_of_the_whole(tmp_path):
    model, batch = clip()
    stir(convert(model, "gated-outeffhop(n=2)")).save_pretrained(tmp_path / "clip")
    text = aligned(CLIPTextModel.from_pretrained(tmp_path / "clip"))
    ids = batch["input_ids"]
    assert torch.equal(text(input_ids=ids).last_hidden_state, model.text_model(input_ids=ids).last_hidden_state)
    with pytest.raises(ValueError, match=r"holds .*encoder\.layers\.0\.self_attn\.outeffhop\.gate"):
        CLIPTextModel.from_pretrained(tmp_path / "clip", attn_implementation="outeffhop")
    stir(convert(t5(), "gated")).save_pretrained(tmp_path / "t5")
    assert model_summary(T5EncoderModel.from_pretrained(tmp_path / "t5")).method == "gated"


class Wrapper(torch.nn.Module):
    """As adapters wrap a module that is to be trained along: what was there before, and the copy that is at work."""

    def __init__(self, module):
        super().__init__()
        self.original, self.working = module, copy.deepcopy(module)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("working"), name)

    def forward(self, *args):
        return self.working(*args)


@pytest.mark.parametrize("method", ["outeffhop(n=4)", EVERYTHING])
def test_a_wrapped_state_is_at_work(method):
    model = build("bert", method)
    expected = logits(model)
    for module in attention_modules(model).values():
        module.outeffhop = Wrapper(module.outeffhop)
    assert torch.equal(logits(model), expected)
    assert model_summary(model).method == method
