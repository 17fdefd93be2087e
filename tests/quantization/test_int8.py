"""Real integer execution: exports that equal the model, int8 that is near it, and what really runs in integers."""

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import pytest
import torch
from torch import nn

from outeffhop.cli.main import main
from outeffhop.models import presets
from outeffhop.quantization import fold_layernorm, int8
from outeffhop.quantization.int8 import Int8Model, export_int8
from outeffhop.quantization.int8_export import output_of
from outeffhop.quantization.int8_process import Worker
from outeffhop.quantization.int8_report import Int8Report, measure_int8

SIX = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")
SMALL = {
    # weights large enough for attention, masks and gates to be seen in the output
    "bert": dict(num_hidden_layers=2, hidden_size=32, intermediate_size=64, vocab_size=99, initializer_range=0.2),
    "opt": dict(num_hidden_layers=1, hidden_size=32, word_embed_proj_dim=32, ffn_dim=64, vocab_size=99, init_std=0.2),
    "vit": dict(num_hidden_layers=1, hidden_size=32, intermediate_size=64, initializer_range=0.2),
    "stanhop": dict(e_layers=1, d_model=16, d_ff=32, in_len=24, out_len=12),
}
QUICK = [("opt", "clipped-outeffhop"), ("vit", "gated")]
REST = [(name, method) for name in SMALL for method in SIX if (name, method) not in QUICK]

installed = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None or importlib.util.find_spec("nncf") is None,
    reason="needs outeffhop[int8]",
)


def built(name, method):
    torch.manual_seed(0)
    model = presets.build(name, "tiny", method, **SMALL[name])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if "gate" in path:  # off their first values, which are the same for every token
                p.add_(0.5 * torch.randn(p.shape, generator=generator))
    return model.eval()


def batch_of(name, size=3, length=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {
            "pixel_values": torch.randn(size, 1, 8, 8, generator=generator),
            "labels": torch.randint(10, (size,), generator=generator),
        }
    if name == "stanhop":
        past, future = (torch.randn(size, n, 7, generator=generator) for n in (24, 12))
        return {"past_values": past, "future_values": future}
    tokens, mask = torch.randint(3, 99, (size, length), generator=generator), torch.ones(size, length, dtype=torch.long)
    mask[1:, length - 4 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def unpadded(batch):
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])} if "input_ids" in batch else batch


def sqnr(truth, found):
    return float(10 * torch.log10(truth.square().sum() / (truth - found).square().sum()))


def agree(name, model, exported):
    """The export against the model, on other batch sizes, lengths and padding than it was exported with."""
    for size, length in ((4, 13), (1, 7)):
        batch = batch_of(name, size, length, seed=5)
        truth = output_of(model, batch)
        torch.testing.assert_close(exported.run(batch, "fp32"), truth, atol=1e-4, rtol=1e-4)
        assert sqnr(truth, exported.run(batch)) > 10


def exported_from(name, method, folder):
    model = built(name, method)
    return model, export_int8(model, [unpadded(batch_of(name, 2, 9, seed)) for seed in (1, 2)], folder / "export")


def attention_in_integers(found, layers):
    """Query times key in integers, softmax and values in floating point, once a layer, and no other product of two.

    OpenVINO compiles that as one operation where the CPU multiplies bytes (VNNI), as two products elsewhere.
    """
    fused = [o for o in found if o.kind == "Attention"]
    if fused:
        assert all(o.arithmetic == "mixed" and {"i8", "f32"} <= set(o.inputs) for o in fused)
        return len(fused) == layers and not any(o.kind in ("MatMul", "Softmax") for o in found)
    products = Counter(o.inputs for o in found if o.kind == "MatMul")
    softmax = [o.arithmetic for o in found if o.kind == "Softmax"]
    return products == {("i8", "i8"): layers, ("f32", "f32"): layers} and softmax == ["float"] * layers


