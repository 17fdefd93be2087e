"""A memory of digits that answers "nothing" to what it has never seen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from outeffhop import HopfieldMemory

STORED = 100
BETA = 30.0
ENOUGH = 0.55  # the cosine similarity from which on a pattern outweighs the no-op


@dataclass(frozen=True)
class Recall:
    """Queries and answers as images [N, 8, 8], the weight of "nothing" in each answer [N], and what each query is."""

    queries: Tensor
    softmax: Tensor
    outeffhop: Tensor
    nothing: tuple[float, ...]
    names: tuple[str, ...]
    known: tuple[bool, ...]


def recall() -> Recall:
    """Asks a memory of a hundred digits for three of them, half hidden, and for three things that are no digits.

    n no-op patterns weigh as much as one pattern with score log n: with n = exp(β · ENOUGH), a pattern counts only if
    it is at least that similar to the query.
    """
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels[:STORED], dtype=torch.float32) / 16
    grey = images.mean(0)
    patterns = torch.nn.functional.normalize(images - grey, dim=1)

    shown = torch.tensor([list(labels[:STORED]).index(digit) for digit in (0, 3, 7)])
    half = (images[shown] - grey) * (torch.arange(64) < 32)  # the lower half is the mean of all
    board = (torch.arange(8)[:, None] + torch.arange(8)) % 2 - 0.5
    noise = torch.rand(64, generator=torch.Generator().manual_seed(0)) - 0.5
    cross = torch.maximum(torch.eye(8), torch.eye(8).flip(0)).flatten() - grey
    queries = torch.nn.functional.normalize(torch.cat([half, torch.stack([board.flatten(), noise, cross])]), dim=1)

    no_ops = math.exp(BETA * ENOUGH)
    answers = HopfieldMemory(patterns, BETA, f"outeffhop(n={no_ops:g})").retrieve(queries)
    dense = HopfieldMemory(patterns, BETA, "vanilla").retrieve(queries)
    names = ("half a 0", "half a 3", "half a 7", "a chessboard", "noise", "a cross")
    return Recall(
        *(x.reshape(-1, 8, 8) for x in (queries, dense.state, answers.state)),
        tuple(answers.no_op.tolist()),
        names,
        (True,) * 3 + (False,) * 3,
    )
