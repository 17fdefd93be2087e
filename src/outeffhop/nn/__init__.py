"""Layers that learn: the paper's three, transformer layers built on them, gates and QK-norm."""

from outeffhop.nn.hflayers import from_hflayers
from outeffhop.nn.hopfield import OutEffHop
from outeffhop.nn.lookup import OutEffHopLayer
from outeffhop.nn.pooling import OutEffHopPooling
from outeffhop.nn.transformer import OutEffHopDecoderLayer, OutEffHopEncoderLayer
from outeffhop.state import Gate, QkNorm

__all__ = [
    "OutEffHop",
    "OutEffHopPooling",
    "OutEffHopLayer",
    "OutEffHopEncoderLayer",
    "OutEffHopDecoderLayer",
    "Gate",
    "QkNorm",
    "from_hflayers",
]
