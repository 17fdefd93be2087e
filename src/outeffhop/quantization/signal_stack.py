"""The stack signal handlers run on, kept from OpenVINO.

OpenVINO's CPU plugin gives the thread that loads it a signal stack of its own, puts back the one before when it is
unloaded, and frees its own. Two plugins that are loaded and unloaded in the same order (NNCF alone loads several)
leave the thread with one that is freed: the next signal with a Python handler, Ctrl-C among them, ends the process
with a segmentation fault.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_signal_stack"]


class _Stack(ctypes.Structure):
    """C's ``stack_t``."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """This thread leaves with the signal stack it came with; plugins unloaded later find it is not theirs."""
    if not sys.platform.startswith("linux"):
        yield
        return
    libc, before = ctypes.CDLL(None), _Stack()
    known = libc.sigaltstack(None, ctypes.byref(before)) == 0
    try:
        yield
    finally:
        if known:
            libc.sigaltstack(ctypes.byref(before), None)
