# SPDX-License-Identifier: Apache-2.0
"""What the drafter's elementwise kernels compute, in plain torch: judge of tests and benchmarks.

They take the kernels' arguments, change none of them, and compute in float64 unless asked
otherwise. They round nothing: a kernel is as good as its distance from this.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last size."""
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def draft_inputs_reference(
    hidden: Tensor,
    *,
    input_norm: Tensor,
    hidden_norm: Tensor,
    eps: float,
    embeds: Tensor | None = None,
    token_ids: Tensor | None = None,
    embed_table: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The normed embedding and the normed hidden state of every token, side by side.

    Args:
        hidden: `[T, H]`.
        input_norm: `[H]`, the weight of the embedding's norm.
        hidden_norm: `[H]`, the weight of the hidden state's norm.
        eps: of both norms.
        embeds: `[T, H]`; or None, and then
        token_ids: `[T]`, and
        embed_table: `[V, H]`. An id outside the table gives a half of zeros.
        dtype: of the computation and of the result.

    Returns:
        `[T, 2 * H]`.
    """
    there = torch.ones(len(hidden), dtype=torch.bool, device=hidden.device)
    if embeds is None:
        assert token_ids is not None
        assert embed_table is not None
        there = (token_ids >= 0) & (token_ids < len(embed_table))
        embeds = embed_table[torch.where(there, token_ids, 0).long()]
    left = rms_norm_reference(embeds, input_norm, eps, dtype=dtype)
    right = rms_norm_reference(hidden, hidden_norm, eps, dtype=dtype)
    return torch.cat([torch.where(there[:, None], left, 0.0), right], -1)


def fc_norm_reference(
    hidden: Tensor, weights: Tensor, eps: float, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Each chunk of `hidden` `[T, n * W]` its own RMSNorm, with the weights `[n, W]`."""
    chunks = hidden.unflatten(-1, tuple(weights.shape))
    return rms_norm_reference(chunks, weights, eps, dtype=dtype).flatten(-2)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """The RMSNorm of `x + residual`, and the sum; both `[T, H]`.

    The norm is of the sum as the dtype of `x` holds it, since that is what is handed on; all else
    is not rounded.
    """
    total = x.to(dtype) + residual.to(dtype)
    return rms_norm_reference(total.to(x.dtype), weight, eps, dtype=dtype), total


def silu_mul_reference(gate_up: Tensor, *, dtype: torch.dtype = torch.float64) -> Tensor:
    """`silu(gate) * up` of `[gate, up]`: `[T, I]` of `[T, 2 * I]`."""
    gate, up = gate_up.to(dtype).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def rope_reference(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    neox: bool,
    position_limit: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Rotary embedding of the first columns of every head.

    Args:
        x: `[T, heads, D]`.
        positions: `[T]`, clamped to the table and to `position_limit`.
        cos_sin: `[P, 2r]`, r cosines and r sines for the first 2r columns; the others stay.
        neox: pair i is columns i and r + i; otherwise 2i and 2i + 1.
        position_limit: how many positions there are; None: P.
        dtype: of the computation and of the result.
    """
    limit = min(len(cos_sin), position_limit or len(cos_sin))
    cos, sin = cos_sin[positions.clamp(0, limit - 1)].to(dtype)[:, None].chunk(2, -1)
    half = cos.shape[-1]
    out = x.to(dtype).clone()
    first = slice(0, half) if neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if neox else slice(1, 2 * half, 2)
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out


def cache_write_reference(
    cache: Tensor, rows: Tensor, slots: Tensor, scale: Tensor | None = None
) -> Tensor:
    """The cache as numbers of the dtype of `rows`, after each row went into its slot.

    Args:
        cache: `[blocks, page, ...]`.
        rows: `[T, ...]`, float64.
        slots: `[T]`: `block * page + offset`; negative writes nothing.
        scale: of an fp8 cache, which holds `value / scale`, at most 448. None: 1.
    """
    out = cache.to(rows.dtype)
    page = cache.shape[1]
    if cache.dtype == torch.float8_e4m3fn:
        rows = (rows / (1.0 if scale is None else scale.to(rows.dtype))).clamp(-FP8_MAX, FP8_MAX)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            out[slot // page, slot % page] = row
    return out


def rope_kv_write_reference(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    neox: bool = True,
    position_limit: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and the caches with keys and values in their slots.

    Args:
        qkv: `[T, (heads + 2 * kv_heads) * head_dim]`.
        positions: as in `rope_reference`.
        cos_sin: as in `rope_reference`.
        slots: as in `cache_write_reference`.
        k_cache: `[blocks, page, kv_heads, head_dim]`.
        v_cache: as `k_cache`.
        heads: query heads.
        kv_heads: key heads.
        head_dim: columns of a head.
        neox: as in `rope_reference`.
        position_limit: as in `rope_reference`.
        k_scale: as in `cache_write_reference`.
        v_scale: as in `cache_write_reference`.
        dtype: of the computation and of the results.

    Returns:
        Queries `[T, heads, head_dim]`, keys `[T, kv_heads, head_dim]`, and both caches.
    """
    q, k, v = qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], 1)
    keywords = {"neox": neox, "position_limit": position_limit, "dtype": dtype}
    q = rope_reference(q, positions, cos_sin, **keywords)
    k = rope_reference(k, positions, cos_sin, **keywords)
    return (
        q,
        k,
        cache_write_reference(k_cache, k, slots, k_scale),
        cache_write_reference(v_cache, v.to(dtype), slots, v_scale),
    )


