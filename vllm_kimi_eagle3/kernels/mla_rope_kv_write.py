# SPDX-License-Identifier: Apache-2.0
"""What an MLA drafter does between its projections: two norms, rotary embedding, the cache write.

Stock has a kernel for each norm, one for the rotation of queries and keys and one for the write.
The queries' rotary part is there only after ``q_b_proj``, so these are two kernels and not one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rope_kv_write import rotate_heads
from .rows import (
    FLOATS,
    cache_value,
    check,
    check_cache,
    cos_and_sin,
    pair_columns,
    rms_normed,
    rotated,
    row_warps,
    usable_positions,
)

__all__ = ["mla_latents", "mla_rope_q"]

_HEADS = 8  # Heads of a program.


def mla_latents(
    qkv_a: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor | None,
    kv_cache: torch.Tensor | None,
    *,
    q_lora_rank: int,
    kv_lora_rank: int,
    rope_dim: int,
    q_norm: torch.Tensor,
    kv_norm: torch.Tensor,
    eps: float,
    page_size: int | None = None,
    position_limit: int | None = None,
    kv_scale: torch.Tensor | None = None,
    neox: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm both latents, rotate the key's rotary part, and write the cache row.

    With Q, R and P the three widths, a row of ``qkv_a`` is [queries' latent Q | latent R | rotary
    part of the key P]. The cache row is [normed latent R | rotated key P].

    Args:
        qkv_a: [T, Q + R + P], bfloat16, float16 or float32, last stride 1. Its last R + P columns
            are replaced by what goes into the cache (before its scale).
        positions: [T] int32 or int64; clamped to the rows of ``cos_sin`` and ``position_limit``.
        cos_sin: [rows, P], cosines and then sines, bfloat16, float16 or float32, last stride 1.
        slots: [T] int32 or int64: ``block * page_size + offset``; negative writes nothing.
        kv_cache: [blocks, page_size, R + P], last stride 1, in the dtype of ``qkv_a`` or
            float8_e4m3fn. None, with ``slots``, writes to ``qkv_a`` only.
        q_lora_rank: Q.
        kv_lora_rank: R.
        rope_dim: P.
        q_norm: [Q], the weight of the queries' norm.
        kv_norm: [R], the weight of the latent's norm.
        eps: of both norms.
        page_size: tokens of a block.
        position_limit: positions from here on count as the last one before it.
        kv_scale: one float32 on the device; an fp8 cache holds ``value / scale``, cut off at 448.
        neox: whether a pair is columns (i, P / 2 + i), or (2i, 2i + 1).
        out: [T, Q] in the dtype of ``qkv_a``, last stride 1; made if None. It may be the first Q
            columns of ``qkv_a``.

    Returns:
        ``out``, the normed latents of the queries.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take, or fp8 below capability 8.9.
    """
    tokens = qkv_a.shape[0]
    width = q_lora_rank + kv_lora_rank + rope_dim
    check("qkv_a", qkv_a, (tokens, width), FLOATS)
    check("q_norm", q_norm, (q_lora_rank,), FLOATS)
    check("kv_norm", kv_norm, (kv_lora_rank,), FLOATS)
    limit = _check_rope(positions, cos_sin, tokens, rope_dim, position_limit)
    strides: tuple[int, ...] = (0, 0)
    if slots is not None and kv_cache is not None:
        check("slots", slots, (tokens,), (torch.int32, torch.int64))
        if page_size is None:
            page_size = kv_cache.shape[1]
        row = kv_lora_rank + rope_dim
        check_cache("kv_cache", kv_cache, (page_size, row), qkv_a.dtype, kv_scale)
        strides = kv_cache.stride()[:2]
    elif slots is not None or kv_cache is not None:
        raise ValueError("of slots and kv_cache one is None and the other is not")
    if out is None:
        out = qkv_a.new_empty(tokens, q_lora_rank)
    check("out", out, (tokens, q_lora_rank), qkv_a.dtype)
    if tokens == 0:
        return out
    _mla_latents[(tokens, 2)](
        qkv_a,
        positions,
        cos_sin,
        slots,
        kv_cache,
        q_norm,
        kv_norm,
        out,
        kv_scale,
        eps,
        limit,
        qkv_a.stride(0),
        cos_sin.stride(0),
        *strides,
        out.stride(0),
        Q_RANK=q_lora_rank,
        RANK=kv_lora_rank,
        HALF=rope_dim // 2,
        NEOX=neox,
        PAGE=page_size or 1,
        BLOCK_Q=triton.next_power_of_2(q_lora_rank),
        BLOCK_R=triton.next_power_of_2(kv_lora_rank),
        BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        num_warps=row_warps(max(q_lora_rank, kv_lora_rank)),
    )
    return out


