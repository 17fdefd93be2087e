"""Training: one recipe for four models, runs that survive.

train(RunConfig(model="opt", method="outeffhop", data="builtin:text", out="runs/a"))
"""

from outeffhop.training.card import save_pretrained
from outeffhop.training.config import DataConfig, RunConfig, TrainConfig
from outeffhop.training.run import Result, resume, train
from outeffhop.training.rundir import RunFolder

__all__ = ["RunConfig", "TrainConfig", "DataConfig", "RunFolder", "Result", "train", "resume", "save_pretrained"]
