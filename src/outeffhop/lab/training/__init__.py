"""Training: one recipe for four models, runs that survive.

train(RunConfig(model="opt", method="outeffhop", data="builtin:text", out="runs/a"))
"""

from outeffhop.lab.training.card import save_pretrained
from outeffhop.lab.training.config import DataConfig, RunConfig, TrainConfig
from outeffhop.lab.training.run import Result, resume, train
from outeffhop.lab.training.rundir import RunFolder

__all__ = ["RunConfig", "TrainConfig", "DataConfig", "RunFolder", "Result", "train", "resume", "save_pretrained"]
