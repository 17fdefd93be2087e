"""STanHop-Net for forecasting, as a transformers model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils.generic import ModelOutput

from outeffhop.methods import METHODS
from outeffhop.models.hf_private import implementation
from outeffhop.models.stanhop.blocks import DecoderLayer, EncoderBlock
from outeffhop.models.stanhop.configuration import StanhopConfig
from outeffhop.nn import OutEffHopPooling
from outeffhop.nn.association import Association
from outeffhop.state import Gate, MethodState
from outeffhop.state.qk_norm import HeadRMSNorm

__all__ = ["StanhopForecast", "StanhopPreTrainedModel", "StanhopForForecasting"]


@dataclass
class StanhopForecast(ModelOutput):
    """A forecast.

    Attributes:
        loss: the mean squared error, if future values were given.
        prediction: [B, out_len, D].
    """

    loss: Tensor | None = None
    prediction: Tensor | None = None


class SegmentEmbedding(nn.Module):
    """Each series' segments as vectors: Linear(seg_len → d) + a learned position per (series, segment), LayerNorm."""

    def __init__(self, config: StanhopConfig) -> None:
        super().__init__()
        self.seg_len = config.seg_len
        self.linear = nn.Linear(config.seg_len, config.d_model)
        self.positions = nn.Parameter(torch.empty(config.num_series, config.in_segments, config.d_model))
        self.norm = nn.LayerNorm(config.d_model)

    def forward(self, past_values: Tensor) -> Tensor:
        """[B, in_len, D] → [B, D, N, d]."""
        x = past_values.transpose(1, 2)  # [B, D, in_len]
        missing = -x.shape[2] % self.seg_len
        if missing:
            # on the left and with the first value: the recent past stays unchanged, and no new level appears
            x = torch.cat([x[:, :, :1].expand(-1, -1, missing), x], 2)
        segments = x.unflatten(2, (-1, self.seg_len))  # [B, D, N, seg_len]
        return self.norm(self.linear(segments) + self.positions)


class StanhopPreTrainedModel(PreTrainedModel):
    """Initialization, and the names that transformers needs."""

    config_class = StanhopConfig
    base_model_prefix = "stanhop"
    main_input_name = "past_values"
    _no_split_modules = ["EncoderBlock", "DecoderLayer"]  # noqa: RUF012, as in the base class

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False  # its layers have their own method, which ``convert`` changes

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initializes every parameter and buffer, since those missing from a checkpoint start as uninitialized memory.

        Each is set at the module that holds it: transformers skips modules that hold none themselves.
        The functions of ``init``, and those of torch while transformers calls this, do not change what was loaded.
        """
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()  # torch's defaults, as in the paper's models
        elif isinstance(module, (Association, MethodState, Gate, HeadRMSNorm)):
            module.reset_parameters()
        elif isinstance(module, OutEffHopPooling):
            init.normal_(module.queries, std=0.02)
        elif isinstance(module, (SegmentEmbedding, StanhopForForecasting)):
            init.normal_(module.positions)


class StanhopForForecasting(StanhopPreTrainedModel):
    """STanHop-Net: an encoder over the past's segments, a decoder whose layers' forecasts are summed.

    Decoder layer i retrieves from the encoder's output i (0 is the embedding), so the forecast uses
    every scale. Its input is one learned vector per (series, future segment).

    At the paper's size (the config's defaults) the model has 35,185,992 parameters, 81 more with a learned α
    and 21,060 more with gates; ``tests/models/test_stanhop.py`` adds them up.
    """

    def __init__(self, config: StanhopConfig) -> None:
        config.check()
        if implementation(config) in METHODS:
            raise ValueError(
                f"attn_implementation={implementation(config)!r}: STanHop-Net has its method in its config: give "
                f"method={implementation(config)!r} instead"
            )
        super().__init__(config)
        self.embedding = SegmentEmbedding(config)
        self.encoder = nn.ModuleList(EncoderBlock(config, config.win_size if i else 1) for i in range(config.e_layers))
        self.positions = nn.Parameter(torch.empty(config.num_series, config.out_segments, config.d_model))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.e_layers + 1))
        self.post_init()

    def forward(self, past_values: Tensor, future_values: Tensor | None = None) -> StanhopForecast:
        """Forecasts the steps that follow a window.

        Args:
            past_values: [B, in_len, D].
            future_values: [B, out_len, D], the true values, for the loss.
        """
        config = self.config
        _check_shape("past_values", past_values, config.in_len, config.num_series)
        x = self.embedding(past_values.to(self.positions.dtype))  # [B, D, N, d]
        encoded = [x]
        for block in self.encoder:
            x = block(x)
            encoded.append(x)
        y = self.positions.expand(x.shape[0], -1, -1, -1)  # [B, D, M, d]
        forecasts = []
        for layer, memory in zip(self.decoder, encoded, strict=True):
            y, forecast = layer(y, memory)
            forecasts.append(forecast)
        segments = torch.stack(forecasts).sum(0)  # [B, D, M, seg_len]
        prediction = segments.flatten(2)[:, :, : config.out_len].transpose(1, 2)  # [B, out_len, D]
        loss = None
        if future_values is not None:
            _check_shape("future_values", future_values, config.out_len, config.num_series)
            loss = nn.functional.mse_loss(prediction, future_values.to(prediction.dtype))
        return StanhopForecast(loss=loss, prediction=prediction)


def _check_shape(name: str, values: Tensor, length: int, series: int) -> None:
    if values.dim() != 3 or values.shape[1] != length or values.shape[2] != series:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: expected (batch, {length}, {series})")
