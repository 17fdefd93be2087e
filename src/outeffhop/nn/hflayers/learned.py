"""HopfieldPooling and HopfieldLayer: the Hopfield of hflayers with patterns that are learned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.nn.hflayers.hopfield import Hopfield

__all__ = ["HopfieldLayer", "HopfieldPooling"]


class _Around(nn.Module):
    """A Hopfield, and the learned patterns that take the place of some of its inputs."""

    hopfield: Hopfield

    @property
    def scaling(self) -> Tensor:
        """β, a scalar or [H]."""
        return self.hopfield.scaling

    def _patterns(self, quantity: int, size: int | None, trainable: bool) -> nn.Parameter:
        if quantity < 1:
            raise ValueError(f"quantity={quantity}: must be at least 1")
        if size is None:
            raise ValueError("input_size=None: the learned patterns need a size")
        shape = (1, quantity, size) if self.hopfield.batch_first else (quantity, 1, size)
        at = self.hopfield.core.association.log_beta
        return nn.Parameter(torch.empty(shape, device=at.device, dtype=at.dtype), requires_grad=trainable)

    def _three(self, input: Any) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def get_association_matrix(
        self,
        input: Any,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """As that of Hopfield."""
        return self.hopfield.get_association_matrix(self._three(input), stored_pattern_padding_mask, association_mask)

    def get_projected_pattern_matrix(
        self,
        input: Any,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """As that of Hopfield."""
        return self.hopfield.get_projected_pattern_matrix(self._three(input))


class HopfieldPooling(_Around):
    """``quantity`` learned state patterns retrieve from the input, which pools it.

    Args:
        input_size: as for Hopfield, and so are ``hidden_size``, ``output_size``, ``pattern_size``, ``num_heads``,
            ``scaling``, ``update_steps_max``, ``update_steps_eps`` and ``options``, ``method`` among them.
        quantity: how many state patterns.
        trainable: they are learned; else they stay as they were drawn.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        *,
        quantity: int = 1,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = (input_size, hidden_size, output_size, pattern_size)
        self.hopfield = Hopfield(*sizes, num_heads, scaling, update_steps_max, update_steps_eps, **options)
        self.quantity = quantity
        self.pooling_weights = self._patterns(quantity, self.hopfield.sizes[0], trainable)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.pooling_weights, std=0.02)

    def forward(
        self,
        input: Tensor | tuple[Tensor, Tensor],
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """stored [B, S, size], or (stored, projection) → [B, quantity · output_size].

        With batch_first=False it is [quantity, B · output_size], as in hflayers. The masks and ``need_weights`` are
        those of Hopfield.
        """
        out = self.hopfield(self._three(input), stored_pattern_padding_mask, association_mask, need_weights)
        return (out[0].flatten(1), out[1]) if need_weights else out.flatten(1)

    def _three(self, input: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        two = (input, input) if isinstance(input, Tensor) else input
        if not isinstance(two, tuple | list) or len(two) != 2:
            what = f"{len(input)} things" if isinstance(input, tuple | list) else type(input).__name__
            raise TypeError(f"input is {what}: expected a tensor, or (stored, projection), two tensors")
        return two[0], self.pooling_weights, two[1]


class HopfieldLayer(_Around):
    """The input retrieves from ``quantity`` learned stored patterns.

    Args:
        input_size: as for Hopfield, and so are ``hidden_size``, ``output_size``, ``pattern_size``, ``num_heads``,
            ``scaling``, ``update_steps_max``, ``update_steps_eps`` and ``options``, ``method`` among them.
        lookup_weights_as_separated: learn pattern projections of their own; else they are the stored patterns.
        lookup_targets_as_trainable: whether those are learned.
        quantity: how many stored patterns.
        trainable: the stored patterns are learned; else they stay as they were drawn.
    """

    target_weights: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        lookup_weights_as_separated: bool = False,
        lookup_targets_as_trainable: bool = True,
        *,
        quantity: int = 1,
        trainable: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = (input_size, hidden_size, output_size, pattern_size)
        self.hopfield = Hopfield(*sizes, num_heads, scaling, update_steps_max, update_steps_eps, **options)
        self.quantity = quantity
        _, stored, projection = self.hopfield.sizes
        self.lookup_weights = self._patterns(quantity, stored, trainable)
        self.target_weights = None
        if lookup_weights_as_separated:
            self.target_weights = self._patterns(quantity, projection, lookup_targets_as_trainable)
        elif stored != projection:
            raise ValueError(
                f"the stored patterns have size {stored} and their projection {projection}: give "
                "lookup_weights_as_separated=True, or equal sizes"
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.lookup_weights, std=0.02)
        if self.target_weights is not None:
            nn.init.normal_(self.target_weights, std=0.02)

    def forward(
        self,
        input: Tensor,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """State patterns [B, L, input_size] → [B, L, output_size]; the rest as for Hopfield."""
        return self.hopfield(self._three(input), stored_pattern_padding_mask, association_mask, need_weights)

    def _three(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.lookup_weights, input, self.lookup_weights if self.target_weights is None else self.target_weights
