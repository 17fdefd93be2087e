"""The cell about mending: calibrated sinks, their schedule and the penalty on outliers, each by its formula."""

from __future__ import annotations

import copy

import torch
from matrix_truth import NotServed, by_hand, converted, doubled, held, output, run
from torch import nn
from transformers.utils import ModelOutput

from outeffhop.models import SinkSchedule, convert
from outeffhop.models.modules import attention_modules, has_attention, state_of
from outeffhop.outliers import OutlierPenalty
from outeffhop.outliers.tensors import pick

STEPS = 5
SHARE = 0.01  # of the weight that the no-op of a calibrated sink takes
WEIGHT = 1.0  # of the penalty in the loss
NEAR = 1e-3  # the library calibrates in float32


def mending(model, batch, name):
    """Five steps with the penalty on outliers and, where they are served, with calibrated sinks that a schedule moves,
    against the same by the formulas, all in float64."""
    # in float32 five steps make more of a rounding error than some mistakes would
    model, batch = _without_dropout(copy.deepcopy(model)).train().double(), doubled(batch)
    try:
        found = converted(model, "outeffhop", calibrate=[batch])
    except NotServed:  # mending then has the penalty alone
        found, schedule, sinks = copy.deepcopy(model), None, None
        truth = by_hand(model, "vanilla") if has_attention(model) and _is_served(model) else copy.deepcopy(model)
    else:
        schedule, truth, sinks = SinkSchedule(steps=STEPS), by_hand(model, "outeffhop"), _sinks(model, batch)
        for each, start in sinks.items():
            held(state_of(found.get_submodule(each)).sink, start, f"the sinks of {each}")
    penalty = OutlierPenalty(found, WEIGHT)
    train(found, batch, lambda step: schedule and schedule.apply(found, step), penalty.term)
    penalty.remove()
    tails = _Tails(truth)
    _move(truth, sinks, 0.0)
    train(truth, batch, lambda step: _move(truth, sinks, step / STEPS), lambda: WEIGHT * tails.mean())
    tails.remove()
    if schedule is not None:
        schedule.apply(found, STEPS)
        convert(found, "outeffhop")
        _move(truth, sinks, 1.0)
    what = "penalty alone" if schedule is None else "sinks and penalty"
    far = held(run(found.eval(), batch), run(truth.eval(), batch), "mended", NEAR)
    return f"{what}: {far:.0e}, updates {held(updates(found, model), updates(truth, model), 'updates', NEAR):.0e}"


def train(model, batch, before_step=lambda step: None, penalty=lambda: 0.0):
    """A few steps of SGD towards outputs of other samples."""
    target = run(model, batch).roll(1, 0)
    size = target.square().mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        before_step(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(output(model, batch), target) / size
        (loss + penalty()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def updates(model, before):
    """What training added to every weight of the model before."""
    weights = dict(model.named_parameters())
    return torch.cat([(weights[name] - p).detach().flatten() for name, p in before.named_parameters()])


# The truth


def _is_served(model):
    try:
        converted(model, "vanilla")
    except NotServed:
        return False
    return True


def _sinks(model, batch):
    """The sink s of each head at which the mean over queries of sigmoid(s - lse) is the share, by halving."""
    plain = by_hand(model, "vanilla")
    modules = attention_modules(plain)
    for module in modules.values():
        module.matrix_seen = []
    run(plain.eval(), batch)
    found = {}
    for name, module in modules.items():
        lse = torch.cat([each.movedim(1, 0).flatten(1) for each in module.matrix_seen], 1)  # [H, B·T]
        low, high = lse.amin(1) - 20, lse.amax(1) + 20
        for _ in range(100):
            middle = (low + high) / 2
            less = (middle[:, None] - lse).sigmoid().mean(1) < SHARE
            low, high = torch.where(less, middle, low), torch.where(less, high, middle)
        found[name] = low
    return found


def _move(model, sinks, progress):
    """A sink goes from where it starts to log 1 in a straight line."""
    for name, start in (sinks or {}).items():
        model.get_submodule(name).matrix_sinks = start * (1 - progress)


class _Tails:
    """log(mean x^4 / (mean |x|)^4) of each sample and tensor that the penalty is on, averaged."""

    def __init__(self, model):
        self.found, self.handles = {}, []
        for each in pick(model, "paper"):
            self.handles.append(model.get_submodule(each.module).register_forward_hook(self._see(each)))

    def _see(self, each):
        def see(_, args, out):
            x = args[0] if each.side == "input" else out
            x = next(iter(x.values())) if isinstance(x, ModelOutput) else x
            x = x[0] if isinstance(x, tuple) else x
            size = x.double().clone().flatten(1).abs()  # of its own: Falcon changes some in place
            self.found[each.name] = (size.pow(4).mean(1) / size.mean(1).pow(4)).log().mean()

        return see

    def mean(self):
        return torch.stack(list(self.found.values())).mean()

    def remove(self):
        for handle in self.handles:
            handle.remove()


def _without_dropout(model):
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    return model
