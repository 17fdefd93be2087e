"""What a method adds to one attention: its gate, its learned sink or α, its QK-norm, and how they attend."""

from outeffhop.state.fused_or_eager import attend
from outeffhop.state.gate import Gate
from outeffhop.state.method_state import MethodState
from outeffhop.state.qk_norm import QkNorm

__all__ = ["MethodState", "attend", "Gate", "QkNorm"]
