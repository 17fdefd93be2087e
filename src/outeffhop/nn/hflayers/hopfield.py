"""Hopfield: OutEffHop behind hflayers' arguments, calls and state dicts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from outeffhop.methods import Method
from outeffhop.nn.hflayers.weights import renamed
from outeffhop.nn.hopfield import OutEffHop

__all__ = ["Hopfield"]

StoredAndState = Tensor | tuple[Tensor, Tensor, Tensor] | list[Tensor]


class Hopfield(nn.Module):
    """State patterns retrieve from stored patterns, by hflayers' names; ``core`` is the OutEffHop that does it.

    With the default method the outputs are those of hflayers; ``method="outeffhop"`` adds the no-op pattern.
    ``load_state_dict`` takes hflayers' state dicts as well as its own. On purpose different: a state whose stored
    patterns are all masked gives 0, not NaN; one β per head scales that head; static patterns are the same in every
    head of one sample; ``update_steps_max=N`` takes exactly N + 1 updates, and None stops each state by itself.

    Args:
        input_size: the state patterns' size. May be left out if all three are static, without normalization.
        hidden_size: the association space's size per head; by default input_size / num_heads.
        output_size: the output's size; by default input_size.
        pattern_size: the size per head of what is retrieved; by default hidden_size.
        num_heads: H.
        scaling: β, by default 1/√hidden_size, or 1 where all is static; a tensor [H] is one for each head, and one
            that requires a gradient is learned.
        update_steps_max: N, for N + 1 updates; None repeats them until every state is at rest.
        update_steps_eps: with None, a state is at rest once an update moves it by at most this share of its length.
        normalize_stored_pattern, normalize_state_pattern, normalize_pattern_projection: LayerNorm on an input,
            each with its ``_affine`` and ``_eps``.
        normalize_hopfield_space, normalize_hopfield_space_affine, normalize_hopfield_space_eps: not served, see the
            error.
        stored_pattern_as_static, state_pattern_as_static, pattern_projection_as_static: the input is not projected;
            its size is then that of one head.
        pattern_projection_as_connected: the pattern projection passes through the stored patterns' projection first.
        stored_pattern_size, pattern_projection_size: by default input_size.
        batch_first: [B, L, size] instead of [L, B, size].
        association_activation: a function of torch by its name, such as "relu", on the output.
        dropout: on the association weights.
        input_bias: gives the projections biases.
        concat_bias_pattern: not served, see the error.
        add_zero_association: adds a stored pattern of zeros.
        disable_out_projection: leaves the output's projection out.
        method: any method.
    """

    def __init__(
        self,
        input_size: int | None = None,
        hidden_size: int | None = None,
        output_size: int | None = None,
        pattern_size: int | None = None,
        num_heads: int = 1,
        scaling: float | Tensor | None = None,
        update_steps_max: int | None = 0,
        update_steps_eps: float = 1e-4,
        normalize_stored_pattern: bool = True,
        normalize_stored_pattern_affine: bool = True,
        normalize_stored_pattern_eps: float = 1e-5,
        normalize_state_pattern: bool = True,
        normalize_state_pattern_affine: bool = True,
        normalize_state_pattern_eps: float = 1e-5,
        normalize_pattern_projection: bool = True,
        normalize_pattern_projection_affine: bool = True,
        normalize_pattern_projection_eps: float = 1e-5,
        normalize_hopfield_space: bool = False,
        normalize_hopfield_space_affine: bool = False,
        normalize_hopfield_space_eps: float = 1e-5,
        stored_pattern_as_static: bool = False,
        state_pattern_as_static: bool = False,
        pattern_projection_as_static: bool = False,
        pattern_projection_as_connected: bool = False,
        stored_pattern_size: int | None = None,
        pattern_projection_size: int | None = None,
        batch_first: bool = True,
        association_activation: str | None = None,
        dropout: float = 0.0,
        input_bias: bool = True,
        concat_bias_pattern: bool = False,
        add_zero_association: bool = False,
        disable_out_projection: bool = False,
        *,
        method: str | Method = "vanilla",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if normalize_hopfield_space:
            raise ValueError(
                "normalize_hopfield_space=True has no counterpart; method='outeffhop(qk_norm=rms)' (or "
                "'vanilla(qk_norm=rms)') normalizes states and stored patterns in each head, with learned scales"
            )
        if concat_bias_pattern:
            raise ValueError(
                "concat_bias_pattern=True changes no output of hflayers, which never uses those two parameters: leave "
                "it out, or use outeffhop.OutEffHop(add_bias_kv=True), which does add a learned pattern"
            )
        _check_numbers(num_heads, scaling, update_steps_max, update_steps_eps)
        self.activation = _activation(association_activation)
        self.batch_first, self.update_steps_max, self.update_steps_eps = batch_first, update_steps_max, update_steps_eps
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        options: dict[str, Any] = dict(
            dropout=dropout,
            add_zero_attn=add_zero_association,
            batch_first=batch_first,
            method=method,
            learn_beta=isinstance(scaling, Tensor) and scaling.requires_grad,
            steps=None if update_steps_max is None else update_steps_max + 1,
            tol=update_steps_eps,
            **place,
        )
        static = stored_pattern_as_static and state_pattern_as_static and pattern_projection_as_static
        stored = input_size if stored_pattern_size is None else stored_pattern_size
        projection = input_size if pattern_projection_size is None else pattern_projection_size
        # whether the pattern projection passes through the stored patterns' projection
        self.connected = pattern_projection_as_connected and not stored_pattern_as_static
        self.core: OutEffHop
        if static and disable_out_projection and not pattern_projection_as_connected:
            self.core = _Unprojected(num_heads, beta=1.0 if scaling is None else scaling, **options)
            sizes = (input_size, stored, projection)
        else:
            if input_size is None or stored is None or projection is None:
                raise ValueError(
                    "input_size=None: give the state patterns' size; it can be left out only if all three patterns "
                    "are static, disable_out_projection=True and pattern_projection_as_connected=False"
                )
            if hidden_size is None and input_size % num_heads:
                raise ValueError(
                    f"input_size={input_size} is not divisible by num_heads={num_heads}: change one, or give "
                    "hidden_size, the size of one head"
                )
            if self.connected and projection != stored:
                raise ValueError(
                    f"pattern_projection_size={projection} differs from the stored patterns' {stored}: "
                    "pattern_projection_as_connected=True needs them to be equal"
                )
            hidden = input_size // num_heads if hidden_size is None else hidden_size
            pattern = hidden if pattern_size is None else pattern_size
            state = hidden if state_pattern_as_static else input_size
            stored = hidden if stored_pattern_as_static else stored
            projection = pattern if pattern_projection_as_static and not self.connected else projection
            self.core = OutEffHop(
                state,
                num_heads,
                bias=input_bias,
                kdim=stored,
                vdim=num_heads * hidden if self.connected else projection,
                beta=1.0 / math.sqrt(hidden) if scaling is None else scaling,
                project_query=not state_pattern_as_static,
                project_key=not stored_pattern_as_static,
                project_value=not pattern_projection_as_static,
                out_projection=not disable_out_projection,
                head_dim=hidden,
                value_head_dim=pattern,
                out_dim=input_size if output_size is None else output_size,
                **options,
            )
            sizes = (state, stored, projection)
        norms = {
            "state_pattern": (normalize_state_pattern, normalize_state_pattern_affine, normalize_state_pattern_eps),
            "stored_pattern": (normalize_stored_pattern, normalize_stored_pattern_affine, normalize_stored_pattern_eps),
            "pattern_projection": (
                normalize_pattern_projection,
                normalize_pattern_projection_affine,
                normalize_pattern_projection_eps,
            ),
        }
        self.core.norm_query, self.core.norm_key, self.norm_pattern_projection = (
            _norm(name, size, *how, place) for (name, how), size in zip(norms.items(), sizes, strict=True)
        )
        self.input_size, self.output_size = input_size, output_size
        self.sizes = sizes  # of the state patterns, the stored patterns and the pattern projection
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_take_theirs)

    @property
    def scaling(self) -> Tensor:
        """β, a scalar or [H]."""
        return self.core.association.beta

    def reset_parameters(self) -> None:
        """The projections' weights from N(0, 0.02²) and biases 0, as hflayers begins."""
        for projection in (self.core.q_proj, self.core.k_proj, self.core.v_proj, self.core.out_proj):
            if isinstance(projection, nn.Linear):
                nn.init.normal_(projection.weight, std=0.02)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        input: StoredAndState,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
        need_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(stored [B, S, size], state [B, L, size], projection [B, S, size]) → [B, L, output_size].

        Args:
            input: the three, or one tensor that is all of them.
            stored_pattern_padding_mask: [B, S], True (or −inf) where a stored pattern is ignored.
            association_mask: [L, S] or [B·H, L, S]; bool (True: ignore) or added to the scores.
            need_weights: also return the association matrix [B, H, L, S], which saves a second pass.
        """
        stored, state, projection = self._three(input)
        out, weights = self.core(
            state,
            stored,
            self._value(projection),
            key_padding_mask=stored_pattern_padding_mask,
            attn_mask=association_mask,
            need_weights=need_weights,
            average_attn_weights=False,
        )
        if self.activation is not None:
            out = getattr(torch, self.activation)(out)
        return out if weights is None else (out, weights)

    @torch.no_grad()
    def get_association_matrix(
        self,
        input: StoredAndState,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights of the last update, without dropout.  [B, H, L, S]"""
        association = self.core.association
        training = association.training
        association.eval()
        try:
            weights: Tensor = self(input, stored_pattern_padding_mask, association_mask, need_weights=True)[1]
        finally:
            association.train(training)
        return weights

    @torch.no_grad()
    def get_projected_pattern_matrix(
        self,
        input: StoredAndState,
        stored_pattern_padding_mask: Tensor | None = None,
        association_mask: Tensor | None = None,
    ) -> Tensor:
        """What the association weighs: the projected pattern projection of each head.  [B, H, S, pattern_size]

        The masks change nothing here; they are arguments so that both methods are called alike.
        """
        three = self._three(input)
        value = self.core.v_proj(self._value(three[2]))
        value = value if self.batch_first else value.transpose(0, 1)
        value = value.expand(max(t.shape[0 if self.batch_first else 1] for t in three), -1, -1)
        value = value.unflatten(-1, (self.core.num_heads, -1)).transpose(1, 2)
        return nn.functional.pad(value, (0, 0, 0, int(self.core.add_zero_attn)))

    def _value(self, projection: Tensor) -> Tensor:
        """What the core takes as value."""
        projection = self.norm_pattern_projection(projection)
        return self.core.k_proj(projection) if self.connected else projection

    def _three(self, given: StoredAndState) -> tuple[Tensor, Tensor, Tensor]:
        three = (given,) * 3 if isinstance(given, Tensor) else given
        if not isinstance(three, tuple | list) or len(three) != 3 or not all(isinstance(t, Tensor) for t in three):
            what = f"{len(given)} things" if isinstance(given, tuple | list) else type(given).__name__
            raise TypeError(f"input is {what}: expected a tensor, or (stored, state, projection), three tensors")
        stored, state, projection = three
        for name, t in (("stored pattern", stored), ("state pattern", state), ("pattern projection", projection)):
            if t.dim() != 3:
                layout = "[batch, length, size]" if self.batch_first else "[length, batch, size]"
                raise ValueError(f"the {name} has shape {tuple(t.shape)}: expected {layout}")
        return stored, state, projection


