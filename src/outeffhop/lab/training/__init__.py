"""Training: one recipe for four models, and runs that survive a kill.

    train(RunConfig(model="opt", method="outeffhop", data="builtin:text", out="runs/a"))

Names are imported when they are first used: reading a config needs neither torch nor transformers.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from outeffhop.lab.training.card import save_pretrained
    from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig
    from outeffhop.lab.training.run import Result, prepare_data, resume, train
    from outeffhop.lab.training.rundir import RunFolder

__all__ = [
    "train",
    "resume",
    "RunConfig",
    "TrainConfig",
    "DataConfig",
    "prepare_data",
    "RunFolder",
    "Result",
    "save_pretrained",
]

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "card": ["save_pretrained"],
        "config": ["DataConfig", "RunConfig", "TrainConfig"],
        "run": ["Result", "prepare_data", "resume", "train"],
        "rundir": ["RunFolder"],
    },
)
