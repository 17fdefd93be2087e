"""Tasks and their metrics: perplexity, accuracy, forecasting errors, and the SQNR of outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from outeffhop._naming import known

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["metric_for", "task_of", "TASKS"]

TASKS = {  # the first kind is the one that builtin data has
    "mlm": (("text",), ("ForMaskedLM",)),
    "clm": (("text",), ("ForCausalLM", "LMHeadModel")),
    "seq2seq": (("text", "pairs"), ("ForConditionalGeneration", "MTModel")),
    "classification": (("images",), ("ForImageClassification",)),
    "forecasting": (("series",), ("ForForecasting",)),
    "embedding": (("text", "images"), ()),
}
"""Task → the kinds of data that serve it, and words in the names of the architectures that learn it.

"embedding" is the task of all other models: base models, and heads whose labels no data here has.
"""

Batch = Mapping[str, Tensor]
Metric = Callable[[nn.Module, Iterable[Batch]], dict[str, float]]


def task_of(model_or_config: nn.Module | PreTrainedConfig) -> str:
    """The task of a model or config, by its architecture: BertForMaskedLM learns mlm.

    A vision-language model that generates text after text alone learns clm.
    """
    config: Any = getattr(model_or_config, "config", model_or_config)
    for name, kind in _architectures(model_or_config, config):
        takes = getattr(kind, "main_input_name", None)
        for task, (_, words) in TASKS.items():
            if not any(word in name for word in words):
                continue
            if task != "seq2seq":
                return task
            if takes in (None, "input_ids"):
                return task if getattr(config, "is_encoder_decoder", False) else "clm"
        if takes in ("input_ids", "pixel_values") and "ForConditionalGeneration" not in name:
            return "embedding"
        if takes is not None:
            raise ValueError(f"{name} takes {takes}: only models of text alone, images alone or series are served")
    names = ", ".join(name for name, _ in _architectures(model_or_config, config))
    learned = ", ".join(f"…{words[0]} learns {task}" for task, (_, words) in TASKS.items() if words)
    raise ValueError(f"no task is known for the architecture {names or 'of this config, which names none'}: {learned}")


def _architectures(model_or_config: Any, config: Any) -> list[tuple[str, Any]]:
    """Names of architectures and their classes, None for a class that transformers does not have."""
    if config is not model_or_config:
        return [(type(model_or_config).__name__, model_or_config)]
    names = list(getattr(config, "architectures", None) or [])
    if not names and getattr(config, "model_type", None) == "stanhop":
        names = ["StanhopForForecasting"]  # its config serves this one architecture
    import transformers

    return [(name, getattr(transformers, name, None)) for name in names]


def metric_for(task: str, reference: nn.Module | None = None) -> Metric:
    """The metric of a task: a function of a model and batches that returns numbers by name, the main one first.

    Args:
        task: "mlm", "clm" and "seq2seq" give perplexity and loss, "classification" accuracy, "forecasting" mse and mae,
            "embedding" the SQNR of the output (logits or last hidden state) against the reference's.
        reference: the model in floating point, for "embedding".
    """
    known("task", task, TASKS)
    if task in ("mlm", "clm", "seq2seq"):
        return _Perplexity(shifted=task == "clm")
    if task == "classification":
        return _accuracy
    if task == "forecasting":
        return _errors
    if reference is None:
        raise ValueError("reference=None: task='embedding' compares outputs; pass the model in floating point")
    return _Sqnr(reference)


def to_device(batch: Batch, model: nn.Module) -> dict[str, Tensor]:
    """The batch on the device of the model's parameters."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return {name: value.to(device) for name, value in batch.items()}


@torch.no_grad()
def _outputs(model: nn.Module, batches: Iterable[Batch], *needed: str) -> Iterable[tuple[dict[str, Tensor], Any]]:
    """Each batch on the model's device, and what the model makes of it."""
    seen = False
    for batch in batches:
        missing = [name for name in needed if name not in batch]
        if missing:
            raise ValueError(
                f"the batches have {', '.join(batch)} but no {missing[0]!r}: is this data for another task?"
            )
        moved = to_device(batch, model)
        seen = True
        yield moved, model(**moved)
    if not seen:
        raise ValueError("no evaluation batches: a metric needs at least one")