def mla_rope_q(
    q: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    nope_dim: int,
    rope_dim: int,
    position_limit: int | None = None,
    neox: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the rotary part of the queries in place.

    Args:
        q: [T, heads, nope_dim + rope_dim], bfloat16, float16 or float32, last stride 1.
        positions: as in :func:`mla_latents`.
        cos_sin: as in :func:`mla_latents`.
        nope_dim: columns of a head without position.
        rope_dim: columns of a head after them, which are rotated.
        position_limit: as in :func:`mla_latents`.
        neox: as in :func:`mla_latents`.

    Returns:
        [T, heads, nope_dim] and [T, heads, rope_dim], views of ``q``.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take.
    """
    tokens, heads, _ = q.shape
    check("q", q, (tokens, heads, nope_dim + rope_dim), FLOATS)
    limit = _check_rope(positions, cos_sin, tokens, rope_dim, position_limit)
    q_pe = q[..., nope_dim:]
    group = min(_HEADS, triton.next_power_of_2(heads))
    if tokens:
        _mla_rope_q[(tokens, triton.cdiv(heads, group))](
            q,
            positions,
            cos_sin,
            limit,
            q.stride(0),
            q.stride(1),
            cos_sin.stride(0),
            HEADS=heads,
            NOPE=nope_dim,
            HALF=rope_dim // 2,
            NEOX=neox,
            GROUP=group,
            BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
            num_warps=2,
        )
    return q[..., :nope_dim], q_pe


def _check_rope(
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    tokens: int,
    rope_dim: int,
    position_limit: int | None,
) -> int:
    """Check what the rotation needs; returns how many positions there are."""
    check("positions", positions, (tokens,), (torch.int32, torch.int64))
    check("cos_sin", cos_sin, (cos_sin.shape[0], rope_dim), FLOATS)
    if rope_dim % 2 or rope_dim <= 0 or not cos_sin.shape[0]:
        raise ValueError(f"cos_sin is {tuple(cos_sin.shape)}; it needs rows, of an even width")
    return usable_positions(cos_sin.shape[0], position_limit)


@triton.jit(
    do_not_specialize=["limit"],
    do_not_specialize_on_alignment=["positions", "slots", "kv_scale"],
)
def _mla_latents(
    qkv_a,
    positions,
    cos_sin,
    slots,
    kv_cache,
    q_norm,
    kv_norm,
    out,
    kv_scale,
    eps,
    limit,
    stride_qkv_a,
    stride_cos_sin,
    stride_block,
    stride_token,
    stride_out,
    Q_RANK: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (token, part): the latent of its queries, or all of its cache row."""
    token = tl.program_id(0).to(tl.int64)
    row = qkv_a + token * stride_qkv_a
    dtype = qkv_a.dtype.element_ty
    if tl.program_id(1) == 0:
        q_cols = tl.arange(0, BLOCK_Q)
        q_mask = q_cols < Q_RANK
        q = tl.load(row + q_cols, mask=q_mask, other=0.0)
        q_weight = tl.load(q_norm + q_cols, mask=q_mask, other=0.0)
        q = rms_normed(q, q_weight, eps, Q_RANK).to(dtype)
        tl.store(out + token * stride_out + q_cols, q, mask=q_mask)
    else:
        position = tl.load(positions + token)
        if slots is not None:
            slot = tl.load(slots + token).to(tl.int64)
        cols = tl.arange(0, BLOCK_R)
        mask = cols < RANK
        latents = row + Q_RANK
        x = tl.load(latents + cols, mask=mask, other=0.0)
        weight = tl.load(kv_norm + cols, mask=mask, other=0.0)
        key = latents + RANK
        pairs = tl.arange(0, BLOCK_HALF)
        pair_mask = pairs < HALF
        first, second = pair_columns(pairs, HALF, NEOX)
        a = tl.load(key + first, mask=pair_mask, other=0.0)
        b = tl.load(key + second, mask=pair_mask, other=0.0)
        cos, sin = cos_and_sin(cos_sin, position, limit, stride_cos_sin, pairs, HALF)
        a, b = rotated(a, b, cos, sin, dtype)
        x = rms_normed(x, weight, eps, RANK).to(dtype)
        # A small tile is in several threads at once: each has to read it before one overwrites it.
        tl.debug_barrier()
        tl.store(latents + cols, x, mask=mask)
        tl.store(key + first, a, mask=pair_mask)
        tl.store(key + second, b, mask=pair_mask)
        if slots is not None:
            # No scalar in the masks: Triton 3.9's interpreter does not take one there.
            put = cols < tl.where(slot >= 0, RANK, 0)
            put_pairs = pairs < tl.where(slot >= 0, HALF, 0)
            held = kv_cache.dtype.element_ty
            to = kv_cache + slot // PAGE * stride_block + slot % PAGE * stride_token
            tl.store(to + cols, cache_value(x, kv_scale, held), mask=put)
            to = to + RANK
            tl.store(to + first, cache_value(a, kv_scale, held), mask=put_pairs)
            tl.store(to + second, cache_value(b, kv_scale, held), mask=put_pairs)


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["positions"])
def _mla_rope_q(
    q,
    positions,
    cos_sin,
    limit,
    stride_token,
    stride_head,
    stride_cos_sin,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Program (token, group): some heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    heads = q + token * stride_token + head.to(tl.int64) * stride_head + NOPE
    position = tl.load(positions + token)
    rotate_heads(
        heads, head < HEADS, cos_sin, position, limit, stride_cos_sin, HALF, NEOX, BLOCK_HALF
    )
