"""Layers that learn: the paper's three, transformer layers built on them, and the gates."""

from outeffhop.nn.gate import Gate
from outeffhop.nn.hflayers import from_hflayers
from outeffhop.nn.hopfield import OutEffHop
from outeffhop.nn.lookup import OutEffHopLayer
from outeffhop.nn.pooling import OutEffHopPooling
from outeffhop.nn.qk_norm import QkNorm
from outeffhop.nn.transformer import OutEffHopDecoderLayer, OutEffHopEncoderLayer

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
