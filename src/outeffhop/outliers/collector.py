"""Measures outliers in one pass over the data, with hooks on modules and on attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel

from outeffhop.metrics import evaluating
from outeffhop.models.hf_private import refuse_compiled
from outeffhop.models.inspection import inspecting
from outeffhop.models.real_tokens import encoder_of, first_tensor, sides
from outeffhop.models.recording import calls_of
from outeffhop.models.summary import running_method
from outeffhop.ops.call import Call
from outeffhop.outliers.accumulate import TensorSums
from outeffhop.outliers.heads import HeadSums, Tokens, shaped_as
from outeffhop.outliers.moments import BatchStats, Scratch, stats_of_each
from outeffhop.outliers.outlier_report import OutlierReport
from outeffhop.outliers.tensors import Pick, pick

__all__ = ["measure"]

# Fields of a config that name special tokens. [MASK] and [UNK] stand for words and do not count.
_SPECIAL = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")


def measure(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    tensors: str | Sequence[str] = "paper",
    *,
    special_ids: Iterable[int] | None = None,
    attention: bool = True,
    keep: int = 16,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> OutlierReport:
    """Measures the outliers in a model's activations, and what its heads attend to, in one pass over the data.

    Padding is left out, as ``attention_mask`` marks it, and in a decoder ``decoder_attention_mask`` or labels of −100.
    A sample is one entry of the batch. A tensor [B·k, …, d], as
    STanHop-Net has for k series, is read as B samples whose tokens are all dimensions except the last. A tensor
    [1, …, d] that all samples share counts once for each of them. The result does not depend on how samples are split
    into batches. Under ``torch.distributed`` each rank measures its own batches, and all ranks get the whole report.

    Args:
        model: any module; it is put into evaluation mode for the measurement. (Distributed)DataParallel is unwrapped.
        batches: keyword arguments of the model; tensors are moved to the model's device.
        tensors: "paper", "all" or patterns of module names; see ``outeffhop.outliers.tensors.pick``.
        special_ids: ids of special tokens; by default those in the model's config.
        attention: also measure attention heads.
        keep: largest number of outlier positions and channels to report per tensor.
        limit: largest number of batches.
        progress: called after each batch with the number of batches done.
    """
    for name, value in (("keep", keep), ("limit", limit)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    refuse_compiled(model)
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        model = model.module  # the config inside says which tensors the paper measures
    simulation = getattr(model, "_outeffhop_simulation", None)
    if attention and simulation is not None and simulation.layout.operations:
        raise ValueError(
            "model is quantized inside its attention, so heads cannot be measured: "
            "use attention=False to measure its tensors"
        )
    picks = pick(model, tensors)
    special = _special_ids(model) if special_ids is None else tuple(sorted(set(map(int, special_ids))))
    collector = _Collector(model, picks, special, keep)
    error: Exception | None = None
    try:
        collector.run(islice(batches, limit), attention, progress)
    except Exception as caught:
        error = caught
    collector = _over_ranks(collector, error)
    if not collector.samples:
        raise ValueError("batches is empty: give at least one batch")
    found = [collector.tensors[p.name].stats(p.name, p.kurtosis) for p in picks]
    found = [t for t in found if t.tokens]
    if not found:
        raise ValueError(f"tensors={tensors!r}: none of the {len(picks)} modules it selects ran")
    heads = [sums.stats(name) for name, sums in collector.heads.items()]
    return OutlierReport(
        model=type(model).__name__,
        method=running_method(model),
        samples=collector.samples,
        chosen=tensors if isinstance(tensors, str) else tuple(tensors),
        special_ids=special,
        tensors=tuple(found),
        attention=tuple(h for h in heads if h is not None),
    )


# Bytes of tensors that are held on a GPU, until it computes the statistics of all of them together.
_HELD = 2**28


class _Measured:
    """A tensor of the batch that is running, the names it has, and its statistics; until they are known, a copy."""

    __slots__ = ("copy", "names", "stats")

    def __init__(self, copy: Tensor) -> None:
        self.copy: Tensor | None = copy
        self.names: list[str] = []
        self.stats: BatchStats | None = None


class _Collector:
    def __init__(self, model: nn.Module, picks: list[Pick], special: tuple[int, ...], keep: int) -> None:
        self.model, self.picks, self.special = model, picks, special
        self.samples = 0
        self.tensors = {p.name: TensorSums(keep) for p in picks}
        self.heads: dict[str, HeadSums] = {}
        self._tokens = Tokens(0)  # of the part that is running: the encoder, or everything else
        self._sides = self._tokens, self._tokens
        self._encoded: Tensor | None = None  # the output of the encoder, which the decoder's cross attention reads
        self._scratch = Scratch()
        self._last: tuple[Tensor, float, _Measured] | None = None
        self._held: dict[Any, list[_Measured]] = {}  # of equal shapes
        self._counted: dict[Any, Tensor | None] = {}  # the rows of each shape that are not padding
        self._bytes = 0

    def run(
        self, batches: Iterable[Mapping[str, Any]], attention: bool, progress: Callable[[int], None] | None
    ) -> None:
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model))
            stack.enter_context(torch.no_grad())
            if attention:
                stack.enter_context(inspecting(self.model, watch=self._watch))
                for name, module in _on_their_own(self.model).items():
                    stack.callback(module.register_forward_hook(partial(self._returned, name)).remove)
            encoder = encoder_of(self.model)
            if encoder is not None:
                stack.callback(encoder.register_forward_pre_hook(lambda *_: self._turn(0)).remove)
                stack.callback(encoder.register_forward_hook(lambda _, args, output: self._turn(1, output)).remove)
            modules = dict(self.model.named_modules())
            for p in self.picks:
                stack.callback(self._hook(p, modules[p.module]).remove)
            for done, batch in enumerate(batches, 1):
                if not isinstance(batch, Mapping):
                    raise TypeError(
                        f"batches contains a {type(batch).__name__}: each batch must map the model's argument names "
                        "to tensors, as in [{'input_ids': ids}]"
                    )
                inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
                tokens = self._read(inputs)
                decoded = Tokens(tokens.samples, sides(inputs, True)[1])
                self._sides = tokens, tokens if encoder is None else decoded
                self._turn(1)
                self.model(**inputs)
                self._settle()
                self.samples += self._tokens.samples
                self._last = None
                if progress is not None:
                    progress(done)

    def _turn(self, side: int, encoded: Any = None) -> None:
        self._tokens, self._encoded = self._sides[side], first_tensor(encoded)

    def _hook(self, p: Pick, module: nn.Module) -> Any:
        def see(value: Any, given: Any) -> None:
            x = first_tensor(value)
            if x is not None:
                tokens = self._sides[0] if given is not None and given is self._encoded else self._tokens
                self._add(p.name, x.movedim(1, -1) if isinstance(module, _ConvNd) and p.side == "output" else x, tokens)

        if p.side == "input":
            return module.register_forward_pre_hook(
                lambda _, args, kwargs: see((*args, *kwargs.values()), next(iter(args), None)), with_kwargs=True
            )
        return module.register_forward_hook(lambda _, args, output: see(output, next(iter(args), None)))

    def _add(self, name: str, x: Tensor, tokens: Tokens) -> None:
        # a container returns the same tensor as its last module: it need not be measured again
        if self._last is None or self._last[0] is not x or self._last[1] != _version(x):
            shaped = _as_samples(x, tokens)
            if shaped is None:
                return
            self._last = x, _version(x), self._measure(*shaped, (id(tokens), x.shape, x.dtype, x.device))
        measured = self._last[2]
        if measured.stats is None:
            measured.names.append(name)
        else:
            self.tensors[name].add(measured.stats, self.samples)

    def _measure(self, x: Tensor, counts: Tensor | None, like: Any) -> _Measured:
        """Statistics of [B, rows, d]; a GPU, which has to wait for each result, has them later."""
        room = _room(x.device)
        # a copy: the model may change its tensor in place
        found = _Measured(x.detach() if not room else x.detach().to(_exact(x.dtype), copy=True))
        self._held.setdefault(like, []).append(found)
        self._counted[like] = counts
        self._bytes += x.numel() * 4
        if self._bytes >= room:
            self._settle()
        return found

    def _settle(self) -> None:
        """Computes what is held."""
        for like, held in self._held.items():
            copies = [one.copy for one in held if one.copy is not None]
            for one, stats in zip(held, stats_of_each(copies, self._counted[like], self._scratch), strict=True):
                one.stats, one.copy = stats, None
                for name in one.names:
                    self.tensors[name].add(stats, self.samples)
        self._held, self._counted, self._bytes = {}, {}, 0

    def _watch(self, name: str, call: Call, lse: Tensor | None, weights: Tensor | None) -> None:
        self.heads.setdefault(name, HeadSums()).add(call, lse, weights, self._tokens)

    def _returned(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """The weights that a model's own attention returns, if it does."""
        weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
        if isinstance(weights, Tensor) and weights.dim() == 4:
            self._watch(name, shaped_as(weights), None, weights)

    def _read(self, inputs: dict[str, Any]) -> Tokens:
        wanted = getattr(self.model, "main_input_name", None)
        if wanted is not None and wanted not in inputs and "inputs_embeds" not in inputs:
            raise ValueError(
                f"batches contain {', '.join(inputs) or 'nothing'}, but {type(self.model).__name__} takes {wanted}: "
                "the data does not fit the model"
            )
        first = inputs.get(wanted or "", next((v for v in inputs.values() if isinstance(v, Tensor)), None))
        if first is None or not first.dim() or not first.shape[0]:
            raise ValueError("batches contains a batch without samples")
        real, ids = sides(inputs, False)[0], inputs.get("input_ids")
        special = None
        if isinstance(ids, Tensor) and self.special:
            special = torch.isin(ids, torch.tensor(self.special, device=ids.device))
        return Tokens(first.shape[0], real, special)


