"""Settings for every test."""

import os

import torch
from hypothesis import settings

# one worker per core: more threads than that would only wait for each other
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

settings.register_profile("bounded", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("bounded")