def mla_latents_reference(
    qkv_a: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    slots: Tensor,
    kv_cache: Tensor,
    *,
    q_lora_rank: int,
    kv_lora_rank: int,
    rope_dim: int,
    q_norm: Tensor,
    kv_norm: Tensor,
    eps: float,
    position_limit: int | None = None,
    kv_scale: Tensor | None = None,
    neox: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Both latents normed, the key's rotary part rotated, and the cache with the rows in it.

    Args:
        qkv_a: `[T, Q + R + P]`: the queries' latent, the keys' and values', the rotary part.
        positions: as in `rope_reference`.
        cos_sin: as in `rope_reference`, `[.., P]`.
        slots: as in `cache_write_reference`.
        kv_cache: `[blocks, page, R + P]`.
        q_lora_rank: Q.
        kv_lora_rank: R.
        rope_dim: P.
        q_norm: `[Q]`, the weight of the queries' norm.
        kv_norm: `[R]`, the weight of the latent's norm.
        eps: of both norms.
        position_limit: as in `rope_reference`.
        kv_scale: as in `cache_write_reference`.
        neox: as in `rope_reference`.
        dtype: of the computation and of the results.

    Returns:
        The normed latent of the queries `[T, Q]`, the rows for the cache `[T, R + P]` (before the
        scale), and the cache.
    """
    q, kv, key = qkv_a.split([q_lora_rank, kv_lora_rank, rope_dim], -1)
    key = rope_reference(
        key[:, None], positions, cos_sin, neox=neox, position_limit=position_limit, dtype=dtype
    )[:, 0]
    rows = torch.cat([rms_norm_reference(kv, kv_norm, eps, dtype=dtype), key], -1)
    return (
        rms_norm_reference(q, q_norm, eps, dtype=dtype),
        rows,
        cache_write_reference(kv_cache, rows, slots, kv_scale),
    )


def mla_rope_q_reference(
    q: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    nope_dim: int,
    rope_dim: int,
    position_limit: int | None = None,
    neox: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The two parts of `q` `[T, heads, nope_dim + rope_dim]`, the second rotated."""
    nope, rope = q.split([nope_dim, rope_dim], -1)
    keywords = {"neox": neox, "position_limit": position_limit, "dtype": dtype}
    return nope.to(dtype), rope_reference(rope, positions, cos_sin, **keywords)