class _Unprojected(OutEffHop):
    """Without projections nothing has a size of its own: states and stored patterns only need the same one."""

    def __init__(self, num_heads: int, *, method: str | Method, **options: Any) -> None:
        if Method.parse(method).gate is not None:
            raise ValueError(
                f"method={str(method)!r} has a gate, which is learned from inputs of a known size: with static "
                "patterns alone use a method without one, such as 'vanilla' or 'outeffhop'"
            )
        without: dict[str, Any] = dict.fromkeys(
            ("project_query", "project_key", "project_value", "out_projection"), False
        )
        super().__init__(1, num_heads, head_dim=1, method=method, **without, **options)

    def _fits(self, t: Tensor, size: int) -> bool:
        return True

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super()._check_inputs(query, key, value)
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(
                f"state patterns have size {query.shape[-1]} and stored patterns {key.shape[-1]}: without projections "
                "the two must be equal"
            )


def _check_numbers(
    num_heads: int, scaling: float | Tensor | None, update_steps_max: object, update_steps_eps: object
) -> None:
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads}: must be at least 1")
    if isinstance(scaling, Tensor) and scaling.shape != (num_heads,):
        raise ValueError(
            f"scaling has shape {tuple(scaling.shape)}: expected a number, or ({num_heads},), one for each head"
        )
    betas = scaling.detach().tolist() if isinstance(scaling, Tensor) else [] if scaling is None else [scaling]
    if not all(0.0 < beta < math.inf for beta in betas):
        raise ValueError(f"scaling={scaling}: β must be finite and greater than 0")
    for name, value in (("update_steps_max", update_steps_max), ("update_steps_eps", update_steps_eps)):
        if isinstance(value, Tensor):
            raise TypeError(f"{name} is a tensor, one entry per head: give one number, which holds for all heads")
    if update_steps_max is not None and (not hasattr(update_steps_max, "__index__") or update_steps_max < 0):  # type: ignore[operator]
        raise ValueError(
            f"update_steps_max={update_steps_max!r}: expected 0 or more (0 is one update), or None to update until "
            "every state is at rest"
        )


