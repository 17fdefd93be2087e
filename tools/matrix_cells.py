"""The cells of the compatibility matrix: each compares what a model computes with an independent truth.

A cell returns what held, in a few words; ``NotServed`` carries the reason why a model is not served; any other
exception is a fault.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnxruntime
import torch
from matrix_diagnosis import diagnosis
from matrix_elsewhere import elsewhere
from matrix_mending import mending, train, updates
from matrix_metamorphic import moved_device, planted_outlier, same_data
from matrix_rounding import int8_checkpoint, schemes
from matrix_truth import NotServed, by_hand, converted, held, output, padded, run, samples, unpadded
from torch import nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from outeffhop.outliers import measure

SIX = ("vanilla", "outeffhop", "clipped", "clipped-outeffhop", "gated", "gated-outeffhop")


def outliers(model, batch, name):
    """Largest |x| and kurtosis of every tensor, against hooks and the formulas in float64."""
    report = measure(model, [batch])
    seen, handles = {}, []
    for tensor in report.tensors:
        module = model.get_submodule(tensor.name.removesuffix(":input"))

        def look(_, args, out, tensor=tensor):
            x = args[0] if tensor.name.endswith(":input") else out
            x = next(iter(x.values())) if isinstance(x, ModelOutput) else x
            seen.setdefault(tensor.name, []).append((x[0] if isinstance(x, tuple) else x).double())

        handles.append(module.register_forward_hook(look))
    run(model, batch)
    for handle in handles:
        handle.remove()
    rows = len(next(iter(batch.values())))
    checked = 0
    for tensor in report.tensors:
        if len(seen[tensor.name][0]) != rows:  # a router's tokens, or windows: not one entry for each sample
            continue
        flat = torch.cat(seen[tensor.name]).flatten(1)  # ALBERT's one layer runs several times
        centred = flat - flat.mean(1, keepdim=True)
        kurtosis = (centred**4).mean(1) / (centred**2).mean(1) ** 2
        held(torch.tensor(tensor.inf_norm), flat.abs().amax(1).mean(), f"{tensor.name} inf norm", 1e-4)
        if tensor.kurtosis is not None:
            held(torch.tensor(tensor.kurtosis), kurtosis.mean(), f"{tensor.name} kurtosis", 1e-3)
        checked += 1
    if not checked:
        raise AssertionError("no tensor could be compared")
    return f"{checked} tensors"


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
    """Every weight and the output, bit for bit, after a conversion to each method and back to softmax."""
    served, refused = 0, None
    truth = run(converted(model, "vanilla"), batch)
    for method in SIX[1:]:
        try:
            other = converted(converted(model, method), "vanilla")
        except NotServed as reason:
            refused = reason
            continue
        served += 1
        after, before = other.state_dict(), model.state_dict()
        if after.keys() != before.keys() or not all(torch.equal(after[key], value) for key, value in before.items()):
            raise AssertionError(f"the weights are others after {method}")
        if not torch.equal(run(other, batch), truth):
            raise AssertionError(f"the output is another after {method}")
    if refused is not None and not served:
        raise refused
    return f"{served} methods"


def invariances(model, batch, name):
    """Rows one by one and in another order, against the whole batch."""
    model = converted(model, "outeffhop")
    whole, order = samples(model, batch), torch.tensor([2, 0, 1])
    held(samples(model, {k: v[order] for k, v in batch.items()}), whole[order], "another order", 1e-4)
    rows = torch.cat([samples(model, {k: v[i : i + 1] for k, v in batch.items()}) for i in range(len(whole))])
    return f"{held(rows, whole, 'one by one', 1e-4):.0e}"


def padding(model, batch, name):
    """Real tokens with padding beside them, on the right and, in decoders, on the left, against the texts alone."""
    if name == "SiglipModel":
        raise NotServed("it reads a text's last place, padded or not")
    given = padded(model, batch, name)
    if not given:
        raise NotServed("it reads no text")
    model = converted(model, "outeffhop")
    whole = run(model, batch)
    for side, each in given.items():
        held(unpadded(run(model, each), whole, side), whole, f"padding {side}", 1e-3)
    return ", ".join(given)


def generation(cache):
    def cell(model, batch, name):
        if not model.can_generate():
            raise NotServed("it does not generate")
        encoder = {k: v for k, v in batch.items() if not k.startswith("decoder")}
        how = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1, cache_implementation=cache)
        found = GenerationMixin.generate(  # Whisper's own cuts long audio into pieces
            converted(model, "outeffhop"), **encoder, **how, output_logits=True, return_dict_in_generate=True
        )
        two = model.config.is_encoder_decoder
        whole = {**encoder, "decoder_input_ids" if two else "input_ids": found.sequences}
        wanted = run(by_hand(model, "outeffhop"), whole)[:, -6:-1]  # what comes after each token but the last
        return f"{held(torch.stack(found.logits, 1), wanted, 'logits'):.0e}"

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


def _exportable(model, batch):
    model = converted(model, "outeffhop")
    if any("Experts" in type(module).__name__ for module in model.modules()):
        # transformers' loop over the experts that were chosen cannot be exported, whatever the attention
        model.set_experts_implementation("batched_mm")
    return _Plain(model, list(batch)).eval()


def exported(model, batch, name):
    """torch.export, against the truth."""
    plain = _exportable(model, batch)
    with torch.no_grad():
        found = torch.export.export(plain, tuple(batch.values()), strict=False).module()(*batch.values())
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'exported'):.0e}"


def onnx(model, batch, name):
    """ONNX run by onnxruntime, against the truth."""
    plain = _exportable(model, batch)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = str(Path(folder) / "model.onnx")
        torch.onnx.export(plain, tuple(batch.values()), file, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(file, options)
        given = {i.name: v.numpy() for i, v in zip(session.get_inputs(), batch.values(), strict=True)}
        found = torch.from_numpy(session.run(None, given)[0])
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'ONNX'):.0e}"


def training(model, batch, name):
    """The output and the weights after five steps of SGD, against five steps of the truth."""
    found, wanted = train(converted(model, "outeffhop"), batch), train(by_hand(model, "outeffhop"), batch)
    far = held(run(found, batch), run(wanted, batch), "trained", 5e-3)
    return f"{far:.0e}, updates {held(updates(found, model), updates(wanted, model), 'updates', 5e-3):.0e}"


def another_process(model, batch, name):
    """Saved with its method and loaded in another process, against the truth."""
    method = converted(model, "outeffhop")
    with tempfile.TemporaryDirectory() as folder:
        method.save_pretrained(folder)
        found = elsewhere("ours").run(folder, method, batch)
    return f"{held(found, run(by_hand(model, 'outeffhop'), batch), 'loaded'):.0e}"


CELLS = {
    "outliers": outliers,
    "diagnose": diagnosis,
    "quantize": schemes,
    "int8 checkpoint": int8_checkpoint,
    "planted outlier": planted_outlier,
    "same data": same_data,
    "moved device": moved_device,
    **{method: one_method(method) for method in SIX},
    "same function": same_function,
    "there and back": back,
    "batches": invariances,
    "padding": padding,
    "gradients": gradients,
    "another process": another_process,
    "dynamic cache": generation("dynamic"),
    "static cache": generation("static"),
    "compile": compiled,
    "export": exported,
    "ONNX": onnx,
    "training": training,
    "mending": mending,
}
