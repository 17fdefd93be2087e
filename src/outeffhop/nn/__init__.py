"""Layers that learn: the paper's three, and transformer layers built on them."""

from outeffhop.nn.hflayers import from_hflayers
from outeffhop.nn.hopfield import OutEffHop
from outeffhop.nn.lookup import OutEffHopLayer
from outeffhop.nn.pooling import OutEffHopPooling
from outeffhop.nn.transformer import OutEffHopDecoderLayer, OutEffHopEncoderLayer

__all__ = [
    "OutEffHop",
    "OutEffHopPooling",
    "OutEffHopLayer",
    "OutEffHopEncoderLayer",
    "OutEffHopDecoderLayer",
    "from_hflayers",
]
