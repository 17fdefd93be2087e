"""The parts of STanHop-Net: Hopfield layers over time and over series, segment merging, a decoder layer.

Every tensor between the parts is [B, D, N, d]: batch, series, segments, features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outeffhop.models.stanhop.configuration import StanhopConfig
from outeffhop.nn import OutEffHop, OutEffHopPooling

__all__ = ["SthmBlock", "SegmentMerging", "EncoderBlock", "DecoderLayer"]


class SthmBlock(nn.Module):
    """The sparse tandem Hopfield block: each series over its segments, then each segment over the series.

    Over series, ``factor`` learned patterns first pool the D series into a memory, from which every series
    then retrieves. This takes D · factor associations instead of D².
    """

    def __init__(self, config: StanhopConfig) -> None:
        super().__init__()
        d = config.d_model
        self.time = _hopfield(config)
        self.norm_time = nn.LayerNorm(d)
        self.time_mlp = _mlp(d, config.d_ff)
        self.norm_time_mlp = nn.LayerNorm(d)
        self.pooling = OutEffHopPooling(
            d,
            config.num_heads,
            quantity=config.factor,
            project_query=True,
            connected=True,
            batch_first=True,
            dropout=config.dropout,
            method=config.method,
        )
        self.series = _hopfield(config)
        self.norm_series = nn.LayerNorm(d)
        self.series_mlp = _mlp(d, config.d_ff)
        self.norm_series_mlp = nn.LayerNorm(d)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, N, d] → the same."""
        batch, series, segments, _ = x.shape
        h = x.flatten(0, 1)  # [B·D, N, d]
        h = self.norm_time(h + self.dropout(self.time(h)[0]))
        h = self.norm_time_mlp(h + self.dropout(self.time_mlp(h)))
        h = h.unflatten(0, (batch, series)).transpose(1, 2).flatten(0, 1)  # [B·N, D, d]
        memory = self.pooling(h)  # [B·N, factor, d]
        h = self.norm_series(h + self.dropout(self.series(h, memory)[0]))
        h = self.norm_series_mlp(h + self.dropout(self.series_mlp(h)))
        return h.unflatten(0, (batch, segments)).transpose(1, 2)


class SegmentMerging(nn.Module):
    """Merges ``win_size`` adjacent segments into one; the last segment is repeated to fill up the last group."""

    def __init__(self, d_model: int, win_size: int) -> None:
        super().__init__()
        self.win_size = win_size
        self.norm = nn.LayerNorm(win_size * d_model)
        self.linear = nn.Linear(win_size * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, N, d] → [B, D, ⌈N / win_size⌉, d]."""
        missing = -x.shape[2] % self.win_size
        if missing:
            # not zeros, which the LayerNorm below would never see in data
            x = torch.cat([x, x[:, :, -1:].expand(-1, -1, missing, -1)], 2)
        return self.linear(self.norm(x.unflatten(2, (-1, self.win_size)).flatten(3)))


class EncoderBlock(nn.Module):
    """Segment merging if ``win_size`` > 1, then an STHM block."""

    def __init__(self, config: StanhopConfig, win_size: int) -> None:
        super().__init__()
        self.merging = SegmentMerging(config.d_model, win_size) if win_size > 1 else None
        self.sthm = SthmBlock(config)

    def forward(self, x: Tensor) -> Tensor:
        """[B, D, N, d] → [B, D, ⌈N / win_size⌉, d]."""
        return self.sthm(x if self.merging is None else self.merging(x))


class DecoderLayer(nn.Module):
    """An STHM block on the forecast's segments, retrieval from one encoder output, and this layer's forecast."""

    def __init__(self, config: StanhopConfig) -> None:
        super().__init__()
        d = config.d_model
        self.sthm = SthmBlock(config)
        self.cross = _hopfield(config)
        self.norm_cross = nn.LayerNorm(d)
        self.mlp = _mlp(d, d)  # hidden width d: with d_ff the model would have 36.8M parameters, not the paper's 35.1M
        self.norm_mlp = nn.LayerNorm(d)
        self.head = nn.Linear(d, config.seg_len)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """[B, D, M, d] and the encoder's [B, D, N, d] → [B, D, M, d] and a forecast [B, D, M, seg_len]."""
        batch, series = x.shape[:2]
        h = self.sthm(x).flatten(0, 1)  # [B·D, M, d]
        h = self.norm_cross(h + self.dropout(self.cross(h, encoded.flatten(0, 1))[0]))
        h = self.norm_mlp(h + self.dropout(self.mlp(h)))
        h = h.unflatten(0, (batch, series))
        return h, self.head(h)


def _hopfield(config: StanhopConfig) -> OutEffHop:
    # connected: the paper's V = K W_V
    return OutEffHop(
        config.d_model,
        config.num_heads,
        connected=True,
        batch_first=True,
        dropout=config.dropout,
        method=config.method,
    )


def _mlp(size: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))