def linears(model):
    return {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def check_export(name, method, model, exported):
    """Its numbers, and which of its operations run in integers."""
    agree(name, model, exported)
    found = exported.operations()
    assert {o.arithmetic for o in exported.operations("fp32")} == {"float"}
    assert {o.arithmetic for o in found if o.kind == "MVN"} <= {"float"}
    if name == "stanhop":
        return
    layers, products = model.config.num_hidden_layers, [o for o in found if o.kind == "FullyConnected"]
    assert all(o.arithmetic == "int8" for o in products)
    assert len(products) >= len(linears(model))
    unnamed = linears(model) - {o.module for o in products}
    assert all(path.endswith("q_proj") for path in unnamed)  # may have the name of the scaling after it
    if "clipped" in method:
        assert sum(o.kind == "MatMul" and o.inputs in (("i8", "i8"), ("u8", "i8")) for o in found) == 2 * layers
    else:
        assert attention_in_integers(found, layers)


@installed
@pytest.mark.parametrize(("name", "method"), QUICK)
def test_export_equals_the_model_and_int8_is_near(name, method, tmp_path):
    check_export(name, method, *exported_from(name, method, tmp_path))


@installed
@pytest.mark.parametrize("name", ["opt", pytest.param("stanhop", marks=pytest.mark.slow)])
def test_every_option_of_a_method_and_folded_norms_are_exported(name, tmp_path):
    model = built(name, "gated-outeffhop(sink=learned, gate=element, predictor=features, qk_norm=rms)")
    folded, what = fold_layernorm(model, unpadded(batch_of(name, 2, 9)))
    assert what.folded
    exported = export_int8(folded, [unpadded(batch_of(name, 2, 9, seed)) for seed in (1, 2)], tmp_path / "export")
    agree(name, model, exported)


@installed
@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), REST)
def test_every_model_with_every_method(name, method, tmp_path):
    check_export(name, method, *exported_from(name, method, tmp_path))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    model = built("bert", "outeffhop")
    batches = [batch_of("bert", seed=seed) for seed in range(3)]
    exported = export_int8(model, iter(batches[:2]), tmp_path_factory.mktemp("int8") / "new" / "bert")
    with exported:
        yield model, exported, batches


@installed
def test_bert_agrees_and_padding_takes_no_part(bert):
    model, exported, (batch, *_) = bert
    agree("bert", model, exported)
    other = {**batch, "input_ids": torch.where(batch["attention_mask"] == 0, 5, batch["input_ids"])}
    seen = batch["attention_mask"].bool()
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    for precision in ("fp32", "int8"):
        assert torch.equal(exported.run(batch, precision)[seen], exported.run(other, precision)[seen])
        everything = exported.run(unpadded(batch), precision)
        assert not torch.allclose(everything[seen], exported.run(batch, precision)[seen], atol=1e-2)


@installed
@pytest.mark.parametrize("name", ["bert", "opt", "vit", "stanhop"])
def test_an_export_in_the_models_place_gives_its_loss(name):
    model, batch = built(name, "outeffhop"), batch_of(name)
    task = {"bert": "mlm", "opt": "clm", "vit": "classification", "stanhop": "forecasting"}[name]
    with torch.no_grad():
        truth = model(**batch)
    torch.testing.assert_close(int8._loss(task, output_of(model, batch), batch), truth.loss)


@installed
def test_the_report(bert, tmp_path):
    model, exported, batches = bert
    report = measure_int8(model.train(), exported, batches, rounds=2)
    assert model.training
    model.eval()
    full, converted, quantized = (report.metric[run] for run in ("torch fp32", "openvino fp32", "openvino int8"))
    assert converted == pytest.approx(full, rel=1e-4)
    assert quantized != full
    assert report.sqnr_db["openvino fp32"] > 80 > report.sqnr_db["openvino int8"] > 10
    assert report.size_bytes["int8"] == sum((exported.path / f"int8.{x}").stat().st_size for x in ("xml", "bin"))
    assert (exported.path / "int8.bin").stat().st_size < 0.4 * (exported.path / "fp32.bin").stat().st_size
    assert set(report.latency_ms) == set(report.metric)
    assert report.latency_batch == {"input_ids": (3, 11), "attention_mask": (3, 11)}
    assert report.calibration_batches == 2
    assert report.counts("int8")["FullyConnected"] == 14
    assert report.counts("float")["MVN"] == 6
    assert attention_in_integers(exported.operations(), 2)
    for arithmetic in ("int8", "mixed", "float"):
        assert report.counts(arithmetic) == Counter(o.kind for o in exported.operations() if o.arithmetic == arithmetic)
    assert "SmoothQuant off: 8-bit activations 18 per tensor" in report.placement
    assert "weights 16 per channel" in report.placement
    report.save(tmp_path / "new" / "report.json")
    assert Int8Report.load(tmp_path / "new" / "report.json") == report
    assert report.placement in str(report)
    assert f"{report.size_bytes['int8'] / 1024 / 1024:.1f} MiB" in str(report).splitlines()[4]
    with pytest.raises(ValueError, match="not a valid Int8Report"):
        Int8Report.from_json("{}")


@installed
def test_the_callers_metric_sees_three_models(bert):
    model, exported, batches = bert

    def share_of_fives(module, batches):
        return {"fives": sum(float((module(**b).logits.argmax(-1) == 5).float().mean()) for b in batches)}

    report = measure_int8(model, exported, batches, share_of_fives, rounds=1)
    assert report.metric["torch fp32"] == pytest.approx(report.metric["openvino fp32"])


