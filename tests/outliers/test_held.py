"""Tensors of one shape measured together, and with PyTorch, as a GPU does it: the same report, with few reads."""

import dataclasses
import math

import pytest
import torch
from tiny import MODELS, config, inputs
from torch import nn
from waiting import waits

from outeffhop.ops.call import Call
from outeffhop.outliers import collector, heads, measure, moments
from outeffhop.outliers.tensors import pick


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    def hold(size):
        monkeypatch.setattr(collector, "_room", lambda device: size)
        monkeypatch.setattr(moments, "_library", lambda x: torch)
        monkeypatch.setattr(moments, "_needs_units", lambda furthest: True)
        monkeypatch.setattr(heads, "_QUERIES", heads._QUERIES_ON_GPU)

    return hold


def near(found, expected):
    """Whether reports agree up to rounding."""
    if dataclasses.is_dataclass(found):
        assert type(found) is type(expected)
        for field in dataclasses.fields(found):
            near(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(found, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            near(one, other)
    elif isinstance(found, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7, nan_ok=True)
    else:
        assert found == expected


def model_of(name, layers=2):
    torch.manual_seed(0)
    sized = config(name)
    sized.num_hidden_layers = layers
    model = MODELS[name][1].from_config(sized).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p[1] *= 30  # outliers
    return model


def batches_of(name, padded):
    found = [inputs(name), inputs(name, batch=3, length=7)]
    for batch in found if padded else ():
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, 4:] = 0
    return found


@pytest.mark.parametrize("size", [1, 3000, 2**30])
@pytest.mark.parametrize(("name", "padded"), [("opt", False), ("bert", True), ("llama", True), ("vit", False)])
@pytest.mark.parametrize("tensors", ["paper", "all"])
def test_the_report_is_that_of_each_tensor_alone(name, padded, tensors, size, as_on_a_gpu):
    model, batches = model_of(name), batches_of(name, padded)
    expected = measure(model, batches, tensors, special_ids=[1, 2, 3])
    as_on_a_gpu(size)
    found = measure(model, batches, tensors, special_ids=[1, 2, 3])
    near(found, expected)
    assert sum(t.outliers for t in found.tensors)


class Changing(nn.Module):
    """Changes what its modules returned, and one of its tensors is not finite."""

    def __init__(self, bad):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.bad = bad

    def forward(self, x):
        hidden = self.first(x)
        out = self.second(hidden)
        hidden.mul_(0).add_(1)
        if self.bad is not None:
            out = out * out.new_tensor([1.0] * 7 + [self.bad])
        return self.third(out) + self.first(hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_tensors_that_change_or_are_not_finite(bad, dtype, as_on_a_gpu):
    torch.manual_seed(0)
    model = Changing(bad).to(dtype)
    with torch.no_grad():
        model.first.bias[3] = 40.0
    batches = [{"x": torch.randn(4, 5, 8, dtype=dtype)} for _ in range(2)]
    expected = measure(model, batches, "all")
    as_on_a_gpu(2**30)
    near(measure(model, batches, "all"), expected)
    assert bad is None or any(t.non_finite for t in expected.tensors)


@pytest.mark.parametrize("padded", [False, True])
def test_a_batch_is_read_a_few_times_and_not_each_tensor(padded, as_on_a_gpu):
    as_on_a_gpu(2**30)
    model, batches = model_of("bert", 8), batches_of("bert", padded)
    collected = collector._Collector(model, pick(model), (), 4)
    with waits() as reads:
        collected.run(batches, False, None)
    found = [name for name in reads if name in ("cpu", "nonzero")]  # other reads are of what was copied to the CPU
    assert 1 <= len(found) <= 7 * len(batches) < len(pick(model))


def test_heads_are_read_at_the_end(as_on_a_gpu):
    as_on_a_gpu(2**30)
    model, batch = model_of("bert", 4), batches_of("bert", True)[0]
    counts = []
    for repeats in (1, 3):
        with waits() as reads:
            collected = collector._Collector(model, [], (1, 2, 3), 4)
            collected.run([batch] * repeats, True, None)
        counts.append(len(reads))
    assert counts[1] - counts[0] <= 2 * 8  # per batch


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_nothing_is_read_on_another_device(padded, fused):
    """A meta tensor has no numbers: whatever reads one raises an error."""
    mask = torch.empty(2, 6, device="meta", dtype=torch.bool)
    sums = moments._token_sums(torch.empty(2, 6, 8, device="meta"), moments.Scratch())
    found = moments._moments(sums.view(7, 2, 6), mask if padded else None, 8, torch)
    assert {each.device.type for each in found} == {"meta"}
    query = torch.empty(2, 4, 6, 8, device="meta")
    call = Call(query, query, query, None, 0.0, True, 1.0, 0.0, False, False)
    collected = heads.HeadSums()
    lse, weights = torch.empty(2, 4, 6, device="meta"), torch.empty(2, 4, 6, 6, device="meta")
    collected.add(call, lse if fused else None, None if fused else weights, heads.Tokens(2, mask if padded else None))
    assert collected.sums.device.type == "meta"
