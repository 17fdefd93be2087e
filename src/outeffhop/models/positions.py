"""How many tokens a model can take."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

__all__ = ["positions_of"]


def positions_of(model: PreTrainedModel) -> int | None:
    """The largest number of tokens of a text, None if the config names no limit.

    RoBERTa and models built like it begin to count positions after that of padding: 514 positions hold 512 tokens.
    """
    config = model.config.get_text_config()
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    counted = [
        table.num_embeddings - table.padding_idx - 1
        for name, table in model.named_modules()
        if name.endswith("position_embeddings") and isinstance(table, nn.Embedding) and table.padding_idx is not None
    ]
    return min([longest, *counted])