def _on_their_own(model: nn.Module) -> dict[str, nn.Module]:
    """Attention modules whose softmax ours cannot compute, such as sparse attention, and which run their own."""
    calls = {name: calls_of(module) for name, module in model.named_modules()}
    return {name: model.get_submodule(name) for name, found in calls.items() if found is not None and found.unserved}


def _as_samples(x: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor | None] | None:
    """[B, rows, d] and which rows count; None if the first dimension is not the samples."""
    b = tokens.samples
    if x.dim() < 2 or x.numel() == 0:
        return None
    if x.shape[0] == 1 and b > 1:
        x = x.expand(b, *x.shape[1:])
    if x.shape[0] % b:
        return None
    real = tokens.rows(x)
    return x.reshape(b, -1, x.shape[-1]), real


def _room(device: torch.device) -> int:
    """Bytes to hold; 0 on a CPU, whose cache still has what it computed last."""
    return 0 if device.type == "cpu" else _HELD


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _version(x: Tensor) -> float:
    """How often x was changed in place. Inference mode does not count it: nan never equals an earlier version."""
    return math.nan if x.is_inference() else x._version


def _special_ids(model: nn.Module) -> tuple[int, ...]:
    config = getattr(model, "config", None)
    found = [getattr(config, name, None) for name in _SPECIAL]
    flat = [i for entry in found if entry is not None for i in (entry if isinstance(entry, list) else [entry])]
    return tuple(sorted({i for i in flat if i >= 0}))


def _over_ranks(mine: _Collector, error: Exception | None) -> _Collector:
    """Merges the sums of all ranks. An error on one rank is raised on all, so that none waits for it."""
    if not (dist.is_available() and dist.is_initialized()):
        if error is not None:
            raise error
        return mine
    for sums in mine.heads.values():
        sums.read()
    gathered: list[Any] = [None] * dist.get_world_size()
    failure = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(gathered, (failure, mine.samples, mine.tensors, mine.heads))
    if error is not None:
        raise error
    for rank, (failed, *_) in enumerate(gathered):
        if failed is not None:
            raise ValueError(f"measuring failed on rank {rank}: {failed}")
    whole = _Collector(mine.model, mine.picks, mine.special, 1)
    _, whole.samples, whole.tensors, whole.heads = gathered[0]
    for _, samples, tensors, heads in gathered[1:]:
        for name, sums in tensors.items():
            whole.tensors[name].merge(sums, whole.samples)
        for name, sums in heads.items():
            whole.heads.setdefault(name, HeadSums()).merge(sums)
        whole.samples += samples
    return whole
