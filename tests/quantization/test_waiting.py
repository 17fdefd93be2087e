"""Simulated quantization reads as little from tensors in a deep model as in a flat one: a GPU waits at each read."""

import pytest
import torch
from subjects import build, inputs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import waits

from outeffhop.metrics import metric_for
from outeffhop.quantization import Calibration, Scheme, freeze, quantization_map, simulate
from outeffhop.quantization.evaluation import worst_rounded
from outeffhop.quantization.float8 import Float8
from outeffhop.quantization.observers import Observer
from outeffhop.quantization.points import Power
from outeffhop.quantization.quantizers import Uniform

SCHEMES = ("paper", "linear", "per-channel", "per-token", "smoothquant", "fp8", "W8A8KV8 paper")


def llama(layers):
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, vocab_size=40)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes)).eval()


def batch(padded):
    ids = torch.randint(3, 40, (3, 10), generator=torch.Generator().manual_seed(1))
    found = {"input_ids": ids, "labels": ids}
    if padded:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][1, 6:] = 0
    return found


def reads(layers, scheme, padded):
    """How much each stage reads."""
    model, found = llama(layers), {}
    quantized, given = simulate(model, scheme), batch(padded)
    with Calibration(quantized), torch.no_grad():
        with waits() as found["calibration"]:
            quantized(**given)
        quantized(**given)
    with waits() as found["freeze"]:
        freeze(quantized)
    with waits() as found["metric"]:
        metric_for("clm")(quantized, [given, given])
    with waits() as found["worst"]:
        worst_rounded(model, quantized, given, None)
    with waits() as found["map"]:
        quantization_map(quantized)
    grids_on_cpu = ("worst", "map")  # their numbers are read after one copy of all
    return {
        stage: sorted(n for n in names if stage not in grids_on_cpu or n != "_local_scalar_dense")
        for stage, names in found.items()
    }


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_more_layers_are_no_more_reads(scheme, padded):
    shallow, deep = reads(1, scheme, padded), reads(3, scheme, padded)
    assert deep == shallow
    assert shallow["metric"].count("_local_scalar_dense") <= 4 + 4 * padded
    assert len(shallow["calibration"]) <= 1 + 10 * padded  # where each form of mask is true
    assert len(shallow["freeze"]) <= 1


@pytest.mark.parametrize("how", ["minmax", "running", "percentile", "mse"])
def test_a_batch_that_is_not_finite_leaves_the_ranges_of_those_before(how):
    scheme = Scheme("paper", *(Scheme.parse("paper").weights, Scheme.parse("paper").activations), activation_range=how)
    good = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    bad = good.clone()
    bad[2, 1] = torch.inf
    found = []
    for given in ([good, good * 2], [good, bad, good * 2]):
        torch.manual_seed(0)
        quantized = simulate(nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)), scheme)
        with Calibration(quantized):
            for x in given:
                if x is bad:
                    with pytest.raises(ValueError, match="0/input holds NaN or inf"):
                        quantized(x)
                else:
                    quantized(x)
        found.append([row.range for row in quantization_map(freeze(quantized)).rows])
    assert found[0] == found[1]


def test_a_batch_that_is_interrupted_leaves_nothing_behind():
    quantized, given = simulate(build("opt"), "paper"), inputs("opt")
    stop = quantized.model.decoder.layers[1].register_forward_pre_hook(interrupt)
    with Calibration(quantized):
        with pytest.raises(KeyboardInterrupt):
            quantized(**given)
        stop.remove()
        quantized(**inputs("opt", seed=1))
    once = simulate(build("opt"), "paper")
    with Calibration(once):
        once(**inputs("opt", seed=1))
    assert quantization_map(freeze(quantized)).rows == quantization_map(freeze(once)).rows


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("spec", [Uniform(), Uniform(granularity="channel", axis=-1), Uniform(4, True), Float8()])
def test_nothing_is_read_on_another_device(spec):
    """A meta tensor has no numbers: whatever reads one raises an error."""
    x = torch.empty(4, 6, 8, device="meta")
    observer = Observer(spec)
    for _ in range(2):
        observer.take(observer.look(x))
    grid = spec.grid(observer.low, observer.high)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = grid.fake(x.to(dtype))
        assert (rounded.device.type, rounded.dtype) == ("meta", dtype)
    power = Power().add(x, rounded)
    assert power.count == x.numel()
    with pytest.raises(NotImplementedError, match="meta"):
        power.sqnr_db  # noqa: B018
