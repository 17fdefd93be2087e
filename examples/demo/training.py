"""One model of the demo: built, trained, measured, quantized; the one with softmax is mended, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outeffhop import convert
from outeffhop.lab.data import Backcopy
from outeffhop.outliers import OutlierPenalty, measure
from outeffhop.quantization import evaluate

# what the page calls a model → its attention method
METHODS = {
    "softmax": "vanilla",
    "softmax1": "outeffhop",
    "softmax1, gated": "gated-outeffhop(gate=element, predictor=features)",
}
MENDED = "softmax, mended"
LENGTH = 64
POINTS = 12  # of the curve of outliers over training

Told = tuple[str, int, int, float]  # which training, how many of its steps are done, of how many, and the largest |x|
Tell = Callable[[Told], None]


@dataclass(frozen=True)
class Settings:
    """How every model is trained; the task and the length of a sequence are the same for all."""

    steps: int = 1000
    mending_steps: int = 400
    lr: float = 3e-3
    mending_lr: float = 2e-3
    batch: int = 32
    penalty: float = 0.1

    @property
    def total(self) -> int:
        """The training steps of one seed, mending included."""
        return len(METHODS) * self.steps + self.mending_steps


@dataclass(frozen=True)
class Found:
    """What was found of one trained model.

    Attributes:
        name, seed: of the model.
        steps, curve: the largest |x| after so many steps of training.
        largest, kurtosis: of the tensors that the paper looks at.
        loss, copies: on new sequences; copies is the share of symbols after a trigger that are right, in percent.
        loss8, copies8: the same with everything in 8 bits, averaged over calibrations.
        parked: attention on the start symbol, and on nothing, averaged over queries; of all heads, layer by layer.
        maps: [layers, heads, T, T], the attention of one sequence.
        ids: [T], the sequence.
    """

    name: str
    seed: int
    steps: tuple[int, ...]
    curve: tuple[float, ...]
    largest: float
    kurtosis: float
    loss: float
    copies: float
    loss8: float
    copies8: float
    parked: tuple[tuple[float, float], ...]
    maps: np.ndarray
    ids: np.ndarray


def build(task: Backcopy, method: str, seed: int) -> LlamaForCausalLM:
    """A small Llama of transformers with one of our methods. The seed gives all methods the same weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=task.vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=task.length,
        bos_token_id=0,
        eos_token_id=None,
    )
    return convert(LlamaForCausalLM(config), method)


def train(
    model: nn.Module,
    task: Backcopy,
    steps: int,
    lr: float,
    batch: int,
    seed: int,
    each: Callable[[int], None] = lambda step: None,
) -> None:
    """AdamW without weight decay, which would hold outliers down; ``each`` is called after every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=min(50, steps))
    random = np.random.default_rng(seed)
    for step in range(steps):
        model.train()
        loss = model(**task.batches(1, batch, random)[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        each(step + 1)


def copies_right(task: Backcopy) -> Callable[[nn.Module, Iterable[Mapping[str, Tensor]]], dict[str, float]]:
    """A metric for ``evaluate``: the loss, and how many of the symbols after a trigger are right, in percent."""

    @torch.no_grad()
    def metric(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        losses, right = [], []
        for batch in batches:
            out, ids = model(**batch), batch["input_ids"]
            losses.append(float(out.loss))
            right.append((out.logits[:, :-1].argmax(-1) == ids[:, 1:])[task.copies(ids)])
        return {"copies": 100 * float(torch.cat(right).double().mean()), "loss": float(np.mean(losses))}

    return metric


def run(name: str, seed: int, settings: Settings, tell: Tell) -> list[Found]:
    """Trains a model by its name on the page, and measures it; with softmax it is mended and measured again."""
    torch.set_num_threads(1)  # one model on each core
    task = Backcopy(length=LENGTH)
    model = build(task, METHODS[name], seed)

    def learn(title: str, steps: int, lr: float, data: int) -> Found:
        curve = _Curve(model, task, steps)

        def each(step: int) -> None:
            curve(step)
            tell((f"{title}, seed {seed}", step, steps, curve.largest[-1]))

        train(model, task, steps, lr, settings.batch, data, each)
        return _measured(title, model, task, seed, curve)

    found = [learn(name, settings.steps, settings.lr, seed)]
    if name == "softmax":
        penalty = OutlierPenalty(model, settings.penalty)  # from now on the loss contains the tail of the activations
        found.append(learn(MENDED, settings.mending_steps, settings.mending_lr, 1000 + seed))
        penalty.remove()
    return found


class _Curve:
    """The largest |x| of a model in training, at ``POINTS`` steps."""

    def __init__(self, model: nn.Module, task: Backcopy, steps: int) -> None:
        self.model, self.batches = model, task.batches(1, 32, seed=20_000)
        self.every = max(1, steps // POINTS)
        self.steps, self.largest = [0], [self._largest()]

    def __call__(self, step: int) -> None:
        if step % self.every == 0:
            self.steps.append(step)
            self.largest.append(self._largest())

    def _largest(self) -> float:
        return measure(self.model, self.batches, attention=False).max_abs


def _measured(name: str, model: nn.Module, task: Backcopy, seed: int, curve: _Curve) -> Found:
    new = task.batches(4, 64, seed=30_000)
    outliers = measure(model, new)
    cost = evaluate(
        model, task.batches(8, 32, seed=40_000), new, copies_right(task), "W8A8", seeds=2, calibration_batches=4
    )
    ids = new[0]["input_ids"][:1]
    model.eval()
    with torch.no_grad():
        maps = torch.cat(model(input_ids=ids, output_attentions=True).attentions)
    heads = [pair for layer in outliers.attention for pair in zip(layer.first_token, layer.no_op, strict=True)]
    return Found(
        name=name,
        seed=seed,
        steps=tuple(curve.steps),
        curve=tuple(curve.largest),
        largest=outliers.max_abs,
        kurtosis=outliers.avg_kurtosis,
        loss=cost.full["loss"],
        copies=cost.full["copies"],
        loss8=cost.mean("loss"),
        copies8=cost.mean("copies"),
        parked=tuple(heads),
        maps=maps.numpy(),
        ids=ids[0].numpy(),
    )
