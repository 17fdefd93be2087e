"""The sizes of a STanHop-Net and its attention method."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PretrainedConfig

from outeffhop.methods import Method

__all__ = ["StanhopConfig"]


class StanhopConfig(PretrainedConfig):
    """Configuration of STanHop-Net; the defaults are the paper's ETTh1 model, 168 hours in, 24 out.

    Args:
        num_series: D, how many series a window has.
        in_len: how many time steps are given.
        out_len: how many time steps are forecast.
        seg_len: time steps in one segment; other lengths are padded to a multiple of it.
        win_size: how many adjacent segments each encoder block after the first merges; 1: no merging.
        factor: how many learned patterns pool the series.
        d_model, d_ff, num_heads: the width, the width inside a block's MLPs, the Hopfield layers' heads.
        e_layers: the number of encoder blocks; the decoder has one more layer.
        dropout: on association weights and on what is added to the residual stream.
        method: any method, as a string: ``"outeffhop"``, ``"gsh"``, ``"clipped(gamma=-0.1, zeta=1.1)"``.
    """

    model_type: ClassVar[str] = "stanhop"
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "e_layers",
    }

    num_series: int = 7
    in_len: int = 168
    out_len: int = 24
    seg_len: int = 6
    win_size: int = 1
    factor: int = 10
    d_model: int = 256
    d_ff: int = 512
    num_heads: int = 4
    e_layers: int = 11
    dropout: float = 0.0
    method: str = "outeffhop"

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.check()

    def check(self) -> None:
        """Checks the sizes, and writes the method in its canonical form.

        The model calls it again, since loading may change fields of an existing config.
        """
        self.method = str(Method.parse(self.method))
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model={self.d_model} is not divisible by num_heads={self.num_heads}: change one")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout}: must be a probability in [0, 1)")
        segments = self.encoder_segments
        if self.win_size > 1 and 1 in segments[:-1]:
            alone = segments.index(1)
            raise ValueError(
                f"e_layers={self.e_layers} with win_size={self.win_size} leaves nothing to merge: in_len={self.in_len} "
                f"in segments of seg_len={self.seg_len} gives {segments[0]}, and encoder block {alone} gets only one; "
                f"use at most e_layers={alone + 1}, or a smaller win_size or seg_len"
            )

    @property
    def in_segments(self) -> int:
        """Segments of the padded input."""
        return -(-self.in_len // self.seg_len)

    @property
    def out_segments(self) -> int:
        """Segments of the forecast, before it is cut to out_len."""
        return -(-self.out_len // self.seg_len)

    @property
    def encoder_segments(self) -> list[int]:
        """How many segments each encoder block returns."""
        counts = [self.in_segments]
        for _ in range(self.e_layers - 1):
            counts.append(-(-counts[-1] // self.win_size))
        return counts


_AT_LEAST_ONE = (
    "num_series",
    "in_len",
    "out_len",
    "seg_len",
    "win_size",
    "factor",
    "d_model",
    "d_ff",
    "num_heads",
    "e_layers",
)
