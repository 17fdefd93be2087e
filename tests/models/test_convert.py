"""Converting, saving, loading: a model keeps its method, or is refused."""

import copy
import json
import math
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import MODELS, SIX, config, inputs, stir
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    SiglipVisionConfig,
    SiglipVisionModel,
    Trainer,
    TrainingArguments,
)

from outeffhop.models import SinkSchedule, convert, from_config, model_summary, presets
from outeffhop.models.modules import attention_modules, extension_of
from outeffhop.models.persistence import persist

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
    before = [extension_of(m).gate.bias.clone() for m in attention_modules(model).values()]
    convert(model, "gated-outeffhop(qk_norm=rms)")
    for old, module in zip(before, attention_modules(model).values(), strict=True):
        assert torch.equal(old, extension_of(module).gate.bias)


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
    edit(tmp_path, attn_implementation=None)  # the key alone says enough
    assert load(tmp_path).config._attn_implementation == "gated-outeffhop"
    edit(tmp_path, outeffhop={"method": "gated-outefhop"})
    with pytest.raises(ValueError, match="gated-outeffhop"):
        load(tmp_path)
    edit(tmp_path, outeffhop={"mode": 1})
    with pytest.raises(ValueError, match='"method"'):
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
    persist()  # again: nothing
    model = plain("bert")
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "outeffhop" not in saved
    assert "attn_implementation" not in saved
    assert not any(extension_of(m) for m in attention_modules(model).values())
    other, info = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert other.config._attn_implementation == "sdpa"
    assert info["missing_keys"] is not None


def test_parameters_travel_in_the_config(tmp_path):
    settings = config("bert")
    settings.outeffhop = {"method": "clipped(alpha=12)"}
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(settings).eval()
    assert torch.equal(logits(model), logits(convert(plain("bert"), "clipped(alpha=12)")))
    model.set_attn_implementation("outeffhop")  # the user's later word counts, in what is saved as well
    assert_same(model, reload(model, tmp_path / "a"))
    model.set_attn_implementation("sdpa")
    assert reload(model, tmp_path / "b").config._attn_implementation == "sdpa"


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
    with pytest.raises(ValueError, match=r"self_attn \(GptOssAttention\).*sinks of its own"):
        convert(plain("gpt-oss"), "clipped")
    with pytest.raises(ValueError, match=r"self_attn \(GptOssAttention\).*sinks of its own"):
        convert(plain("gpt-oss"), "gated-outeffhop(sink=learned)")
    with pytest.raises(ValueError, match=r"self_attn \(Qwen3Attention\).*itself \(q_norm, k_norm\)"):
        convert(plain("qwen3"), "outeffhop(qk_norm=rms)")
    with pytest.raises(ValueError, match=r"same function: qk_norm=rms"):
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
@pytest.mark.parametrize("method", ["outeffhop", "outeffhop(n=4)", "gated", GATED, "gated-outeffhop"])
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
    line, curve = SinkSchedule(steps=10), SinkSchedule(steps=10, start=-8.0, end=1.0, shape="cosine")
    assert [line.at(s) for s in (-1, 0, 5, 10, 99)] == [-20.0, -20.0, -10.0, 0.0, 0.0]
    assert (curve.at(0), curve.at(10)) == (-8.0, 1.0)
    assert curve.at(5) == pytest.approx(-3.5)
    assert SinkSchedule.to("outeffhop(n=4)", steps=3).at(3) == math.log(4)
    assert SinkSchedule.to("gated", steps=3) == SinkSchedule(steps=3)
    with pytest.raises(ValueError, match="steps=0"):
        SinkSchedule(steps=0)
    with pytest.raises(ValueError, match="start=-inf"):
        SinkSchedule(steps=1, start=-float("inf"))
    with pytest.raises(ValueError, match=r"give end=1\.38"):
        SinkSchedule(steps=5).apply(build("bert", "outeffhop(n=4)"), 0)
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
        assert each.config.outeffhop == {"method": method}


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
    assert whole.config.outeffhop == {"method": "gated-outeffhop"}
    midway = AutoModelForMaskedLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    sink = extension_of(next(iter(attention_modules(midway).values()))).sink
    assert torch.equal(sink, torch.full((4,), SinkSchedule(steps=5).at(3)))  # of the step it was saved after
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