class _Perplexity:
    """exp of the mean loss over all predicted tokens, independent of how they are batched."""

    def __init__(self, shifted: bool) -> None:
        self.shifted = shifted

    def __call__(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        losses, counts = [], []
        for batch, out in _outputs(model, batches, "labels"):
            labels = batch["labels"][:, 1:] if self.shifted else batch["labels"]
            losses.append(self._mean(out, labels).detach())
            counts.append((labels != -100).sum())
        loss, tokens = 0.0, 0
        for one, count in zip(map(float, losses), map(int, counts), strict=True):  # a GPU need not wait in between
            if count:
                loss += one * count
                tokens += count
        if not tokens:
            raise ValueError("the batches have no token to predict: every label is -100")
        mean = loss / tokens
        return {"perplexity": math.inf if mean >= 700.0 else math.exp(mean), "loss": mean}

    def _mean(self, out: Any, labels: Tensor) -> Tensor:
        """The model's loss, in float32: half precision has three digits, too few to show what quantization changes."""
        if out.loss.dtype in (torch.float32, torch.float64):
            return out.loss  # type: ignore[no-any-return]
        logits = out.logits[:, :-1] if self.shifted else out.logits
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _accuracy(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    right, total = [], 0
    for batch, out in _outputs(model, batches, "labels"):
        right.append((out.logits.argmax(-1) == batch["labels"]).sum())
        total += batch["labels"].numel()
    return {"accuracy": sum(map(int, right)) / total}


def _errors(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    squares, distances, total = 0.0, 0.0, 0
    for batch, out in _outputs(model, batches, "future_values"):
        difference = out.prediction.double() - batch["future_values"].double()
        squares += float(difference.square().sum())
        distances += float(difference.abs().sum())
        total += difference.numel()
    return {"mse": squares / total, "mae": distances / total}


class _Sqnr:
    """Power of the output over the power of its error, in decibels. Padding does not count."""

    def __init__(self, reference: nn.Module) -> None:
        self.reference = reference

    def __call__(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        if model is self.reference:
            return {"sqnr_db": math.inf}
        return {"sqnr_db": sqnr_db(self._pairs(model, batches))}

    @torch.no_grad()
    def _pairs(self, model: nn.Module, batches: Iterable[Batch]) -> Iterator[tuple[Batch, Tensor, Tensor]]:
        for batch, out in _outputs(model, batches):
            yield batch, main_output(self.reference(**batch)), main_output(out)


def main_output(out: Any) -> Tensor:
    """The logits, else the last hidden state, else the first tensor of numbers that is not the loss.

    So it is the forecast of a forecaster, and one of several outputs of a head.
    """
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(out, name, None), Tensor):
            return getattr(out, name)  # type: ignore[no-any-return]
    rest = (t for name, t in out.items() if name != "loss")
    found = next((t for t in rest if isinstance(t, Tensor) and t.is_floating_point()), None)
    if found is None:
        raise ValueError(f"{type(out).__name__} has no tensor of numbers to compare: it has {', '.join(out)}")
    return found


def sqnr_db(outputs: Iterable[tuple[Batch, Tensor, Tensor]]) -> float:
    """Signal over error in decibels, of batches, their true outputs and those found. Padding does not count."""
    signal, noise = 0.0, 0.0
    for batch, truth, found in outputs:
        truth, found, mask = truth.double(), found.double(), batch.get("attention_mask")
        if mask is not None and mask.shape == truth.shape[:2]:
            truth, found = truth[mask.bool()], found[mask.bool()]
        signal += float(truth.square().sum())
        noise += float((found - truth).square().sum())
    return math.inf if noise == 0.0 else 10.0 * math.log10(signal / noise)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the model in evaluation mode, and gives each of its modules its mode back afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
