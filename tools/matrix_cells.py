"""The cells of the compatibility matrix: each compares what a model computes with an independent truth.

The truth of a method is attention written out in float64 below, without any code of the library. A cell returns what
held, in a few words; ``NotServed`` carries the reason why a model is not served; any other exception is a fault.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from pathlib import Path

import onnxruntime
import torch
from architectures import CAUSAL, MORE_CAUSAL, SEQ2SEQ, SIDE, VOCAB, build
from torch import nn
from trained_look import FIRST, look_trained
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from outeffhop.methods import METHODS
from outeffhop.models import SinkSchedule, convert
from outeffhop.models.hf_private import implementation, set_implementation
from outeffhop.models.modules import attention_modules, has_attention
from outeffhop.outliers import measure
from outeffhop.quantization import SCHEMES, Calibration, freeze, save_compressed, simulate

SIX = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")
DECODERS = CAUSAL | MORE_CAUSAL
NEAR = 1e-3  # ‖found − truth‖ / ‖truth‖ between float32 and a truth whose attention is float64
TRUTH = "matrix-truth"


class NotServed(Exception):
    """The model is not served, or the question does not arise; the text says why."""


# Models and their inputs


def subject(name):
    """A tiny model that looks trained, and a batch for it."""
    model = build(name)
    if has_attention(model):
        look_trained(model)
    return model, batch_of(model, name)


def batch_of(model, name, rows=3):
    generator = torch.Generator().manual_seed(2)
    names = {"pixel_values", "input_features", "input_ids"}
    if hasattr(model.config, "vision_config") and name in ("CLIPModel", "SiglipModel"):
        wanted = {"pixel_values", "input_ids"}
    else:
        wanted = {model.main_input_name} & names
    found = {}
    if "input_ids" in wanted:
        found["input_ids"] = torch.randint(4, VOCAB - 2, (rows, 16), generator=generator)
        found["input_ids"][:, 0] = FIRST
    if "pixel_values" in wanted:
        found["pixel_values"] = torch.randn(rows, 3, SIDE, SIDE, generator=generator)
    if "input_features" in wanted:
        frames = 2 * model.config.max_source_positions
        found["input_features"] = torch.randn(rows, model.config.num_mel_bins, frames, generator=generator)
    if name in SEQ2SEQ or "input_features" in wanted:
        found["decoder_input_ids"] = torch.randint(4, VOCAB - 2, (rows, 7), generator=generator)
    return found


def output(model, batch):
    """The logits, or what the model returns first."""
    out = model(**batch) if "use_cache" in batch else model(**batch, **no_cache(model))
    for key in ("logits", "logits_per_image", "last_hidden_state"):
        if out.get(key) is not None:
            return out[key]
    return out[0]


def no_cache(model):
    return {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") and model.can_generate() else {}


@torch.no_grad()
def run(model, batch):
    return output(model, batch)


def distance(found, truth):
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def held(found, truth, what, near=NEAR):
    far = distance(found, truth)
    if not far <= near:
        raise AssertionError(f"{what}: {far:.1e} from the truth")
    return far


# The truth


def _weights(method, scores, sinks):
    """By the formulas: a sink is one more column, and clipping stretches and cuts."""
    normalizer = method.normalizer
    n = normalizer.n
    column = sinks if sinks is not None else None if n == 0 else torch.full((1,), float(n)).log()
    if column is None:
        weights = scores.softmax(-1)
    else:
        column = column.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    if hasattr(normalizer, "gamma"):
        gamma = normalizer.gamma if normalizer.gamma is not None else -normalizer.alpha / scores.shape[-1]
        weights = ((normalizer.zeta - gamma) * weights + gamma).clamp(0, 1)
    return weights


def truth(module, query, key, value, attention_mask, scaling=None, position_bias=None, s_aux=None, **_):
    method = METHODS[module.matrix_method].method
    groups = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    for added in (position_bias, attention_mask):
        if added is not None:
            scores = scores + added[..., : k.shape[2]].double()
    out = (_weights(method, scores, s_aux) @ v).transpose(1, 2)
    opening = 1.0 if method.gate is None else method.gate.init  # of every gate before training
    return (out * opening).to(query.dtype).contiguous(), None


AttentionInterface.register(TRUTH, truth)
AttentionMaskInterface.register(TRUTH, eager_mask)


def by_hand(model, method):
    """A copy whose attention is the truth."""
    model = copy.deepcopy(model)
    modules = attention_modules(model).values()
    for part in (*(m for m in model.modules() if isinstance(m, PreTrainedModel)), *modules):
        set_implementation(part.config, TRUTH)
    for module in modules:
        module.matrix_method = method
    return model


def converted(model, method, **how):
    """A converted copy. One that is refused must not have been changed."""
    model = copy.deepcopy(model)
    before, named = {k: v.clone() for k, v in model.state_dict().items()}, implementation(model.config)
    try:
        return convert(model, method, **how)
    except ValueError as error:
        after = model.state_dict()
        same = before.keys() == after.keys() and all(torch.equal(v, after[k]) for k, v in before.items())
        if not same or implementation(model.config) != named:
            raise AssertionError(f"{method} was refused after the model was changed") from error
        raise NotServed(str(error)) from error


# The cells


def outliers(model, batch, name):
    """Largest |x| and kurtosis of every tensor, against hooks and the formulas in float64."""
    report = measure(model, [batch])
    seen, handles = {}, []
    for tensor in report.tensors:
        module = model.get_submodule(tensor.name.removesuffix(":input"))

        def look(_, args, out, tensor=tensor):
            x = args[0] if tensor.name.endswith(":input") else out
            x = (
                next(iter(x.values()))
                if hasattr(x, "values") and callable(x.values) and not isinstance(x, torch.Tensor)
                else x
            )
            seen.setdefault(tensor.name, (x[0] if isinstance(x, tuple) else x).double())

        handles.append(module.register_forward_hook(look))
    run(model, batch)
    for handle in handles:
        handle.remove()
    rows = len(next(iter(batch.values())))
    checked = 0
    for tensor in report.tensors:
        x = seen[tensor.name]
        if len(x) != rows:  # a router's tokens, or windows: not one entry for each sample
            continue
        flat = x.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        kurtosis = (centred**4).mean(1) / (centred**2).mean(1) ** 2
        held(torch.tensor(tensor.inf_norm), flat.abs().amax(1).mean(), f"{tensor.name} inf norm", 1e-4)
        if tensor.kurtosis is not None:
            held(torch.tensor(tensor.kurtosis), kurtosis.mean(), f"{tensor.name} kurtosis", 1e-3)
        checked += 1
    if not checked:
        raise AssertionError("no tensor could be compared")
    return f"{checked} tensors"


@torch.no_grad()
def quantized(model, batch, scheme):
    rounded = simulate(model, scheme)
    with Calibration(rounded):
        output(rounded, batch)
    return freeze(rounded)


def schemes(model, batch, name):
    """Weights of every scheme, against rounding by the formula; 16 bits per token, against floating point."""
    count = 0
    for scheme in SCHEMES:
        rounded = quantized(model, batch, scheme)
        far = distance(run(rounded, batch), run(model, batch))
        if not 0 < far < float("inf"):
            raise AssertionError(f"{scheme} changes nothing, or gives no number ({far})")
        if scheme not in ("linear", "per-token"):
            continue
        for path, layer in rounded.named_modules():
            if isinstance(layer, nn.Linear) and not torch.equal(layer.weight, model.get_submodule(path).weight):
                w = model.get_submodule(path).weight.double()
                top = w.abs().amax(1, keepdim=True) if scheme == "per-token" else w.abs().amax()
                step = (top / 127).clamp(min=1e-30)
                held(layer.weight, (w / step).round().clamp(-127, 127) * step, f"{scheme} {path}", 0.02)
                count += 1
    if not count:
        raise NotServed("no nn.Linear is quantized outside of the head")
    far = held(run(quantized(model, batch, "W16A16 per-token"), batch), run(model, batch), "16 bits", 0.02)
    return f"{len(SCHEMES)} schemes, {count} weights; 16 bits: {far:.0e}"


def one_method(method):
    def cell(model, batch, name):
        found = run(converted(model, method), batch)
        far = held(found, run(by_hand(model, method), batch), method)
        return f"{far:.0e}"

    return cell


def same_function(model, batch, name):
    """Converted with same_function=True, against the model before."""
    return (
        f"{held(run(converted(model, 'outeffhop', same_function=True), batch), run(model, batch), 'same_function'):.0e}"
    )


def back(model, batch, name):
    """Every weight, bit for bit, after a conversion there and back."""
    other = converted(converted(model, "outeffhop"), "vanilla").state_dict()
    for key, value in model.state_dict().items():
        if not torch.equal(other[key], value):
            raise AssertionError(f"{key} changed")
    if other.keys() != model.state_dict().keys():
        raise AssertionError("weights were left behind")
    return f"{len(other)} tensors"


def invariances(model, batch, name):
    """Rows one by one and in another order, against the whole batch."""
    model = converted(model, "outeffhop")
    whole = run(model, batch)
    if len(whole) != len(next(iter(batch.values()))) or name in ("CLIPModel", "SiglipModel"):
        raise NotServed("its output compares all samples of a batch")
    order = torch.tensor([2, 0, 1])
    held(run(model, {k: v[order] for k, v in batch.items()}), whole[order], "another order", 1e-4)
    rows = torch.cat([run(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(len(whole))])
    return f"{held(rows, whole, 'one by one', 1e-4):.0e}"


def padding(model, batch, name):
    """Real tokens with padding beside them, left and right, against the texts alone."""
    if set(batch) != {"input_ids"}:
        raise NotServed("it reads no text, or two at once")
    model, ids = converted(model, "outeffhop"), batch["input_ids"]
    whole, mask = run(model, batch), torch.ones_like(ids)
    for side in ("right", "left") if name in DECODERS else ("right",):
        pads = (0, 5) if side == "right" else (5, 0)
        padded = nn.functional.pad(ids, pads, value=model.config.get_text_config().pad_token_id or 0)
        given = {"input_ids": padded, "attention_mask": nn.functional.pad(mask, pads)}
        if side == "left":
            given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        out = run(model, given)
        held(out[:, :16] if side == "right" else out[:, 5:], whole, f"padding {side}", 1e-3)
    return "right, left" if name in DECODERS else "right"


def generation(cache):
    def cell(model, batch, name):
        if name not in DECODERS | SEQ2SEQ:
            raise NotServed("it does not generate")
        model = converted(model, "outeffhop")
        given = {k: v for k, v in batch.items() if not k.startswith("decoder")}
        found = model.generate(
            **given, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1, cache_implementation=cache
        )
        alone = model.generate(
            **given, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1, use_cache=False
        )
        if not torch.equal(found, alone):
            raise AssertionError("the tokens differ from those without a cache")
        return "5 tokens"

    return cell


def _gradients(model, batch):
    model.zero_grad()
    out = output(model, batch)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4))
    (out * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradients(model, batch, name):
    """Of all weights, against autograd through the truth."""
    method = converted(model, "outeffhop")
    return f"{held(_gradients(method, batch), _gradients(by_hand(model, 'outeffhop'), batch), 'gradients', 5e-3):.0e}"


def compiled(model, batch, name):
    """torch.compile (inductor), against the truth."""
    torch._dynamo.reset()
    found = run(torch.compile(converted(model, "outeffhop")), batch)
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'compiled'):.0e}"


class _Plain(nn.Module):
    """Tensors in, one tensor out."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given):
        return output(self.model, dict(zip(self.names, given, strict=True)))