@installed
def test_a_folder_loads_again_and_is_not_overwritten(bert):
    model, exported, batches = bert
    before = {path: path.read_bytes() for path in exported.path.iterdir()}
    again = Int8Model(exported.path, threads=1)
    assert torch.equal(again.run(batches[0]), exported.run(batches[0]))
    assert again.about["method"] == "outeffhop"
    with pytest.raises(ValueError, match="is not overwritten"):
        export_int8(model, batches, exported.path)
    assert before == {path: path.read_bytes() for path in exported.path.iterdir()}


@installed
def test_an_export_that_fails_leaves_nothing_and_one_line(tmp_path, monkeypatch):
    def save_half(model, batch, path):
        path.write_bytes(b"half a program")
        return "logits"

    monkeypatch.setattr(int8, "save_program", save_half)
    with pytest.raises(RuntimeError, match="BadZipFile") as raised:
        export_int8(built("opt", "vanilla"), [batch_of("opt")], tmp_path / "export")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@installed
def test_ctrl_c_ends_an_export_and_its_process(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    asked = []

    def ask(worker, *arguments, **options):
        asked.append(worker)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return Worker_ask(worker, *arguments, **options)

    Worker_ask, before = Worker.ask, signal.signal(signal.SIGUSR1, interrupt)
    monkeypatch.setattr(Worker, "ask", ask)
    try:
        with pytest.raises(KeyboardInterrupt):
            export_int8(built("opt", "vanilla"), [batch_of("opt")], tmp_path / "export")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not list(tmp_path.iterdir())
    assert [worker.is_open for worker in asked] == [False]
    assert asked[0].process.returncode is not None


def test_a_killed_parent_ends_its_worker():
    code = """
import time
from outeffhop.quantization.int8_process import Worker
worker = Worker()
print("started", flush=True)
time.sleep(600)
"""
    # the worker has the same stderr, which therefore ends only with the last of the two
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    assert parent.communicate(timeout=60) == (b"", b"")


WITHOUT_TORCH = """
import sys
import numpy as np
from pathlib import Path
from outeffhop.quantization.int8_worker import run
ids = np.ones((2, 5), np.int64)
out = run(Path(sys.argv[1]), "int8", 1, {"input_ids": ids, "attention_mask": ids})
print(out.shape, [name for name in ("torch", "transformers", "nncf") if name in sys.modules])
"""


@installed
def test_running_an_export_takes_openvino_alone(bert):
    call = [sys.executable, "-c", WITHOUT_TORCH, str(bert[1].path)]
    ended = subprocess.run(call, capture_output=True, text=True, check=False)
    assert ended.stdout == "(2, 5, 99) []\n", ended.stderr


@installed
def test_a_closed_or_dead_process_is_started_again(bert):
    _, exported, (batch, *_) = bert
    with Int8Model(exported.path) as other:
        first = other.run(batch)
        process = other._worker.process
        process.kill()
        with pytest.raises(RuntimeError, match="ended with signal 9"):
            other.run(batch)
        assert torch.equal(other.run(batch), first)
        process = other._worker.process
        assert process.poll() is None
    assert process.returncode == 0


@installed
@pytest.mark.slow
def test_smooth_quant_helps_planted_outliers_when_asked(tmp_path):
    model, batch = built("opt", "outeffhop"), batch_of("opt")
    with torch.no_grad():
        for layer in model.model.decoder.layers:  # the same function with one channel 300 times as large between
            for norm, readers in (
                (layer.self_attn_layer_norm, [getattr(layer.self_attn, f"{x}_proj") for x in "qkv"]),
                (layer.final_layer_norm, [layer.fc1]),
            ):
                norm.weight[7] *= 300
                for linear in readers:
                    linear.weight[:, 7] /= 300
    truth, found = output_of(model, batch), {}
    for asked in (False, True):
        with export_int8(model, [batch], tmp_path / str(asked), smooth_quant=asked) as exported:
            found[asked] = sqnr(truth, exported.run(batch))
            assert f"SmoothQuant {'on' if asked else 'off'}" in exported.about["placement"]
    assert found[True] > found[False] + 6


@installed
def test_silent_and_this_process_is_left_as_it_was(tmp_path, capfd):
    model = built("opt", "vanilla").train()
    model.model.decoder.layers[0].eval()
    modes = [m.training for m in model.modules()]
    assert model.config.use_cache
    handlers, disabled = list(logging.root.handlers), logging.root.manager.disable
    with export_int8(model, [batch_of("opt", size=1)], tmp_path / "export") as exported:
        # a metric may return tensors; the report holds numbers
        report = measure_int8(
            model, exported, [batch_of("opt")], lambda m, b: {"mean": m(**b[0]).logits.detach().mean()}, rounds=1
        )
    assert Int8Report.from_json(report.to_json()) == report
    assert capfd.readouterr() == ("", "")
    assert (logging.root.handlers, logging.root.manager.disable) == (handlers, disabled)
    assert [m.training for m in model.modules()] == modes
    assert model.config.use_cache
    assert not {"openvino", "nncf", "openvino_telemetry"} & sys.modules.keys()


@installed
@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (None, {"calibration_batches": []}, "calibration_batches is empty"),
        (None, {"calibration_batches": [batch_of("vit")]}, "takes 'input_ids'"),
        (lambda model: model.bfloat16(), {}, r"bfloat16 on cpu; export model.float\(\).cpu\(\)"),
        (lambda model: model.cls.predictions.bias.data.fill_(torch.nan), {}, "cls.predictions.bias holds NaN"),
    ],
)
def test_bad_input_is_named(change, arguments, message, tmp_path):
    model = built("bert", "outeffhop")
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        export_int8(model, **{"calibration_batches": [batch_of("bert")], "path": tmp_path / "export", **arguments})
    assert not list(tmp_path.iterdir())


