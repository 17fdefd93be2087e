"""Which tensors of a model are measured: the paper's choice for its architectures, a similar one for others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from outeffhop.models.modules import attention_modules, has_attention, own_attention
from outeffhop.state import MethodState

__all__ = ["NAMED", "PAPER", "Rule", "Pick", "pick"]

NAMED = ("paper", "paper+inputs", "all")
"""The choices of tensors that have a name."""


@dataclass(frozen=True)
class Rule:
    """Selects modules by name, and which of their tensors is measured.

    Attributes:
        pattern: a regular expression for the last parts of a module's name.
        side: "output" or "input".
        kurtosis: whether the tensor counts in the average kurtosis; all tensors count in the inf norm.
    """

    pattern: str
    side: str = "output"
    kurtosis: bool = True


_BERT = (
    # the LayerNorm after the FFN; its input is the residual sum
    Rule(r"layer\.\d+\.output\.(dense|LayerNorm)"),
    Rule(r"layer\.\d+\.output\.LayerNorm", side="input", kurtosis=False),
)
PAPER: dict[str, tuple[Rule, ...]] = {  # by model_type
    "bert": _BERT,
    "roberta": _BERT,  # built like BERT, as are the two below
    "xlm-roberta": _BERT,
    "electra": _BERT,
    "opt": (
        Rule(r"layers\.\d+(\.(fc2|self_attn\.out_proj|self_attn_layer_norm|final_layer_norm))?"),
        Rule(r"decoder\.final_layer_norm"),
    ),
    "vit": (Rule(r"layers?\.\d+(\..+)?"),),
    "stanhop": (Rule(r"decoder\.\d+(\..+)?"),),
}

# In evaluation mode these return their input, or have no tensor of their own.
_SILENT = (nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, PreTrainedModel)
_MLP = re.compile(r"mlp|ffn|feed_?forward|moe|experts", re.IGNORECASE)


@dataclass(frozen=True)
class Pick:
    """One tensor to measure: the input or output of a module."""

    module: str
    side: str = "output"
    kurtosis: bool = True

    @property
    def name(self) -> str:
        return self.module if self.side == "output" else f"{self.module}:{self.side}"


def pick(model: nn.Module, tensors: str | Sequence[str] = "paper") -> list[Pick]:
    """Selects the tensors of a model to measure, in the order of its modules.

    Args:
        model: any module.
        tensors: "paper" selects those the paper measures in BERT, OPT, ViT and STanHop-Net; in other models the
            outputs of blocks, MLPs, norms and attention output projections. What a method adds (gates, QK-norm) is left
            out, so that all methods are measured on the same tensors. "paper+inputs" adds the inputs of each MLP's last
            projection. "all" selects the output of every module. A list contains ``fnmatch`` patterns of module names;
            a pattern that ends with ``:input`` selects the module's input.
    """
    if isinstance(tensors, str):
        if tensors not in NAMED:
            raise ValueError(
                f"tensors={tensors!r}: must be {', '.join(map(repr, NAMED))} or a list of patterns of module names"
            )
        found = [Pick(name) for name in _speaking(model)] if tensors == "all" else _paper(model)
        if tensors == "paper+inputs":
            found += [Pick(name, "input", kurtosis=False) for name in _last_projections(model)]
    else:
        found = _matching(model, list(tensors))
    if not found:
        raise ValueError(
            f"tensors={tensors!r} selects no tensor of {type(model).__name__}: "
            "use tensors='all' or patterns of its module names"
        )
    return found


def _speaking(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name and not isinstance(module, _SILENT)]


def _paper(model: nn.Module) -> list[Pick]:
    rules = PAPER.get(getattr(getattr(model, "config", None), "model_type", ""))
    added = tuple(f"{name}." for name, m in model.named_modules() if isinstance(m, MethodState))
    names = [name for name in _speaking(model) if not f"{name}.".startswith(added)]
    if rules is None:
        chosen = set(_generic(model))
        return [Pick(name) for name in names if name in chosen]
    return [
        Pick(name, rule.side, rule.kurtosis)
        for name in names
        for rule in rules
        if re.fullmatch(rf"(.*\.)?{rule.pattern}", name)
    ]


def _generic(model: nn.Module) -> Iterator[str]:
    """The tensors found in and beside the blocks of a model that the paper does not have."""
    modules = dict(model.named_modules())
    for attention, block, branch, outside in _blocks(model, modules):
        yield block
        yield from _last_linear(modules, branch)
        norms = [name for name in (*branch, *outside) if _is_norm(modules[name])]
        yield from (name for name in norms if not name.startswith(f"{attention}."))
        children = [name for name in outside if name.count(".") == block.count(".") + 1]
        mlps = [n for n in children if _MLP.search(n.rpartition(".")[2]) or _MLP.search(type(modules[n]).__name__)]
        yield from mlps or _last_linear(modules, outside)
        parent = block.rpartition(".")[0].rpartition(".")[0]  # contains the list of blocks and the final norm
        yield from (n for n in modules if n.rpartition(".")[0] == parent and n and _is_norm(modules[n]))


def _last_projections(model: nn.Module) -> list[str]:
    """The last Linear of each block outside its attention: what an MLP writes back with."""
    modules = dict(model.named_modules())
    return [name for _, _, _, outside in _blocks(model, modules) for name in _last_linear(modules, outside)]


def _blocks(model: nn.Module, modules: dict[str, nn.Module]) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Each attention module, its block, and the names in the block: in the branch of attention, and outside of it.

    Blocks are entries of module lists that contain attention.
    """
    for attention in attention_modules(model) if has_attention(model) else own_attention(model):
        block = _block(attention, modules)
        if block is None:
            continue
        # the child of the block that contains attention: its last Linear is the output projection
        branch = ".".join(attention.split(".")[: block.count(".") + 2])
        inside = [name for name in modules if name.startswith(f"{block}.")]
        within = [name for name in inside if f"{name}.".startswith(f"{branch}.")]
        yield attention, block, within, [name for name in inside if name not in within]


def _block(name: str, modules: dict[str, nn.Module]) -> str | None:
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if isinstance(modules[".".join(parts[: end - 1])], nn.ModuleList):
            return ".".join(parts[:end])
    return None


def _last_linear(modules: dict[str, nn.Module], names: list[str]) -> list[str]:
    # Conv1D is GPT-2's Linear
    return [n for n in names if isinstance(modules[n], nn.Linear) or type(modules[n]).__name__ == "Conv1D"][-1:]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _matching(model: nn.Module, patterns: list[str]) -> list[Pick]:
    names = _speaking(model)
    picks = [Pick(name, side) for name in names for side in ("input", "output")]
    for pattern in patterns:
        if not any(fnmatchcase(p.name, pattern) for p in picks):
            near = get_close_matches(pattern, [p.name for p in picks], n=3, cutoff=0.3)
            raise ValueError(
                f"tensors: no module of {type(model).__name__} matches {pattern!r}; available, for instance: "
                + ", ".join(near or names[:3])
            )

    def wanted(p: Pick) -> bool:
        of_inputs = (pattern for pattern in patterns if pattern.endswith(":input") == (p.side == "input"))
        return any(fnmatchcase(p.name, pattern) for pattern in of_inputs)

    return [p for p in picks if wanted(p)]
