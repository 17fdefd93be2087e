"""Names the processes of a run that no longer answer, when the others have waited for them too long."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from outeffhop.lab.training.rundir import RunFolder

__all__ = ["roll_call"]

_GRACE = 10.0  # seconds; the other processes time out a little later
# how gloo, NCCL and the store report a silent or lost partner; their errors do not have their own type
_LOST = re.compile(r"gloo|NCCL|timed out|timeout|connection (reset|closed|refused)|broken pipe", re.IGNORECASE)


@contextmanager
def roll_call(folder: RunFolder, timeout: int) -> Iterator[None]:
    """Within it, a communication error names the processes that no longer answer. The process group must exist."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # a separate store: that of the process group is unusable once the group has failed
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    known = PrefixStore(f"outeffhop-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    rank, size = dist.get_rank(), dist.get_world_size()
    known.set(f"where-{rank}", f"{socket.gethostname()}, process id {os.getpid()}")
    try:
        yield
    except RuntimeError as error:
        lost = _silent(known, rank, size) if _LOST.search(str(error)) else []
        if not lost:
            raise
        names = ", ".join(f"{i} ({_where(known, i)})" for i in lost)
        last = folder.last_checkpoint()
        raise RuntimeError(
            f"of {size} processes, no answer from: {names}; the others waited up to train.timeout={timeout} seconds; "
            + (f"the last checkpoint is {last}" if last else "there is no checkpoint yet")
        ) from error


def _silent(known: Store, rank: int, size: int) -> list[int]:
    """The processes that do not report in time."""
    known.set(f"here-{rank}", "")
    deadline = time.monotonic() + _GRACE
    while True:
        missing = [i for i in range(size) if not known.check([f"here-{i}"])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(0.1)


def _where(known: Store, rank: int) -> str:
    key = f"where-{rank}"
    return known.get(key).decode() if known.check([key]) else "never started"