@installed
def test_a_batch_without_a_mask_is_a_batch_without_padding(bert):
    _, exported, (batch, *_) = bert
    ids = batch["input_ids"]
    whole = exported.run({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert exported.run({"input_ids": ids}).equal(whole)
    assert not exported.run({**batch, "attention_mask": torch.ones_like(ids).tril()[: len(ids)]}).equal(whole)


@installed
def test_bad_runs_are_named(bert, tmp_path):
    _, exported, (batch, *_) = bert
    with pytest.raises(ValueError, match="this export takes"):
        exported.run({"pixel_values": torch.zeros(1, 3, 8, 8)})
    with pytest.raises(ValueError, match="precision='int4' is unknown"):
        exported.run(batch, "int4")
    with pytest.raises(ValueError, match="is not an export"):
        Int8Model(tmp_path)
    with pytest.raises(ValueError, match="batches is empty"):
        measure_int8(bert[0], exported, [])
    with pytest.raises(TypeError, match="must be a transformers PreTrainedModel"):
        export_int8(nn.Linear(3, 3), [batch], tmp_path / "export")


@pytest.mark.parametrize("missing", ["openvino", "nncf"])
def test_the_extra_is_named_where_it_is_missing(missing, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"pip install 'outeffhop\[int8\]'"):
        export_int8(built("bert", "outeffhop"), [batch_of("bert")], tmp_path / "export")


def test_the_command_exports_no_other_bits(tmp_path, capsys):
    call = ["quantize", str(tmp_path), "--int8", "--bits", "W4A8", "--out", str(tmp_path / "out")]
    assert main(call) == 2
    assert "bits='W4A8' with int8" in capsys.readouterr().err


@installed
@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    presets.build("vit", "tiny", "outeffhop").save_pretrained(tmp_path / "model")
    call = ["quantize", str(tmp_path / "model"), "--data", "builtin:images", "--seeds", "1", "--batches", "2", "--int8"]
    assert main(call) == 2
    assert "--out" in capsys.readouterr().err
    assert main([*call, "--out", str(tmp_path / "out")]) == 0
    assert "FullyConnected" in capsys.readouterr().out
    assert Int8Report.load(tmp_path / "out" / "int8.json").metric["openvino int8"]["accuracy"] <= 1
    assert main([*call, "--out", str(tmp_path / "out")]) == 2
    assert "is not overwritten" in capsys.readouterr().err


@installed
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": 0}, "threads=0"),
        ({"calibration_batches": [batch_of("bert"), batch_of("vit")]}, r"calibration_batches\[1\] has"),
        ({"calibration_batches": [batch_of("bert", 1, 1)]}, "sequences of one token"),
    ],
)
def test_what_would_fail_in_the_end_is_said_first(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_int8(
            built("bert", "outeffhop"),
            **{"calibration_batches": [batch_of("bert")], "path": tmp_path / "export", **arguments},
        )
    assert not list(tmp_path.iterdir())


@installed
def test_a_path_below_a_file_is_refused_first(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"path=.*'.*file' is a file"):
        export_int8(built("bert", "outeffhop"), [batch_of("bert")], tmp_path / "file" / "export")


@installed
def test_a_mask_of_another_length_is_refused(bert):
    _, exported, (batch, *_) = bert
    with pytest.raises(ValueError, match=r"\(3, 11\) and attention_mask \(3, 5\)"):
        exported.run({**batch, "attention_mask": batch["attention_mask"][:, :5]})


@installed
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_damaged_folder_is_named(bert, tmp_path, damage):
    _, exported, (batch, *_) = bert
    for path in exported.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damage(tmp_path / "int8.bin")
    with pytest.raises(ValueError, match=r"int8\.bin in '.*' cannot be loaded"):
        Int8Model(tmp_path).run(batch)
