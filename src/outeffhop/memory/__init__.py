"""Associative memory: store patterns, classify outliers, compute energies, retrieve. Nothing is learned.

``HopfieldMemory`` is the memory, ``NoOp`` the classification of its outliers, ``ShardedMemory`` the
same memory split over several processes. ``plot_energy`` and ``plot_retrieval`` draw a memory.
"""

from outeffhop.memory import theory
from outeffhop.memory.hopfield_memory import HopfieldMemory
from outeffhop.memory.noop import NoOp
from outeffhop.memory.plots import plot_energy, plot_retrieval
from outeffhop.memory.retrieval import Retrieval
from outeffhop.memory.sharded import ShardedMemory

__all__ = ["HopfieldMemory", "Retrieval", "NoOp", "ShardedMemory", "plot_energy", "plot_retrieval", "theory"]