def _activation(name: str | None) -> str | None:
    if name is not None and not callable(getattr(torch, name, None)):
        raise ValueError(
            f"association_activation={name!r} is no function of torch: give a name such as 'relu' or 'tanh'"
        )
    return name


def _norm(name: str, size: int | None, wanted: bool, affine: bool, eps: float, place: dict[str, Any]) -> nn.Module:
    if not wanted:
        return nn.Identity()
    if size is None:
        raise ValueError(f"normalize_{name}=True needs the size of the {name}: give input_size, or False")
    return nn.LayerNorm(size, eps=eps, elementwise_affine=affine, **place)


def _take_theirs(layer: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Renames the entries of an hflayers Hopfield in ``state``; what that does not have keeps its value."""
    if any(key.startswith(f"{prefix}core.") for key in state):
        return
    named: dict[str, Tensor] = {}
    for old, new in {"norm_state_pattern": "norm_query", "norm_stored_pattern": "norm_key"}.items():
        own = [key for key in state if key.startswith(f"{prefix}{old}.")]
        named |= {key.replace(f"{prefix}{old}", new): state.pop(key) for key in own}
    start = f"{prefix}association_core."
    entries = {key.removeprefix(start): state.pop(key) for key in list(state) if key.startswith(start)}
    core: OutEffHop = layer.core  # type: ignore[assignment]
    projected = [name for name in "qkv" if isinstance(getattr(core, f"{name}_proj"), nn.Linear)]
    named |= renamed(entries, projected)
    named |= {k: v for k, v in core.state_dict().items() if k.startswith(("association.", "state."))}
    state |= {f"{prefix}core.{key}": value for key, value in named.items()}
