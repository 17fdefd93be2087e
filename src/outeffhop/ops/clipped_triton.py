"""Attention with clipped softmax in Triton, clip((ζ − γ)·softmax_n(x) + γ, 0, 1)·v, in memory linear in the length.

Flash kernels rescale what they have summed when a larger score comes; a clipped weight cannot be rescaled. So each
direction goes over the keys twice: first for a number per query (forward the logsumexp, backward Δ = Σ p ∂L/∂p), then
with exact weights. Scores are computed anew each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of PyTorch come without it
    triton = None

__all__ = ["available", "backward", "empty_like", "forward"]


def available() -> bool:
    return triton is not None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    scale: float,
    sink: float,
    gamma: float,
    zeta: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """The output [B, H, Lq, Dv] and log(n + Σ exp(scores)) [B, H, Lq], +inf for a query without keys.

    Args:
        query: [B, H, Lq, D]; key and value may have fewer heads, a divisor of H.
        mask: bool (True: attend) or additive, expanded to [B, H, Lq, Lk].
        seed: one integer on the device, for dropout.
    """
    batch, heads, length, _ = query.shape
    out = empty_like(query, value)
    lse = torch.empty(batch, heads, length, dtype=torch.float32, device=query.device)
    options = _options(query, value)
    grid = (triton.cdiv(length, options["ROWS"]), batch * heads)
    _forward_kernel[grid](
        query, key, value, out, lse, *_masked(query, mask, seed),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3], *_mask_strides(mask),
        heads, key.shape[1], length, key.shape[2], scale, sink, gamma, zeta, dropout_p,
        **_kinds(mask, is_causal, dropout_p), **options,
    )  # fmt: skip
    return out, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    gamma: float,
    zeta: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    batch, heads, length, _ = query.shape
    groups, keys = key.shape[1:3]
    grads = tuple(empty_like(t, t) for t in (query, key, value))
    delta = torch.empty_like(lse)
    options = _options(query, value)
    kinds = _kinds(mask, is_causal, dropout_p)
    given = (grad, query, key, value, lse, delta, *_masked(query, mask, seed))
    strides = (s for t in (grad, query, key, value) for s in t.stride()[:3])
    shape = (*strides, *_mask_strides(mask), heads, groups, length, keys, scale, gamma, zeta, dropout_p)
    _query_kernel[(triton.cdiv(length, options["ROWS"]), batch * heads)](
        *given, grads[0], *grads[0].stride()[:3], *shape, **kinds, **options
    )
    _key_kernel[(triton.cdiv(keys, options["COLUMNS"]), batch * groups)](
        *given, grads[1], grads[2], *grads[1].stride()[:3], *grads[2].stride()[:3], *shape, **kinds, **options
    )
    return grads  # type: ignore[return-value]


def empty_like(rows: Tensor, sizes: Tensor) -> Tensor:
    """[B, H, L, D] with the rows of one and the D of the other, laid out as the projection after attention wants it."""
    batch, heads, length, _ = rows.shape
    return rows.new_empty(batch, length, heads, sizes.shape[-1]).transpose(1, 2)


def _masked(query: Tensor, mask: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """A kernel needs a pointer also where nothing is read."""
    return query if mask is None else mask, query if seed is None else seed


def _mask_strides(mask: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else mask.stride()


def _kinds(mask: Tensor | None, is_causal: bool, dropout_p: float) -> dict[str, Any]:
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    return {"MASK": kind, "CAUSAL": is_causal, "DROPOUT": dropout_p > 0}


def _options(query: Tensor, value: Tensor) -> dict[str, int]:
    """Sizes of the blocks: two operands of a product in registers, so fewer rows for wide heads and for float32."""
    size, value_size = query.shape[-1], value.shape[-1]
    width, value_width = (max(16, 1 << (s - 1).bit_length()) for s in (size, value_size))
    wide = max(width, value_width) * query.element_size()  # bytes
    rows = 64 if wide <= 256 else 32 if wide <= 512 else 16
    return {
        "SIZE": size,
        "VALUE_SIZE": value_size,
        "WIDTH": width,
        "VALUE_WIDTH": value_width,
        "ROWS": rows,
        "COLUMNS": rows,
        "num_warps": 4,
        "num_stages": 2,
    }


if triton is not None:

    @triton.jit
    def _tile(ptr, row, column, stride, length, SIZE: tl.constexpr):
        """[rows, columns] of a matrix whose columns lie side by side; 0 outside it."""
        inside = (row < length)[:, None] & (column < SIZE)[None, :]
        return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)

    @triton.jit
    def _scores(q, k, row, column, mask_ptr, mask_l, mask_s, length, keys, scale, MASK, CAUSAL):
        """q·kᵀ·scale + mask, −inf where a query does not see a key."""
        x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        inside = (row < length)[:, None] & (column < keys)[None, :]
        at = mask_ptr + row.to(tl.int64)[:, None] * mask_l + column.to(tl.int64)[None, :] * mask_s
        if MASK == 1:
            inside &= tl.load(at, mask=inside, other=0) != 0
        if MASK == 2:
            x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if CAUSAL:
            inside &= row[:, None] >= column[None, :]
        return tl.where(inside, x, float("-inf"))

    @triton.jit
    def _kept(seed, row, column, keys, dropout_p):
        """1/(1 − p) for a weight that dropout keeps, else 0; the same in every pass."""
        at = row[:, None] * keys + column[None, :]  # may wrap around in 32 bits, which repeats the pattern
        return tl.where(tl.rand(seed, at) >= dropout_p, 1.0 / (1.0 - dropout_p), 0.0)

    @triton.jit
    def _last_key(first_row, keys, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
        return tl.minimum(keys, first_row + ROWS) if CAUSAL else keys

    @triton.jit
    def _forward_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, seed_ptr,
        q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, out_b, out_h, out_l, mask_b, mask_h, mask_l, mask_s,
        heads, groups, length, keys, scale, sink, gamma, zeta, dropout_p,
        MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
        SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        sample = (tl.program_id(1) // heads).to(tl.int64)
        head = (tl.program_id(1) % heads).to(tl.int64)
        group = head // (heads // groups)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        d, dv = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
        q = _tile(q_ptr + sample * q_b + head * q_h, row, d, q_l, length, SIZE)
        k_ptr += sample * k_b + group * k_h
        v_ptr += sample * v_b + group * v_h
        mask_ptr += sample * mask_b + head * mask_h
        end = _last_key(tl.program_id(0) * ROWS, keys, ROWS, CAUSAL)

        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for first in range(0, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            k = _tile(k_ptr, column, d, k_l, keys, SIZE)
            x = _scores(q, k, row, column, mask_ptr, mask_l, mask_s, length, keys, scale, MASK, CAUSAL)
            new_top = tl.maximum(top, tl.max(x, 1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
            top = new_top
        # Without keys there is nothing to weigh, sink or not: +inf makes every exp(x − lse) a 0.
        absent = top == float("-inf")
        largest = tl.where(absent, 0.0, tl.maximum(top, sink))
        lse = largest + tl.log(total * tl.exp(top - largest) + tl.exp(sink - largest))
        lse = tl.where(absent, float("inf"), lse)
        tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * length + row, lse, mask=row < length)

        out = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        for first in range(0, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            k = _tile(k_ptr, column, d, k_l, keys, SIZE)
            x = _scores(q, k, row, column, mask_ptr, mask_l, mask_s, length, keys, scale, MASK, CAUSAL)
            weight = (zeta - gamma) * tl.exp(x - lse[:, None]) + gamma
            weight = tl.minimum(tl.maximum(weight, 0.0), 1.0)
            if DROPOUT:
                weight *= _kept(tl.load(seed_ptr) + tl.program_id(1), row, column, keys, dropout_p)
            v = _tile(v_ptr, column, dv, v_l, keys, VALUE_SIZE)
            out += tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        at = out_ptr + sample * out_b + head * out_h + row.to(tl.int64)[:, None] * out_l + dv[None, :]
        inside = (row < length)[:, None] & (dv < VALUE_SIZE)[None, :]
        tl.store(at, out.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _slopes(q, k, v, grad, lse, row, column, mask_ptr, mask_l, mask_s, seed, length, keys, scale, gamma, zeta,
                dropout_p, MASK, CAUSAL, DROPOUT):  # fmt: skip
        """p, the weights after dropout, and ∂L/∂p, each [rows, columns]."""
        x = _scores(q, k, row, column, mask_ptr, mask_l, mask_s, length, keys, scale, MASK, CAUSAL)
        p = tl.exp(x - lse[:, None])
        stretched = (zeta - gamma) * p + gamma
        weight = tl.minimum(tl.maximum(stretched, 0.0), 1.0)
        slope = tl.dot(grad, tl.trans(v), input_precision="ieee")
        if DROPOUT:
            kept = _kept(seed, row, column, keys, dropout_p)
            weight *= kept
            slope *= kept
        # as torch.clamp: a weight at the bound itself still has a gradient
        slope = tl.where((stretched >= 0.0) & (stretched <= 1.0), (zeta - gamma) * slope, 0.0)
        return p, weight, slope

    @triton.jit
    def _query_kernel(
        grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, mask_ptr, seed_ptr, dq_ptr,
        dq_b, dq_h, dq_l, g_b, g_h, g_l, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, mask_b, mask_h, mask_l, mask_s,
        heads, groups, length, keys, scale, gamma, zeta, dropout_p,
        MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
        SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        sample = (tl.program_id(1) // heads).to(tl.int64)
        head = (tl.program_id(1) % heads).to(tl.int64)
        group = head // (heads // groups)
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        d, dv = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
        q = _tile(q_ptr + sample * q_b + head * q_h, row, d, q_l, length, SIZE)
        grad = _tile(grad_ptr + sample * g_b + head * g_h, row, dv, g_l, length, VALUE_SIZE)
        k_ptr += sample * k_b + group * k_h
        v_ptr += sample * v_b + group * v_h
        mask_ptr += sample * mask_b + head * mask_h
        seed = tl.load(seed_ptr) + tl.program_id(1) if DROPOUT else 0
        per_row = tl.program_id(1).to(tl.int64) * length + row
        lse = tl.load(lse_ptr + per_row, mask=row < length, other=float("inf"))
        end = _last_key(tl.program_id(0) * ROWS, keys, ROWS, CAUSAL)

        delta = tl.zeros([ROWS], tl.float32)
        for first in range(0, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            k = _tile(k_ptr, column, d, k_l, keys, SIZE)
            v = _tile(v_ptr, column, dv, v_l, keys, VALUE_SIZE)
            p, _, slope = _slopes(
                q, k, v, grad, lse, row, column, mask_ptr, mask_l, mask_s, seed, length, keys, scale, gamma, zeta,
                dropout_p, MASK, CAUSAL, DROPOUT,
            )  # fmt: skip
            delta += tl.sum(p * slope, 1)
        tl.store(delta_ptr + per_row, delta, mask=row < length)

        dq = tl.zeros([ROWS, WIDTH], tl.float32)
        for first in range(0, end, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            k = _tile(k_ptr, column, d, k_l, keys, SIZE)
            v = _tile(v_ptr, column, dv, v_l, keys, VALUE_SIZE)
            p, _, slope = _slopes(
                q, k, v, grad, lse, row, column, mask_ptr, mask_l, mask_s, seed, length, keys, scale, gamma, zeta,
                dropout_p, MASK, CAUSAL, DROPOUT,
            )  # fmt: skip
            dq += tl.dot((p * (slope - delta[:, None])).to(k.dtype), k, input_precision="ieee")
        at = dq_ptr + sample * dq_b + head * dq_h + row.to(tl.int64)[:, None] * dq_l + d[None, :]
        inside = (row < length)[:, None] & (d < SIZE)[None, :]
        tl.store(at, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _key_kernel(
        grad_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, mask_ptr, seed_ptr, dk_ptr, dv_ptr,
        dk_b, dk_h, dk_l, dv_b, dv_h, dv_l,
        g_b, g_h, g_l, q_b, q_h, q_l, k_b, k_h, k_l, v_b, v_h, v_l, mask_b, mask_h, mask_l, mask_s,
        heads, groups, length, keys, scale, gamma, zeta, dropout_p,
        MASK: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
        SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
        ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):  # fmt: skip
        sample = (tl.program_id(1) // groups).to(tl.int64)
        group = (tl.program_id(1) % groups).to(tl.int64)
        column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
        d, dv = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
        k = _tile(k_ptr + sample * k_b + group * k_h, column, d, k_l, keys, SIZE)
        v = _tile(v_ptr + sample * v_b + group * v_h, column, dv, v_l, keys, VALUE_SIZE)
        grad_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
        grad_v = tl.zeros([COLUMNS, VALUE_WIDTH], tl.float32)
        begin = (tl.program_id(0) * COLUMNS) // ROWS * ROWS if CAUSAL else 0
        for member in range(0, heads // groups):  # the query heads that share these keys
            head = group * (heads // groups) + member
            q_at = q_ptr + sample * q_b + head * q_h
            g_at = grad_ptr + sample * g_b + head * g_h
            mask_at = mask_ptr + sample * mask_b + head * mask_h
            pair = sample * heads + head
            seed = tl.load(seed_ptr) + pair.to(tl.int32) if DROPOUT else 0
            for first in range(begin, length, ROWS):
                row = first + tl.arange(0, ROWS)
                q = _tile(q_at, row, d, q_l, length, SIZE)
                grad = _tile(g_at, row, dv, g_l, length, VALUE_SIZE)
                lse = tl.load(lse_ptr + pair * length + row, mask=row < length, other=float("inf"))
                delta = tl.load(delta_ptr + pair * length + row, mask=row < length, other=0.0)
                p, weight, slope = _slopes(
                    q, k, v, grad, lse, row, column, mask_at, mask_l, mask_s, seed, length, keys, scale, gamma, zeta,
                    dropout_p, MASK, CAUSAL, DROPOUT,
                )  # fmt: skip
                grad_v += tl.dot(tl.trans(weight.to(grad.dtype)), grad, input_precision="ieee")
                change = (p * (slope - delta[:, None])).to(q.dtype)
                grad_k += tl.dot(tl.trans(change), q, input_precision="ieee")
        at = dk_ptr + sample * dk_b + group * dk_h + column.to(tl.int64)[:, None] * dk_l + d[None, :]
        inside = (column < keys)[:, None]
        tl.store(at, (grad_k * scale).to(dk_ptr.dtype.element_ty), mask=inside & (d < SIZE)[None, :])
        at = dv_ptr + sample * dv_b + group * dv_h + column.to(tl.int64)[:, None] * dv_l + dv[None, :]
        tl.store(at, grad_v.to(dv_ptr.dtype.element_ty), mask=inside & (dv < VALUE_SIZE)[None, :])
