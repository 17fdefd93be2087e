"""Settings for every test."""

import torch
from hypothesis import settings

# tensors are small here, and other processes at work beside: more threads would only wait for each other
torch.set_num_threads(1)

settings.register_profile("bounded", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("bounded")
