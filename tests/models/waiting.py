"""Counts what a GPU would have to wait for: everything that reads a tensor's numbers, run on a CPU."""

from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique2", "equal")
# it reads the zero points to check them
_READS += ("fake_quantize_per_channel_affine_cachemask",)
_COPIES = ("cpu", "numpy", "tolist")


class _Operators(TorchDispatchMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name in _READS or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class _Copies(TorchFunctionMode):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", None) in _COPIES:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits():
    """A context that collects the names of such calls."""
    found = []
    with _Copies(found), _Operators(found):
        yield found
