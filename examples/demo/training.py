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
TASK = Backcopy(symbols=64, triggers=8, length=64, concentration=0.3)
POINTS = 12  # of the curve of outliers over training
# seeds of sequences; those for training are the models' own seeds, counted from here
TRAINING, MENDING, WATCHED, NEW, CALIBRATION = 100, 200, 300, 400, 500

Told = tuple[str, int, int, float]  # which training, how many of its steps are done, of how many, and the largest |x|


@dataclass(frozen=True)
class Settings:
    """How every model is trained: fast enough for outliers to grow within a minute."""

    steps: int = 900
    mending_steps: int = 300
    lr: float = 6e-3
    mending_lr: float = 2e-3
    batch: int = 16
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
        largest, kurtosis: largest |x| and average kurtosis of the tensors that ``measure`` watches.
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


def run(name: str, seed: int, settings: Settings, tell: Callable[[Told], None]) -> list[Found]:
    """Trains a model by its name on the page, and measures it; with softmax it is mended and measured again."""
    torch.set_num_threads(1)  # one model on each core
    model = build(METHODS[name], seed)

    def learn(title: str, steps: int, lr: float, data: int) -> Found:
        curve = Curve(model, steps)

        def each(step: int) -> None:
            curve(step)
            tell((f"{title}, seed {seed}", step, steps, curve.largest[-1]))

        train(model, steps, lr, settings.batch, data + seed, each)
        return measured(title, seed, model, curve)

    found = [learn(name, settings.steps, settings.lr, TRAINING)]
    if name == "softmax":
        penalty = OutlierPenalty(model, settings.penalty)  # from now on the loss contains the tail of the activations
        found.append(learn(MENDED, settings.mending_steps, settings.mending_lr, MENDING))
        penalty.remove()
    return found


def build(method: str, seed: int) -> LlamaForCausalLM:
    """A small Llama of transformers with one of our methods. A seed gives all methods the same first weights."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TASK.vocabulary,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TASK.length,
        bos_token_id=0,
        eos_token_id=None,
    )
    return convert(LlamaForCausalLM(config), method)


def train(model: nn.Module, steps: int, lr: float, batch: int, seed: int, each: Callable[[int], None]) -> None:
    """AdamW, after a short warm-up at a constant rate, without the weight decay that would hold outliers down."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=min(90, steps))
    random = np.random.default_rng(seed)
    for step in range(steps):
        model.train()
        loss = model(**TASK.batches(1, batch, random)[0]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        each(step + 1)


class Curve:
    """The largest |x| of a model in training, at ``POINTS`` steps."""

    def __init__(self, model: nn.Module, steps: int) -> None:
        self.model, self.batches = model, TASK.batches(1, 32, WATCHED)
        self.every = max(1, steps // POINTS)
        self.steps, self.largest = [0], [self._largest()]

    def __call__(self, step: int) -> None:
        if step % self.every == 0:
            self.steps.append(step)
            self.largest.append(self._largest())

    def _largest(self) -> float:
        return measure(self.model, self.batches, attention=False).max_abs


def measured(name: str, seed: int, model: nn.Module, curve: Curve) -> Found:
    """Outliers, attention and what 8 bits cost, on sequences the model has not seen."""
    new = TASK.batches(4, 64, NEW)
    outliers = measure(model, new)
    calibration = TASK.batches(8, 32, CALIBRATION)
    cost = evaluate(model, calibration, new, copies_right, "W8A8", seeds=2, calibration_batches=4)
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


@torch.no_grad()
def copies_right(model: nn.Module, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
    """A metric for ``evaluate``: the loss, and how many of the symbols after a trigger are right, in percent."""
    losses, right = [], []
    for batch in batches:
        out, ids = model(**batch), batch["input_ids"]
        losses.append(float(out.loss))
        right.append((out.logits[:, :-1].argmax(-1) == ids[:, 1:])[TASK.copies(ids)])
    return {"copies": 100 * float(torch.cat(right).double().mean()), "loss": float(np.mean(losses))}
