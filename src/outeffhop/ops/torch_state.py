"""What PyTorch is doing right now: tracing, exporting, transforming. The only module that reads its private state.

Public functions cover only part of it: ``torch.compiler.is_compiling`` covers torch.compile, and in PyTorch 2.11
``torch.compiler.is_exporting`` is also true under it. tests/ops/test_torch_state.py compares every answer with what
PyTorch does, so that it fails for a release that changes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "below_autograd",
    "constant",
    "is_autocast_anywhere",
    "is_concrete",
    "is_exporting",
    "is_plain",
    "is_transformed",
    "is_watched",
    "only_its_forward",
    "saves_unchanged",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def is_exporting() -> bool:
    """Whether torch.export or an ONNX export runs this code."""
    tracing = torch._C._get_tracing_state() is not None and torch.onnx.is_in_onnx_export()
    return torch.compiler._is_exporting_flag or tracing


def is_transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_concrete(t: Tensor) -> bool:
    """Whether Python can read the tensor's values: it is not fake and not inside a torch.func transform."""
    from torch._subclasses.fake_tensor import is_fake

    return not is_fake(t) and not torch._C._functorch.is_functorch_wrapped_tensor(t)


def is_autocast_anywhere() -> bool:
    """Whether autocast is enabled for some type of device; asking for one type takes far longer."""
    return torch._C._is_any_autocast_enabled()


def is_plain(*tensors: Tensor) -> bool:
    """Whether only autograd watches: no trace, no dispatch mode, no tensor subclass."""
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter):
            return False
    return not is_watched()


def is_watched() -> bool:
    """Whether a trace or a dispatch mode sees every op."""
    return bool(torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state())


def only_its_forward(module: nn.Module) -> bool:
    """Whether calling the module runs the forward of its class and nothing else: no hooks, no forward of its own."""
    hooks = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return not (hooks or "forward" in module.__dict__ or nn.modules.module._has_any_global_hook())


def saves_unchanged() -> bool:
    """Whether autograd saves tensors as they are: no hook packs them, as for offloading or checkpointing."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def below_autograd(op: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    """Calls an op as autograd would: below autograd, directly on the kernels."""
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


def constant(function: Function) -> Function:
    """Marks a function whose result torch.compile may take as a constant.

    ``torch.compiler.assume_constant_result`` does no more than this, but imports torch._dynamo, which takes a second.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
