"""STanHop-Net for forecasting, as a transformers model."""

from __future__ import annotations

import math
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
from outeffhop.nn import Gate, OutEffHopPooling
from outeffhop.nn.association import Association
from outeffhop.nn.qk_norm import HeadRMSNorm

__all__ = ["StanhopForecast", "StanhopPreTrainedModel", "StanhopForForecasting"]


@dataclass
class StanhopForecast(ModelOutput):
    """What a forecast gives.

    Attributes:
        loss: the mean squared error, where future values were given.
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
            # on the left and with the first value: the recent past stays whole, and no level is invented
            x = torch.cat([x[:, :, :1].expand(-1, -1, missing), x], 2)
        segments = x.unflatten(2, (-1, self.seg_len))  # [B, D, N, seg_len]
        return self.norm(self.linear(segments) + self.positions)


class StanhopPreTrainedModel(PreTrainedModel):
    """Initialisation and names that transformers asks for."""

    config_class = StanhopConfig
    base_model_prefix = "stanhop"
    main_input_name = "past_values"
    _no_split_modules = ["EncoderBlock", "DecoderLayer"]  # noqa: RUF012, the base class's own form

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False  # its layers have a method of their own; ``convert`` changes it

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Every parameter and buffer, since loading a checkpoint that lacks some starts from empty memory.

        Each is set at the module that holds it: transformers passes over modules that hold none themselves.
        The functions of ``init``, and those of torch while transformers calls this, leave alone what was loaded.
        """
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            module.reset_parameters()  # torch's own first values, which the paper's models have
        elif isinstance(module, Association):
            _init_association(module, self.config.d_model // self.config.num_heads)
        elif isinstance(module, Gate):
            _init_gate(module)
        elif isinstance(module, HeadRMSNorm):
            if module.weight is not None:
                init.ones_(module.weight)
        elif isinstance(module, OutEffHopPooling):
            init.normal_(module.queries, std=0.02)
        elif isinstance(module, (SegmentEmbedding, StanhopForForecasting)):
            init.normal_(module.positions)


class StanhopForForecasting(StanhopPreTrainedModel):
    """STanHop-Net: an encoder over the past's segments, a decoder whose layers' forecasts are summed.

    Decoder layer i retrieves from the encoder's output i (0 is the embedding), so the forecast is made of
    every scale. Its input is one learned vector per (series, segment to come).

    At the paper's size (the config's defaults) the model has 35,185,992 parameters, 81 more with a learned α
    and 21,060 more with gates. See ``tests/models/test_stanhop.py`` for the sum.
    """

    def __init__(self, config: StanhopConfig) -> None:
        config.check()
        if implementation(config) in METHODS:
            raise ValueError(
                f"attn_implementation={implementation(config)!r}: STanHop-Net has its method in its config; give "
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
            future_values: [B, out_len, D], what came; gives the loss.
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


def _init_association(module: Association, head_dim: int) -> None:
    init.constant_(module.log_beta, -0.5 * math.log(head_dim))
    start = module.method.normalizer.start if module.method.normalizer.learns else 0.0
    if module.sink is not None:
        init.constant_(module.sink, start)
    if module.raw_alpha is not None:
        init.constant_(module.raw_alpha, math.log(math.expm1(start - 1.0)))


def _init_gate(module: Gate) -> None:
    init.zeros_(module.bias)
    if module.weight is not None:
        init.zeros_(module.weight)  # with the constant offset, this makes the first opening exact
    if module.spec.gate != "constant" and module.spec.predictor == "mlp":
        bound = math.sqrt(6.0 / module.hidden_weight.shape[-1])
        init.uniform_(module.hidden_weight, -bound, bound)
        init.zeros_(module.hidden_bias)


def _check_shape(name: str, values: Tensor, length: int, series: int) -> None:
    if values.dim() != 3 or values.shape[1] != length or values.shape[2] != series:
        raise ValueError(f"{name} has shape {tuple(values.shape)}: (batch, {length}, {series}) is needed")
