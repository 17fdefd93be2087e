"""Makes the methods known to transformers: as attention implementations, and in what it saves and loads."""

from __future__ import annotations

from functools import partial

from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from outeffhop.methods import METHODS
from outeffhop.models.hf_private import wrap_saving_and_loading
from outeffhop.models.interface import attention_function
from outeffhop.models.persistence import check_loaded, describe, restore
from outeffhop.models.recording import RECORDER, record
from outeffhop.models.window_mask import window_mask

__all__ = ["register"]


def register() -> None:
    """Registers every method by its name; call it again after adding one."""
    for name in METHODS:
        AttentionInterface.register(name, partial(attention_function, name))
        # Without a mask function the mask would always be None, and queries would attend to padding.
        AttentionMaskInterface.register(name, window_mask)
    AttentionInterface.register(RECORDER, record)
    wrap_saving_and_loading(describe, restore, check_loaded)
