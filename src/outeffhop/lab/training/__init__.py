"""Training: one recipe for four models, and runs that survive a kill.

    train(RunConfig(model="opt", method="outeffhop", data="builtin:text", out="runs/a"))

Names are imported when they are first used: reading a config needs neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outeffhop.lab.training.card import save_pretrained
    from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig
    from outeffhop.lab.training.run import Result, resume, train
    from outeffhop.lab.training.rundir import RunFolder

__all__ = ["DataConfig", "Result", "RunConfig", "RunFolder", "TrainConfig", "resume", "save_pretrained", "train"]

_HOME = {
    "DataConfig": "config",
    "Result": "run",
    "RunConfig": "config",
    "RunFolder": "rundir",
    "TrainConfig": "config",
    "resume": "run",
    "save_pretrained": "card",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
