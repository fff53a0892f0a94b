# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of queries and keys, and the write into the paged KV cache, in one kernel.

Stock has a kernel for each, and the second waits for the first. The caches are taken as views with
any strides of block, token and head, so that every layout that the attention back-ends have is the
same to it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .rows import (
    FLOATS,
    cache_value,
    check,
    check_cache,
    cos_and_sin,
    pair_columns,
    rotated,
    usable_positions,
)

__all__ = ["rope_kv_write"]

_HEADS = 8  # Heads of a program.
_WARPS = 4


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slots: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    neox: bool = True,
    position_limit: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    page_size: int | None = None,
) -> torch.Tensor:
    """Rotate queries and keys in place, and write keys and values into their slots.

    With D = ``head_dim`` and 2r the width of ``cos_sin``, pair i of a head is its columns
    (i, r + i), or (2i, 2i + 1) if not ``neox``; columns from 2r on stay as they are. A pair is
    turned in float32 and rounded once.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * D], bfloat16, float16 or float32, last stride 1.
        positions: [T] int32 or int64; clamped to the rows of ``cos_sin`` and ``position_limit``.
        cos_sin: [P, 2r], cosines and then sines, bfloat16, float16 or float32, last stride 1.
        slots: [T] int32 or int64: ``block * page_size + offset``; negative writes nothing.
        k_cache: [blocks, page_size, kv_heads, D], last stride 1, in the dtype of ``qkv`` or
            float8_e4m3fn. None, with ``slots`` and ``v_cache``, rotates only.
        v_cache: as ``k_cache``.
        heads: query heads.
        kv_heads: key heads.
        head_dim: columns of a head.
        neox: which columns are a pair.
        position_limit: positions from here on count as the last one before it.
        k_scale: one float32 on the device; an fp8 cache holds ``value / scale``, cut off at 448.
        v_scale: as ``k_scale``.
        page_size: tokens of a block.

    Returns:
        The rotated queries, [T, heads, D], a view of ``qkv``; its keys are rotated too.

    Raises:
        ValueError: a shape, dtype or stride that it cannot take, or fp8 below capability 8.9.
    """
    tokens = qkv.shape[0]
    rows, rot = cos_sin.shape
    check("qkv", qkv, (tokens, (heads + 2 * kv_heads) * head_dim), FLOATS)
    check("positions", positions, (tokens,), (torch.int32, torch.int64))
    check("cos_sin", cos_sin, (rows, rot), FLOATS)
    if rot % 2 or not 0 < rot <= head_dim or not rows:
        raise ValueError(
            f"cos_sin is {rows} x {rot}; a head of {head_dim} needs an even part of it"
        )
    limit = usable_positions(rows, position_limit)
    k_strides: tuple[int, ...] = (0, 0, 0)
    v_strides: tuple[int, ...] = (0, 0, 0)
    if slots is not None and k_cache is not None and v_cache is not None:
        check("slots", slots, (tokens,), (torch.int32, torch.int64))
        if page_size is None:
            page_size = k_cache.shape[1]
        check_cache("k_cache", k_cache, (page_size, kv_heads, head_dim), qkv.dtype, k_scale)
        check_cache("v_cache", v_cache, (page_size, kv_heads, head_dim), qkv.dtype, v_scale)
        k_strides, v_strides = k_cache.stride()[:3], v_cache.stride()[:3]
    elif slots is not None or k_cache is not None or v_cache is not None:
        raise ValueError("of slots, k_cache and v_cache some are None and some are not")
    group = min(_HEADS, triton.next_power_of_2(heads))
    kv_group = min(_HEADS, triton.next_power_of_2(kv_heads))
    q_groups = triton.cdiv(heads, group)
    if tokens:
        _rope_kv_write[(tokens, q_groups + triton.cdiv(kv_heads, kv_group))](
            qkv,
            positions,
            cos_sin,
            slots,
            k_cache,
            v_cache,
            k_scale,
            v_scale,
            limit,
            qkv.stride(0),
            cos_sin.stride(0),
            *k_strides,
            *v_strides,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF=rot // 2,
            NEOX=neox,
            PAGE=page_size or 1,
            GROUP=group,
            KV_GROUP=kv_group,
            Q_GROUPS=q_groups,
            BLOCK_HALF=triton.next_power_of_2(rot // 2),
            BLOCK_REST=triton.next_power_of_2(max(head_dim - rot, 1)),
            BLOCK_DIM=triton.next_power_of_2(head_dim),
            num_warps=_WARPS,
        )
    return qkv[:, : heads * head_dim].unflatten(1, (heads, head_dim))


@triton.jit
def rotate_heads(
    heads,
    there,
    cos_sin,
    position,
    limit,
    stride_cos_sin,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate the heads that begin at the pointers ``heads``, in place; returns both members."""
    pairs = tl.arange(0, BLOCK_HALF)
    first, second = pair_columns(pairs, HALF, NEOX)
    mask = there[:, None] & (pairs < HALF)[None, :]
    firsts = heads[:, None] + first[None, :]
    seconds = heads[:, None] + second[None, :]
    a = tl.load(firsts, mask=mask, other=0.0)
    b = tl.load(seconds, mask=mask, other=0.0)
    cos, sin = cos_and_sin(cos_sin, position, limit, stride_cos_sin, pairs, HALF)
    a, b = rotated(a, b, cos[None, :], sin[None, :], heads.dtype.element_ty)
    # A small tile is in several threads at once: each has to read it before one overwrites it.
    tl.debug_barrier()
    tl.store(firsts, a, mask=mask)
    tl.store(seconds, b, mask=mask)
    return a, b


@triton.jit(
    do_not_specialize=["limit"],
    do_not_specialize_on_alignment=["positions", "slots", "k_scale", "v_scale"],
)
def _rope_kv_write(
    qkv,
    positions,
    cos_sin,
    slots,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
    limit,
    stride_qkv,
    stride_cos_sin,
    stride_k_block,
    stride_k_token,
    stride_k_head,
    stride_v_block,
    stride_v_token,
    stride_v_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_GROUP: tl.constexpr,
    Q_GROUPS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Program (token, group): some query heads, or some key heads and their values."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = qkv + token * stride_qkv
    position = tl.load(positions + token)
    if group < Q_GROUPS:
        q_head = group * GROUP + tl.arange(0, GROUP)
        queries = row + q_head * HEAD_DIM
        rotate_heads(
            queries, q_head < HEADS, cos_sin, position, limit, stride_cos_sin,
            HALF, NEOX, BLOCK_HALF,
        )  # fmt: skip
    else:
        head = (group - Q_GROUPS) * KV_GROUP + tl.arange(0, KV_GROUP)
        there = head < KV_HEADS
        keys = row + (HEADS + head) * HEAD_DIM
        if slots is None:
            rotate_heads(
                keys, there, cos_sin, position, limit, stride_cos_sin, HALF, NEOX, BLOCK_HALF
            )
        else:
            slot = tl.load(slots + token).to(tl.int64)
            cols = tl.arange(0, BLOCK_DIM)
            values = keys + KV_HEADS * HEAD_DIM
            mask = there[:, None] & (cols < HEAD_DIM)[None, :]
            v = tl.load(values[:, None] + cols[None, :], mask=mask, other=0.0)
            rest = 2 * HALF + tl.arange(0, BLOCK_REST)
            rest_mask = there[:, None] & (rest < HEAD_DIM)[None, :]
            if 2 * HALF < HEAD_DIM:
                k_rest = tl.load(keys[:, None] + rest[None, :], mask=rest_mask, other=0.0)
            a, b = rotate_heads(
                keys, there, cos_sin, position, limit, stride_cos_sin, HALF, NEOX, BLOCK_HALF
            )

            # No scalar in the mask: Triton 3.9's interpreter does not take one there.
            put = (head < tl.where(slot >= 0, KV_HEADS, 0))[:, None]
            block = slot // PAGE
            offset = slot % PAGE
            far = head.to(tl.int64)
            k_to = k_cache + (block * stride_k_block + offset * stride_k_token)
            k_to = (k_to + far * stride_k_head)[:, None]
            v_to = v_cache + (block * stride_v_block + offset * stride_v_token)
            v_to = (v_to + far * stride_v_head)[:, None]
            k_type = k_cache.dtype.element_ty
            v_type = v_cache.dtype.element_ty
            pairs = tl.arange(0, BLOCK_HALF)
            first, second = pair_columns(pairs, HALF, NEOX)
            pair_mask = put & (pairs < HALF)[None, :]
            tl.store(k_to + first[None, :], cache_value(a, k_scale, k_type), mask=pair_mask)
            tl.store(k_to + second[None, :], cache_value(b, k_scale, k_type), mask=pair_mask)
            if 2 * HALF < HEAD_DIM:
                k_rest = cache_value(k_rest, k_scale, k_type)
                tl.store(k_to + rest[None, :], k_rest, mask=rest_mask & put)
            tl.store(v_to + cols[None, :], cache_value(v, v_scale, v_type), mask=mask & put)
