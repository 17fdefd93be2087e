"""For code written for the older Hopfield-layer library (``hflayers``): its layers, and its weights.

``from outeffhop.nn.hflayers import Hopfield, HopfieldPooling, HopfieldLayer`` takes the place of its import; the
arguments, the calls and the state dicts are the same. ``from_hflayers`` turns its weights into this package's layers.
"""

from outeffhop.nn.hflayers.hopfield import Hopfield
from outeffhop.nn.hflayers.learned import HopfieldLayer, HopfieldPooling
from outeffhop.nn.hflayers.weights import from_hflayers

__all__ = ["Hopfield", "HopfieldPooling", "HopfieldLayer", "from_hflayers"]