def exported(model, batch, name):
    """torch.export, against the truth."""
    plain = _Plain(converted(model, "outeffhop"), list(batch)).eval()
    with torch.no_grad():
        found = torch.export.export(plain, tuple(batch.values()), strict=False).module()(*batch.values())
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'exported'):.0e}"


def onnx(model, batch, name):
    """ONNX run by onnxruntime, against the truth."""
    plain = _Plain(converted(model, "outeffhop"), list(batch)).eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = str(Path(folder) / "model.onnx")
        torch.onnx.export(plain, tuple(batch.values()), file, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options)
        given = {i.name: v.numpy() for i, v in zip(session.get_inputs(), batch.values(), strict=True)}
        found = torch.from_numpy(session.run(None, given)[0])
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'ONNX'):.0e}"


def _train(model, batch, steps=5, schedule=None):
    target = run(model, batch).roll(1, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        if schedule is not None:
            schedule.apply(model, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(output(model, batch), target).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def training(model, batch, name):
    """The output after five steps of SGD, against five steps of the truth."""
    found, wanted = _train(converted(model, "outeffhop"), batch), _train(by_hand(model, "outeffhop"), batch)
    if torch.equal(run(wanted, batch), run(by_hand(model, "outeffhop"), batch)):
        raise AssertionError("training changed nothing")
    return f"{held(run(found, batch), run(wanted, batch), 'trained', 5e-3):.0e}"


def mending(model, batch, name):
    """Calibrated sinks, five steps while a schedule moves them; the result against the truth with its weights."""
    schedule = SinkSchedule(steps=5)
    found = _train(converted(model, "outeffhop", calibrate=[batch]), batch, schedule=schedule)
    schedule.apply(found, 5)
    convert(found, "outeffhop")
    plain = copy.deepcopy(model)
    plain.load_state_dict({k: v for k, v in found.state_dict().items() if k in plain.state_dict()})
    return f"{held(run(found, batch), run(by_hand(plain, 'outeffhop'), batch), 'mended'):.0e}"


class Process:
    """Another process that loads checkpoints and runs them."""

    _CODE = """
import sys, torch, transformers
torch.set_num_threads(1)
if sys.argv[1] == "ours":
    import outeffhop
for line in sys.stdin:
    folder = line.strip()
    kind, batch, key = torch.load(folder + "/batch.pt", weights_only=True)
    try:
        with torch.no_grad():
            out = getattr(transformers, kind).from_pretrained(folder).eval()(**batch)
        out = out[key] if key else out[0]
        assert sys.argv[1] == "ours" or "outeffhop" not in sys.modules
        torch.save(out, folder + "/out.pt")
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
"""

    def __init__(self, kind):
        pipe = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.worker = subprocess.Popen([sys.executable, "-c", self._CODE, kind], **pipe)

    def run(self, folder, model, batch):
        given = {**batch, **no_cache(model)}
        out = model(**given)
        key = next((k for k in ("logits", "logits_per_image", "last_hidden_state") if out.get(k) is not None), None)
        torch.save((type(model).__name__, given, key), f"{folder}/batch.pt")
        print(folder, file=self.worker.stdin, flush=True)
        answer = self.worker.stdout.readline().strip()
        if answer != "done":
            raise AssertionError(f"the other process says {answer!r}")
        return torch.load(f"{folder}/out.pt", weights_only=True)


_processes: dict[str, Process] = {}


def elsewhere(kind):
    return _processes.setdefault(kind, Process(kind)) if kind not in _processes else _processes[kind]


def another_process(model, batch, name):
    """Saved with its method and loaded in another process, against the truth."""
    method = converted(model, "outeffhop")
    with tempfile.TemporaryDirectory() as folder:
        method.save_pretrained(folder)
        found = elsewhere("ours").run(folder, method, batch)
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'loaded'):.0e}"


def int8_checkpoint(model, batch, name):
    """Saved in int8 and loaded by transformers alone in another process, against the simulation."""
    rounded = quantized(model, batch, "linear")
    with tempfile.TemporaryDirectory() as folder:
        try:
            save_compressed(rounded, f"{folder}/saved")
        except ValueError as error:
            raise NotServed(str(error)) from error
        found = elsewhere("theirs").run(f"{folder}/saved", model, batch)
    return f"{held(found, run(rounded, batch), 'int8', 0.02):.0e}"


CELLS = {
    "outliers": outliers,
    "quantize": schemes,
    **{method: one_method(method) for method in SIX},
    "same function": same_function,
    "there and back": back,
    "batches": invariances,
    "padding": padding,
    "another process": another_process,
    "dynamic cache": generation("dynamic"),
    "static cache": generation("static"),
    "gradients": gradients,
    "compile": compiled,
    "export": exported,
    "ONNX": onnx,
    "training": training,
    "mending": mending,
    "int8 checkpoint": int8_checkpoint,
}
