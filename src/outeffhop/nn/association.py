"""The Hopfield update inside a layer: queries, keys and values in heads, β, one or several steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.ops.torch_state import is_plain, is_transformed
from outeffhop.state import MethodState, attend

__all__ = ["Association"]


class Association(nn.Module):
    """q ← w(β q kᵀ) k in every update except the last, which gives w(β q kᵀ) v.

    With QK-norm, queries and patterns are normalized as they come in; the updates run among normalized patterns.
    β is a parameter if it is learned, else a buffer; either way it is saved and moved with the layer.

    Args:
        num_heads: H.
        beta: the initial value of β; a tensor [H] gives each head its own.
        learn_beta: β is trained, as its logarithm, so that it stays positive.
        beta_per_head: one β for each head.
        steps: how many updates; None repeats them until every query is at rest.
        tol: a query is at rest once an update moves it by at most tol·max(1, ‖q‖); a tol below the
            dtype's resolution is raised to that.
        max_steps: the limit with steps=None.
        dropout: on the weights of the last update, while training.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        beta: float | Tensor = 1.0,
        learn_beta: bool = False,
        beta_per_head: bool = False,
        steps: int | None = 1,
        tol: float = 1e-4,
        max_steps: int = 100,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        betas = beta.detach().tolist() if isinstance(beta, Tensor) else [beta for _ in range(num_heads)]
        if isinstance(beta, Tensor) and beta.shape != (num_heads,):
            raise ValueError(
                f"beta has shape {tuple(beta.shape)}: expected a number or ({num_heads},), one for each head"
            )
        if not all(0.0 < b < math.inf for b in betas):
            raise ValueError(f"beta={beta}: the inverse temperature must be finite and greater than 0")
        if steps is not None and steps < 1:
            raise ValueError(f"steps={steps}: must be at least 1, or None to update until every query is at rest")
        if max_steps < 1:
            raise ValueError(f"max_steps={max_steps}: must be at least 1")
        if not tol > 0.0:
            raise ValueError(f"tol={tol}: must be greater than 0")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout={dropout}: must be a probability in [0, 1)")
        self.num_heads = num_heads
        self.steps, self.tol, self.max_steps, self.dropout = steps, tol, max_steps, dropout
        self._read: tuple[Tensor | None, int, int, float] = None, 0, 0, 0.0  # the log β that was read, and β
        self.first_betas = betas if beta_per_head or isinstance(beta, Tensor) else betas[0]
        log_beta = torch.empty((num_heads,) if isinstance(self.first_betas, list) else (), device=device, dtype=dtype)
        if learn_beta:
            self.log_beta = nn.Parameter(log_beta)
        else:
            self.register_buffer("log_beta", log_beta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.log_beta.copy_(torch.tensor(self.first_betas, dtype=torch.float64).log())

    @property
    def beta(self) -> Tensor:
        """β, a scalar or [H]."""
        return self.log_beta.exp()

    def forward(
        self,
        state: MethodState,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, H, L, d], [B, H, S, d], [B, H, S, dv] → [B, H, L, dv] and, on request, the last weights [B, H, L, S].

        Args:
            state: the method, which turns scores into weights; its gate is left to the layer.
            mask: as for ``attention``, bool (True: attend) or additive.
        """
        if state.qk_norm is not None:
            query, key = state.qk_norm(query, key)
        update = partial(self._update, state, key=key, mask=mask, is_causal=is_causal)
        if self.steps is None:
            query = self._to_rest(query, key, update)
        else:
            for _ in range(self.steps - 1):
                query, _ = update(query, value=key)
        dropout = self.dropout if self.training else 0.0
        return update(query, value=value, dropout_p=dropout, need_weights=need_weights)

    def _update(self, state: MethodState, query: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        scale = self._number()
        if scale is None:
            beta = self.beta.to(query.dtype)
            query, scale = query * (beta[:, None, None] if beta.dim() else beta), 1.0
        return attend(state.method.normalizer, query, scale=scale, learned=state.learned, **options)

    def _number(self) -> float | None:
        """β as a number, which kernels take at no cost; None if it is learned, one for each head, or traced.

        From a GPU it is read once, since each call would wait for it; what is written through ``.data`` is not seen.
        """
        log_beta = self.log_beta
        if log_beta.dim() or log_beta.requires_grad or log_beta.is_meta:
            return None
        if not is_plain(log_beta) or is_transformed():
            return None
        if log_beta.device.type == "cpu":
            return float(self.beta)
        if log_beta.is_inference():
            return None  # what is made in inference mode has no version that says whether it has changed
        version, at = log_beta._version, log_beta.data_ptr()
        known, known_version, known_at, number = self._read
        if known is not log_beta or known_version != version or known_at != at:
            if log_beta.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            number = float(self.beta)
            self._read = log_beta, version, at, number
        return number

    def _to_rest(self, query: Tensor, key: Tensor, update: Callable[..., tuple[Tensor, Tensor | None]]) -> Tensor:
        """All updates except the last. A query at rest no longer changes while the others do."""
        tol = max(self.tol, torch.finfo(query.dtype).eps)  # two roundings of one number may differ by that
        resting = torch.zeros(query.shape[:-1], dtype=torch.bool, device=query.device)
        for _ in range(self.max_steps - 1):
            new, _ = update(query, value=key)
            moved = (new - query).detach().float().norm(dim=-1)
            size = query.detach().float().norm(dim=-1)
            now = moved <= tol * size.clamp(min=1.0)
            query = torch.where((resting | now).unsqueeze(-1), query, new)
            resting = resting | now
            if resting.all():
                break
        return query

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, steps={self.steps}, dropout={self.dropout}"
